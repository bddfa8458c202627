"""Norms and biases, stepped together: as many launches as one tensor takes, not as many as all.

A plain parameter under SMALL numbers waits until the others have stepped. Those that share their
settings, dtype and age are then laid end to end, stepped by the same arithmetic, and put back. The
state stays one entry a parameter, so files do not depend on who was stepped with whom.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hirank.optim import rules, sharded, weights
from hirank.optim.hyper import Hyper
from hirank.optim.rules import Outcome
from hirank.optim.sharded import Norm
from hirank.optim.state import FIRST, SECOND, SMALL

__all__ = ["batches", "is_small", "step_together"]

State = dict[str, Any]


def is_small(p: Tensor, hyper: Hyper) -> bool:
    """Whether p is plain and so small that its moments are in full precision in any case."""
    return (
        p.numel() < SMALL
        and not isinstance(p, weights.Int8Weight)
        and not rules.is_projected(p, hyper)
    )


def batches(
    members: Iterable[tuple[Tensor, Tensor, State, Hyper]],
) -> list[list[tuple[Tensor, Tensor, State, Hyper]]]:
    """Members (parameter, gradient, state, settings) that can be stepped together, in order."""
    found: dict[Any, list[tuple[Tensor, Tensor, State, Hyper]]] = {}
    for p, grad, state, hyper in members:
        key = (hyper, p.device, p.dtype, grad.dtype, state.get("age", 0), sharded.spread(p))
        found.setdefault(key, []).append((p, grad, state, hyper))
    return list(found.values())


def step_together(members: list[tuple[Tensor, Tensor, State, Hyper]]) -> Outcome:
    """One AdamW step of each member of a batch, in place.

    Returns:
        `ok` is a bool [len(members)]: whose gradient was finite. The others are as before. The norm
        is that of all gradients.
    """
    params, grads, states, hypers = zip(*members, strict=True)
    hyper: Hyper = hypers[0]
    parts = [sharded.local(p).detach() for p in params]
    flats = [sharded.local(grad).reshape(-1) for grad in grads]
    for part, state in zip(parts, states, strict=True):
        rules.start(state, part.shape, part, hyper)
    norms = _norms(flats)
    ok = sharded.everywhere(rules.finite(norms), params[0])
    each = torch.cat([one.expand(len(f)) for one, f in zip(ok.unbind(), flats, strict=True)])
    kept = {name: torch.cat([s[name].view(-1) for s in states]) for name in (FIRST, SECOND)}
    target = torch.cat([part.reshape(-1) for part in parts])
    _step(target, torch.cat(flats), each, kept, params[0], list(states), hyper)
    _put_back(parts, target)
    for name, values in kept.items():
        _put_back([state[name] for state in states], values)
    return Outcome(ok, Norm(torch.linalg.vector_norm(norms), sharded.spread(params[0])))


def _step(
    target: Tensor,
    grad: Tensor,
    ok: Tensor,
    kept: dict[str, Tensor],
    first: Tensor,
    states: list[State],
    hyper: Hyper,
) -> None:
    """All of it flat [n]; `ok` for each number."""
    wide, span = torch.promote_types(target.dtype, torch.float32), slice(0, target.numel())
    draw, round_w = rules.seeds(first, states[0], hyper)
    for state in states:
        state["step"], state["age"] = state["step"] + 1, state["age"] + 1
    joined: State = {**kept, "age": states[0]["age"]}
    direction = rules.adam_direction(grad.to(wide), joined, hyper, span, ok, draw)
    weights.move(target, span, direction, hyper.lr, rules.kept(ok, hyper, wide), round_w)


def _norms(flats: list[Tensor]) -> Tensor:
    """[k], in fp32 at least; of a tensor without numbers (a shard may be one) 0."""
    wide = torch.promote_types(flats[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(flats, 2, dtype=wide))


def _put_back(parts: list[Tensor], flat: Tensor) -> None:
    pieces = torch.split(flat, [part.numel() for part in parts])
    shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
    torch._foreach_copy_(parts, shaped)

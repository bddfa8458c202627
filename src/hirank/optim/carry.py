"""Moments across a change of basis: kept, projected, or started again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hirank.optim import bases
from hirank.optim import state as moments
from hirank.optim.bases import Basis, Layout
from hirank.optim.dice import MOMENTS, seed_of
from hirank.optim.hyper import Hyper
from hirank.optim.state import FIRST, SECOND

__all__ = ["refresh"]

State = dict[str, Any]


def refresh(state: State, grad: Tensor, where: Layout, hyper: Hyper) -> None:
    """A new basis from `grad` [m, n], and the moments as `hyper.moments` says."""
    changed = bases.refresh(state, grad, where, hyper)
    if changed is None or hyper.moments == "keep":
        return
    if hyper.moments == "reset":
        state["age"] = 0
        values = [grad.new_zeros(where.reduced, dtype=torch.float32)] * 2
    else:
        values = _carried(state, where, hyper, *changed)
    draw = seed_of(hyper.seed, state["step"], state["index"], MOMENTS, 1)
    ok = torch.ones((), dtype=torch.bool, device=grad.device)
    for name, value in zip((FIRST, SECOND), values, strict=True):
        for span in moments.spans(value.numel()):
            moments.write(state, name, span, value.reshape(-1)[span], ok, draw)


def _carried(state: State, where: Layout, hyper: Hyper, old: Basis, new: Basis) -> list[Tensor]:
    """M and V in the new coordinates. V is turned as the variance of independent coordinates, plus
    the square of the mean; both on the bias-corrected scale."""
    size = math.prod(where.reduced)
    m, v = (moments.read(state, n, slice(0, size)).view(where.reduced) for n in (FIRST, SECOND))
    b1, b2 = (1 - beta ** state["age"] for beta in hyper.betas)
    mean, spread = m / b1, (v / b2 - (m / b1).square()).clamp_min_(0)
    for side, a, b in (("left", old.left, new.left), ("right", old.right, new.right)):
        if a is None or b is None:
            continue
        turn = b.T.to(m.dtype) @ a.to(m.dtype)  # [r, r], new <- old
        if side == "left":
            mean, spread = turn @ mean, turn.square() @ spread
        else:
            mean, spread = mean @ turn.T, spread @ turn.square().T
    return [mean * b1, (spread + mean.square()) * b2]

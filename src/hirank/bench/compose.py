"""Suite `compose`: joining base and adapter outputs, and its gradients, against a plain copy.

    plain, compiled, hirank    y + (g - 1) base + g s lora      as dropout needs it
    hirank-stacked             g u                              as a second adapter needs it

`bytes_per_s` counts what the operation must move at least: forward the inputs and an output;
backward reads dout and what dm needs, and writes the gradients that are not dout itself. A copy
reads one and writes one. `compiled` is the plain form through torch.compile, on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.bench import arms as arms_
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Compose
from hirank.bench.timing import Sample, calls
from hirank.kernels.dora_compose import dora_compose

__all__ = ["ARMS", "run"]

# tensors of [M, N] that each moves
_MOVED = {
    "copy": 2,
    "plain-forward": 4,
    "compiled-forward": 4,
    "hirank-forward": 4,
    "hirank-stacked-forward": 2,
    "plain-forward-backward": 4 + 5,
    "compiled-forward-backward": 4 + 5,
    "hirank-forward-backward": 4 + 5,
    "hirank-stacked-forward-backward": 2 + 3,
}
ARMS = tuple(_MOVED)
_SCALE = 2.0

Join = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _plain(y: Tensor, base: Tensor, lora: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
    """As PEFT writes it, one operation after the other."""
    gain = magnitude / norm
    return (y + ((gain - 1) * base + gain * lora * _SCALE)).to(y.dtype)


def _ours(y: Tensor, base: Tensor, lora: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
    return dora_compose(base, lora, magnitude, norm, scale=_SCALE, y=y)


def _stacked(u: Tensor, magnitude: Tensor, norm: Tensor) -> Tensor:
    return dora_compose(None, u, magnitude, norm, scale=1)


def run(settings: Compose, session: Session) -> list[Result]:
    """All ways over one [tokens, features] tensor, in the base dtype."""
    device, dtype = session.device, arms_.base_dtype(session.device)
    shape = (settings.tokens, settings.features)
    y, base, lora, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    norm = 0.5 + torch.rand(settings.features, device=device)
    magnitude = norm * (1 + 0.1 * torch.randn(settings.features, device=device))
    ways = _ways((y, base, lora, magnitude, norm), dout)

    def step_of(name: str) -> Callable[[], Sample]:
        def step() -> Sample:
            seconds = calls(ways[name], settings.calls, device)
            return {"call_s": seconds, "bytes_per_s": _MOVED[name] * y.nbytes / seconds}

        return step

    chosen = [name for name in session.chosen(ARMS) if name in ways]
    _, samples = session.measure({name: step_of(name) for name in chosen})
    return results(samples, "call_s")


def _ways(inputs: Sequence[Tensor], dout: Tensor) -> dict[str, Callable[[], Any]]:
    y, _, _, magnitude, norm = inputs
    target = torch.empty_like(y)
    ways: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(y)}
    joins: dict[str, Join] = {"plain": _plain, "hirank": _ours}
    if y.is_cuda:
        torch.compiler.reset()  # another shape must not make this one's code general
        joins["compiled"] = torch.compile(_plain)
    for name, join in joins.items():
        ways |= _both(name, join, inputs, dout)
    return ways | _both("hirank-stacked", _stacked, (y, magnitude, norm), dout)


def _both(
    name: str, join: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor
) -> dict[str, Callable[[], Any]]:
    """Forward alone, and with the gradients of all inputs but the norm."""
    *varying, norm = inputs
    leaves = [tensor.clone().requires_grad_() for tensor in varying]
    return {
        f"{name}-forward": lambda: join(*inputs),
        f"{name}-forward-backward": lambda: torch.autograd.grad(join(*leaves, norm), leaves, dout),
    }

"""Suite `compose`: joining base and adapter outputs, and its gradients, against a plain copy.

`bytes_per_s` counts what the operation must move at least: two inputs and an output forward;
backward reads dout and both inputs and writes two gradients. A copy reads one and writes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hirank.bench import arms as arms_
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Compose
from hirank.bench.timing import Sample, calls
from hirank.kernels.dora_compose import dora_compose

__all__ = ["ARMS", "run"]

ARMS = (
    "copy",
    "plain-forward",
    "hirank-forward",
    "plain-forward-backward",
    "hirank-forward-backward",
)
_SCALE = 2.0
_MOVED = {"copy": 2, "forward": 3, "backward": 8}  # tensors of [M, N], forward and backward: 3 + 5

Join = Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain(base: Tensor, lora: Tensor, gain: Tensor) -> Tensor:
    """(g - 1) base + g s lora as PEFT writes it, one operation after the other."""
    return (gain - 1) * base + gain * lora * _SCALE


def _ours(base: Tensor, lora: Tensor, gain: Tensor) -> Tensor:
    return dora_compose(base, lora, gain, scale=_SCALE)


def run(settings: Compose, session: Session) -> list[Result]:
    """All ways over one [tokens, features] tensor, in the base dtype."""
    device, dtype = session.device, arms_.base_dtype(session.device)
    shape = (settings.tokens, settings.features)
    base, lora = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    gain = 1 + 0.1 * torch.randn(settings.features, device=device)
    dout = torch.randn_like(base)
    ways = _ways(base, lora, gain, dout)

    def step_of(name: str) -> Callable[[], Sample]:
        tensors = _MOVED[name.rpartition("-")[2]]

        def step() -> Sample:
            seconds = calls(ways[name], settings.calls, device)
            return {"call_s": seconds, "bytes_per_s": tensors * base.nbytes / seconds}

        return step

    _, samples = session.measure({name: step_of(name) for name in session.chosen(ARMS)})
    return results(samples, "call_s")


def _ways(base: Tensor, lora: Tensor, gain: Tensor, dout: Tensor) -> dict[str, Callable[[], Any]]:
    target = torch.empty_like(base)
    leaves = [tensor.clone().requires_grad_() for tensor in (base, lora, gain)]

    def backward(join: Join) -> Any:
        out = join(*leaves)
        return torch.autograd.grad(out, leaves, dout.to(out.dtype))

    return {
        "copy": lambda: target.copy_(base),
        "plain-forward": lambda: _plain(base, lora, gain),
        "hirank-forward": lambda: _ours(base, lora, gain),
        "plain-forward-backward": lambda: backward(_plain),
        "hirank-forward-backward": lambda: backward(_ours),
    }

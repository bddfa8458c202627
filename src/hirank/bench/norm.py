"""Suite `norm`: the row norm of W + s B A by hirank, and by every other way there is.

`identity` is PEFT's: an identity matrix through A and B. `dense` forms B A. `factored` is the plain
PyTorch form that never does, in fp32 and with ||W||^2 kept: what `hirank` itself runs on a CPU.

`rate` is what a way does of the FLOPs 2 N K R that any way needs at least, each second; the arm
`matmul` is a plain matrix product of the same FLOPs, measured in the same turns, as the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.bench import arms as arms_
from hirank.bench.gate import relative_rms
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Norm
from hirank.bench.shapes import linears
from hirank.bench.timing import Sample, calls
from hirank.kernels.dora_norm import dora_norm, dora_norm_ref, row_square_sum

__all__ = ["ARMS", "run"]

ARMS = ("matmul", "identity", "dense", "factored", "hirank")
_SCALE = 2.0


def run(settings: Norm, session: Session) -> list[Result]:
    """Every way on every shape of the set; the shape is part of an arm's metrics."""
    found = []
    for n_in, n_out in linears(settings.shape):
        shape = {"in": n_in, "out": n_out}
        for result in _one_shape(n_in, n_out, settings, session):
            found.append(Result(result.arm, result.metrics | shape))
    return found


def _one_shape(n_in: int, n_out: int, settings: Norm, session: Session) -> list[Result]:
    device, dtype = session.device, arms_.base_dtype(session.device)
    draw = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, size: float) -> Tensor:
        noise = torch.randn(rows, columns, generator=draw, device=device)
        return (noise * size).to(dtype)

    weight = normal(n_out, n_in, n_in**-0.5)
    A = normal(settings.rank, n_in, n_in**-0.5)
    B = normal(n_out, settings.rank, 0.05 * settings.rank**-0.5)
    ways = _ways(weight, A, B)
    truth = (weight.double() + _SCALE * B.double() @ A.double()).norm(dim=1)
    flops = 2.0 * n_in * n_out * settings.rank

    def step_of(way: Callable[[], Tensor]) -> Callable[[], Sample]:
        def step() -> Sample:
            seconds = calls(way, settings.calls, device)
            return {"call_s": seconds, "rate": flops / seconds}

        return step

    chosen = {name: ways[name] for name in session.chosen(ARMS)}
    _, samples = session.measure({name: step_of(way) for name, way in chosen.items()})
    more = {name: _facts(name, ways[name], truth, device) for name in samples}
    return results(samples, "call_s", more=more)


@torch.no_grad()
def _ways(weight: Tensor, A: Tensor, B: Tensor) -> dict[str, Callable[[], Tensor]]:
    base_sq = row_square_sum(weight)
    return {
        "matmul": lambda: B @ A,
        "identity": lambda: _identity(weight, A, B),
        "dense": lambda: torch.linalg.vector_norm(weight + _SCALE * (B @ A), dim=1),
        "factored": lambda: dora_norm_ref(weight, A, B, _SCALE, base_sq),
        "hirank": lambda: dora_norm(weight, A, B, scale=_SCALE),
    }


def _identity(weight: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """B A as two linears applied to an identity matrix, the way that FSDP's hooks see it."""
    eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    product = F.linear(F.linear(eye, A), B).T
    norm: Tensor = torch.linalg.vector_norm(weight + _SCALE * product, dim=1)
    return norm


def _facts(
    name: str, way: Callable[[], Tensor], truth: Tensor, device: torch.device
) -> dict[str, Any]:
    """Error against fp64, and on a GPU the working memory of a call."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        way()
        facts["working_bytes"] = torch.cuda.max_memory_allocated(device) - before
    if name != "matmul":
        facts["error"] = relative_rms(way(), truth)
    return facts

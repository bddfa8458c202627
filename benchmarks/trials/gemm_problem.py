"""The products that are timed: settings and operands of a linear layer, and what cuBLAS does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels.gain_pass import gain_forward_

__all__ = ["Problem", "Trial", "base", "joined", "layer", "make", "reference", "small"]


@dataclass(frozen=True)
class Problem:
    """out [M, N] = g (a1 b1 + a2 b2) + bias, or without the epilogue."""

    a1: Tensor  # [M, K1]
    b1: Tensor  # [N, K1] by column, else [K1, N]
    a2: Tensor  # [M, K2]
    b2: Tensor  # [N, K2] by column, else [K2, N]
    by_column: bool
    gain: tuple[Tensor, Tensor, Tensor] | None
    """magnitude and norm [N] fp32, bias [N]."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """M, N, K1, K2"""
        n = self.b1.shape[0 if self.by_column else 1]
        return self.a1.shape[0], n, self.a1.shape[1], self.a2.shape[1]


@dataclass(frozen=True)
class Trial:
    """One setting: a linear layer, a rank, a direction."""

    direction: str
    tokens: int
    n_in: int
    n_out: int
    rank: int

    @property
    def flops(self) -> float:
        """Of the large product."""
        return 2.0 * self.tokens * self.n_in * self.n_out

    @property
    def low_rank_flops(self) -> float:
        """Of the product that is added to it."""
        return 2.0 * self.tokens * self.rank * (self.n_out if self.forward else self.n_in)

    @property
    def forward(self) -> bool:
        """Forward or backward."""
        return self.direction == "forward"


def small(direction: str) -> Trial:
    """A quick setting that still has more tiles than a GPU has multiprocessors."""
    n_in, n_out = (336, 2064) if direction == "forward" else (2064, 336)
    return Trial(direction, 2064, n_in, n_out, 48)


def make(trial: Trial, seed: int, device: str = "cuda") -> Problem:
    """Random operands as a trained layer has them: g around 1, B not zero."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*size, generator=draw, device=device) * scale).to(dtype)

    weight = normal(trial.n_out, trial.n_in, scale=trial.n_in**-0.5)
    if not trial.forward:
        t, tB = normal(trial.tokens, trial.n_out), normal(trial.tokens, trial.rank)
        A = normal(trial.rank, trial.n_in, scale=trial.n_in**-0.5)
        return Problem(t, weight, tB, A, by_column=False, gain=None)
    x, h = normal(trial.tokens, trial.n_in), normal(trial.tokens, trial.rank)
    B = normal(trial.n_out, trial.rank, scale=0.2 * trial.rank**-0.5)
    norm = weight.float().norm(dim=1)
    magnitude = norm * (1 + normal(trial.n_out, scale=0.1, dtype=torch.float32))
    return Problem(x, weight, h, B, by_column=True, gain=(magnitude, norm, normal(trial.n_out)))


def base(problem: Problem) -> Tensor:
    """The large product alone, with its bias."""
    if problem.gain is None:
        return problem.a1 @ problem.b1
    return F.linear(problem.a1, problem.b1, problem.gain[2])


def layer(problem: Problem) -> Tensor:
    """What hirank's layer does today."""
    out = base(problem)
    out.addmm_(problem.a2, problem.b2.T if problem.by_column else problem.b2)
    if problem.gain is not None:
        gain_forward_(out, *problem.gain)
    return out


def joined(problem: Problem) -> Callable[[], Tensor]:
    """cuBLAS on operands copied side by side; the copy is not part of the call."""
    a = torch.cat([problem.a1, problem.a2], dim=1)
    b = torch.cat([problem.b1, problem.b2], dim=1 if problem.by_column else 0)
    if problem.gain is None:
        return lambda: a @ b
    bias = problem.gain[2]
    return lambda: F.linear(a, b, bias)


def reference(problem: Problem) -> Tensor:
    """The formula in fp64. [M, N]"""
    a1, b1, a2, b2 = (t.double() for t in (problem.a1, problem.b1, problem.a2, problem.b2))
    if problem.by_column:
        b1, b2 = b1.T, b2.T
    v = torch.addmm(a1 @ b1, a2, b2)
    if problem.gain is None:
        return v
    magnitude, norm, bias = (t.double() for t in problem.gain)
    alive = norm > 0
    gain = torch.where(alive, magnitude / torch.where(alive, norm, 1), 1)
    return gain * v + bias

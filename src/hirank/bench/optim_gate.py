"""No speed of an optimiser without fidelity: a few steps held against the papers' formulas in fp64.

One weight, gradients that are given. The formulas project with the basis that the optimiser itself
holds, since any orthonormal one is allowed; that it sees as much of the gradient as the best one is
asked separately. 8-bit moments and weights are rounded at random, so bounds are in percent: a
moment in the wrong place, a wrong scale or a step that is lost are tens of percent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hirank.bench.optim_rivals import PerLayer
from hirank.optim import bases
from hirank.optim.optimizer import LowRankAdamW

__all__ = ["Verdict", "judged", "ratios", "verdict"]

SHAPE, RANK, STEPS, LR, SCALE = (512, 768), 64, 5, 0.02, 0.5
BETAS, EPS = (0.9, 0.999), 1e-8
_BOUNDS = {"adamw": 0.02}
_BOUND, _ENERGY = 0.1, 0.9

Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Verdict:
    """How far an optimiser's steps are from the formula, relative to what they moved."""

    off: float
    bound: float
    energy: float
    """Share of the gradient that the basis sees, by that of the best basis; 1 without a basis."""
    agrees: bool

    def __str__(self) -> str:
        word = "agrees" if self.agrees else "DISAGREES"
        return (
            f"{word}: {STEPS} steps are {100 * self.off:.2g} % off the formula in fp64 (at most "
            f"{100 * self.bound:g} %), the basis sees {100 * self.energy:.3g} % of what it could"
        )

    def record(self) -> dict[str, Any]:
        """As a results file keeps it."""
        return asdict(self)


def judged(name: str, make: Make, device: torch.device, dtype: torch.dtype) -> Verdict:
    """The verdict on the optimiser that `make` makes for a model of one linear.

    Args:
        name: of the arm; plain AdamW has a narrower bound.
        make: for a module whose one weight is [512, 768], an optimiser of rank 64, learning rate
            0.02, scale 0.5 and a gap above 5.
        device: where.
        dtype: of the weight.
    """
    model, gradients = _problem(device, dtype)
    start = model.weight.detach().double()
    optimizer = make(model)
    for gradient in gradients:
        _step(model, optimizer, gradient)
    moved = model.weight.detach().double() - start
    basis = _basis(optimizer)
    return verdict(
        moved, _formula(gradients, basis), _energy(gradients[0], basis), _BOUNDS.get(name, _BOUND)
    )


def verdict(moved: Tensor, truth: Tensor, energy: float, bound: float) -> Verdict:
    """NaN agrees with nothing."""
    off = float((moved - truth).norm() / truth.norm())
    return Verdict(off, bound, energy, bool(off <= bound and energy >= _ENERGY))


def _problem(device: torch.device, dtype: torch.dtype) -> tuple[nn.Linear, list[Tensor]]:
    """A linear with small weights; gradients with a leading subspace that stays, and noise."""
    draw = torch.Generator().manual_seed(0)
    m, n = SHAPE

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    model = nn.Linear(n, m, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(0.02 * normal(m, n))
    span = normal(m, RANK) * torch.linspace(3, 1, RANK)
    made = [span @ normal(RANK, n) + normal(m, n) for _ in range(STEPS)]
    return model, [(1e-3 * g).to(device, dtype) for g in made]


def _step(model: nn.Linear, optimizer: Any, gradient: Tensor) -> None:
    """Through autograd, as some arms step in backward."""
    x = torch.eye(SHAPE[1], device=gradient.device, dtype=gradient.dtype)
    model(x).backward(gradient.T.contiguous())
    optimizer.step()
    optimizer.zero_grad()


def _basis(optimizer: Any) -> Tensor | None:
    """[m, r] in fp64, None of an optimiser that has none."""
    if isinstance(optimizer, LowRankAdamW):
        (p,) = optimizer.projected()
        hyper = optimizer.hyper_of(p)
        held = bases.load(optimizer.state[p], bases.layout(SHAPE, hyper), hyper, p).left
        return None if held is None else held.double()
    if isinstance(optimizer, PerLayer):
        (state,) = optimizer.state.values()
        held = state["projector"].ortho_matrix
        return None if held is None else held.double()
    return None


def _formula(gradients: list[Tensor], basis: Tensor | None) -> Tensor:
    """What AdamW, or Alg. 2 of GaLore, moves the weight by; [m, n] fp64."""
    moved: Any = 0.0
    m: Any = 0.0
    v: Any = 0.0
    for t, gradient in enumerate(gradients, 1):
        r = gradient.double() if basis is None else basis.T @ gradient.double()
        m = BETAS[0] * m + (1 - BETAS[0]) * r
        v = BETAS[1] * v + (1 - BETAS[1]) * r.square()
        n = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
        moved = moved - LR * (n if basis is None else SCALE * basis @ n)
    whole: Tensor = moved
    return whole


def _energy(gradient: Tensor, basis: Tensor | None) -> float:
    if basis is None:
        return 1.0
    wide = gradient.double()
    best = torch.linalg.eigvalsh(wide @ wide.T)[-basis.shape[1] :].sum()
    return float((basis.T @ wide).square().sum() / best)


def ratios(
    seconds: Mapping[str, float], verdicts: Mapping[str, Verdict]
) -> dict[str, dict[str, float]]:
    """{arm: {other: ratio}} among the arms that agree with the formula."""
    right = [name for name in seconds if name in verdicts and verdicts[name].agrees]
    return {
        name: {other: seconds[name] / seconds[other] for other in right if other != name}
        for name in right
    }

"""No speed without agreement: hirank's arms must give what PEFT's give, or no ratio is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from hirank.bench.arms import trainable

__all__ = ["Agreement", "agreement", "check", "relative_rms"]

# Whose result an arm must reproduce: the first of these that is among the arms.
JUDGES = {
    "hirank-lora": ("peft-lora",),
    "hirank-dora": ("peft-dora", "dense-dora"),
    "dense-dora": ("peft-dora",),
}

# RMS of the difference by RMS of PEFT's, for outputs and for all adapter gradients together.
# fp32: a few roundings through a model. bf16: PEFT itself is off by 2 to 3 % of an fp32 run after
# 36 layers, while a gain that is left out costs ten times these bounds with our perturbation.
BOUNDS = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.05, 0.10)}

Probe = Callable[[nn.Module], Tensor]  # runs forward and backward, gives the outputs


@dataclass(frozen=True)
class Agreement:
    """How far an arm is from PEFT's result, and whether that is near enough."""

    against: str
    outputs: float
    """Relative RMS error of the outputs."""
    gradients: float
    """Relative RMS error of all adapter gradients together."""
    agrees: bool

    def __str__(self) -> str:
        return (
            f"{'agrees' if self.agrees else 'DISAGREES'} with {self.against}: outputs differ by "
            f"{self.outputs:.1e}, gradients by {self.gradients:.1e} (relative RMS)"
        )

    def record(self) -> dict[str, object]:
        """As a results file keeps it."""
        said = asdict(self)
        for key in ("outputs", "gradients"):  # JSON knows no infinity
            said[key] = said[key] if math.isfinite(said[key]) else None
        return said


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """RMS of the difference by RMS of the truth."""
    wide = truth.double()
    return float((actual.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def agreement(
    arms: Mapping[str, nn.Module], probe: Probe, dtype: torch.dtype
) -> dict[str, Agreement]:
    """Every arm that has a judge among `arms`, with how far it is from that judge's result."""
    found = {}
    for judge in ("peft-lora", "peft-dora", "dense-dora"):
        judged = [name for name in arms if _judge(name, arms) == judge]
        if judged:
            truth = _measured(arms[judge], probe)
            for name in judged:
                found[name] = check(judge, _measured(arms[name], probe), truth, dtype)
    return found


def _judge(name: str, arms: Mapping[str, nn.Module]) -> str | None:
    return next((judge for judge in JUDGES.get(name, ()) if judge in arms), None)


def _measured(model: nn.Module, probe: Probe) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)  # the same dropout for every arm
    outputs = probe(model).detach()
    grads = {name: p.grad for name, p in trainable(model).items() if p.grad is not None}
    for parameter in trainable(model).values():
        parameter.grad = None
    return outputs, grads


def check(
    judge: str,
    ours: tuple[Tensor, dict[str, Tensor]],
    theirs: tuple[Tensor, dict[str, Tensor]],
    dtype: torch.dtype,
) -> Agreement:
    """Compare outputs and gradients. A gradient that one side lacks is no agreement."""
    outputs = relative_rms(ours[0], theirs[0])
    (mine, wanted), (most, most_grad) = (ours[1], theirs[1]), BOUNDS[dtype]
    if mine.keys() != wanted.keys():
        return Agreement(judge, outputs, float("inf"), False)
    wrong = sum(float((mine[n].double() - w.double()).square().sum()) for n, w in wanted.items())
    whole = sum(float(w.double().square().sum()) for w in wanted.values())
    gradients = (wrong / max(whole, 1e-300)) ** 0.5
    return Agreement(judge, outputs, gradients, outputs <= most and gradients <= most_grad)

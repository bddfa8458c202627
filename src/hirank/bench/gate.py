"""No speed without fidelity: an arm must be as near to the truth as stock PEFT, or has no ratio.

The truth is an fp32 run of the same weights by definition (`truth`). What is compared is the
relative RMS distance to it of the outputs and of the gradients of A, B and m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hirank.bench import arms as arms_
from hirank.bench.truth import exact, same_masks, truth_of

__all__ = [
    "JUDGES",
    "Agreement",
    "Distances",
    "Probe",
    "agreement",
    "check",
    "distances",
    "finite",
    "relative_rms",
    "with_judges",
]

JUDGES = {"hirank-lora": "peft-lora", "hirank-dora": "peft-dora", "dense-dora": "peft-dora"}
"""The stock arm that an arm must be no further from the truth than."""

# Two runs that round alike differ by chance: their distances by 1 to 3 % over 256 rows of logits of
# 36 bf16 layers, by more over fewer rows.
_SLACK, _ROWS = 0.05, 256


class _Bound(NamedTuple):
    extra: float
    """Allowed beyond the judge's distance: a rounding or two at the end of a model."""
    limit: float
    """Allowed at all: nobody is right for being as wrong as PEFT."""


# fp32: some tens of layers that add up in another order give 1e-6 to 1e-5 either way.
# bf16: half a rounding. 36 layers of random weights put PEFT itself some percent off, while a gain
# left out in one linear of each block costs half of the outputs with our perturbation.
BOUNDS = {torch.float32: _Bound(1e-5, 1e-3), torch.bfloat16: _Bound(2.0**-9, 0.25)}

Probe = Callable[[nn.Module], Tensor]  # runs forward, and backward if need be; gives the outputs
Distances = dict[str, float]
"""Relative RMS distance to the truth: outputs, all gradients together, and of each kind."""
Found = tuple[Tensor, dict[str, Tensor]]  # outputs, and gradients by name


@dataclass(frozen=True)
class Agreement:
    """How far an arm and its judge are from the truth, and whether the arm is near enough."""

    against: str
    off: Distances
    judge_off: Distances
    agrees: bool

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {_percent(far)} ({_percent(self.judge_off.get(name, math.nan))})"
            for name, far in self.off.items()
        )
        verdict = "agrees" if self.agrees else "DISAGREES"
        return f"{verdict}: off an fp32 run by ({self.against}: by) {parts}"

    def record(self) -> dict[str, object]:
        """As a results file keeps it."""
        return asdict(self) | {"off": finite(self.off), "judge_off": finite(self.judge_off)}


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def finite(values: Distances) -> dict[str, float | None]:
    """JSON knows no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """RMS of the difference by RMS of the truth."""
    wide = truth.double()
    return float((actual.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def with_judges(names: Sequence[str]) -> list[str]:
    """`names`, and after them the judges they want that are not among them."""
    return list(dict.fromkeys([*names, *(JUDGES[name] for name in names if name in JUDGES)]))


def agreement(
    base: nn.Module,
    arms: Mapping[str, nn.Module],
    probe: Probe,
    dtype: torch.dtype,
    *,
    dropout: float = 0.0,
) -> dict[str, Agreement]:
    """The verdict on every arm that has a judge; that judge must be among `arms`.

    `base` is the frozen model behind them, `dropout` their adapters'.
    """
    found = {}
    for judge in sorted({JUDGES[name] for name in arms if name in JUDGES}):
        weights = arms_.trainable(arms[judge])
        model = truth_of(base, weights, scale=arms_.SCALE, dropout=dropout)
        with exact():
            truth = _measured(model, weights, probe)
        del model
        rows = truth[0].numel() // truth[0].shape[-1]
        theirs = distances(_arm(arms[judge], probe), truth)
        for name in arms:
            if JUDGES.get(name) == judge:
                ours = distances(_arm(arms[name], probe), truth)
                found[name] = check(judge, ours, theirs, dtype, rows)
    return found


def _arm(model: nn.Module, probe: Probe) -> Found:
    with same_masks(model):
        return _measured(model, arms_.trainable(model), probe)


def _measured(model: nn.Module, weights: Mapping[str, nn.Parameter], probe: Probe) -> Found:
    outputs = probe(model).detach()
    grads = {name: p.grad for name, p in weights.items() if p.grad is not None}
    for parameter in weights.values():
        parameter.grad = None
    return outputs, grads


def distances(ours: Found, truth: Found) -> Distances:
    """How far outputs and gradients are off. A gradient that one side lacks is infinitely far."""
    (outputs, grads), (true_outputs, true_grads) = ours, truth
    found = {"outputs": relative_rms(outputs, true_outputs)}
    if grads.keys() != true_grads.keys():
        return found | {"gradients": math.inf}
    if not grads:
        return found
    found["gradients"] = _together(grads, true_grads)
    for kind in ("lora_A", "lora_B", arms_.MAGNITUDE):
        names = [name for name in true_grads if f".{kind}." in name]
        if names:
            found[kind] = _together(grads, {name: true_grads[name] for name in names})
    return found


def _together(grads: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    wrong = sum(float((grads[n].double() - t.double()).square().sum()) for n, t in truth.items())
    whole = sum(float(t.double().square().sum()) for t in truth.values())
    return math.sqrt(wrong / max(whole, 1e-300))


def check(
    judge: str, ours: Distances, theirs: Distances, dtype: torch.dtype, rows: int = _ROWS
) -> Agreement:
    """Whether every distance of `ours` is within what the judge's allows. NaN is not.

    `rows` of outputs were compared.
    """
    extra, limit = BOUNDS[dtype]
    slack = 1 + _SLACK * max(1.0, math.sqrt(_ROWS / max(rows, 1)))
    near = all(
        far <= limit and far <= slack * theirs.get(name, math.nan) + extra
        for name, far in ours.items()
    )
    return Agreement(judge, ours, theirs, near)

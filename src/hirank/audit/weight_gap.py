"""How far the weights that an adapter is merged into are from those it was trained beside.

    distance  |W - W_q| / |g (W_q + s B A) - W_q|     over all adapted layers, Frobenius norms
    norms     mean over the rows of | |W + s B A| - |W_q + s B A| | / |W_q + s B A|    DoRA

Row norms that differ make DoRA stretch the rows by other gains than it learnt.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.files import AdapterLayer
from hirank.adapters.merge import Increment, merged_blocks
from hirank.adapters.merge_files import base_tensor, trained_tensor
from hirank.adapters.merge_plan import MergePlan
from hirank.kernels.dora_norm import dora_norm

__all__ = ["WIDE", "WeightGap", "weight_gap"]

WIDE = 0.01
"""Mean gap of the norms from which it is warned of."""


@dataclass(frozen=True)
class WeightGap:
    """Of a whole merge; `norms` and `worst` None for plain LoRA."""

    distance: float
    norms: float | None
    worst: str | None
    """The layer whose norms are furthest off."""

    @property
    def told(self) -> str:
        """One sentence."""
        where = (
            "The base's own weights are off from those trained on by "
            f"{100 * self.distance:.3g} % of what was trained"
        )
        if self.norms is None:
            return f"{where}."
        told = f"{where}, and the row norms by {100 * self.norms:.2g} % on average"
        if self.norms <= WIDE:
            return f"{told}."
        return (
            f"{told}, most in {self.worst}: the gains are not those that were trained; merge "
            "without --into-original."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"told": self.told}


def weight_gap(plan: MergePlan) -> WeightGap:
    """Compare the two weights of every layer that was in few bits; reads all of them."""
    apart = trained = 0.0
    norms: dict[str, tuple[float, int]] = {}
    for key, name in plan.layers.items():
        layer = plan.adapter.layer(name)
        into, beside = (
            _matrix(read(plan, key), key in plan.turned) for read in (base_tensor, trained_tensor)
        )
        apart += _squares(into.float() - beside.float())
        trained += _increment(beside, layer)
        if layer.magnitude is not None and key in plan.requantised:
            norms[name] = _norms(into, beside, layer)
    rows = sum(count for _, count in norms.values())
    distance = math.sqrt(apart / trained) if trained else math.inf
    if not rows:
        return WeightGap(distance, None, None)
    mean = math.fsum(gap * count for gap, count in norms.values()) / rows
    return WeightGap(distance, mean, max(norms, key=lambda name: norms[name][0]))


def _matrix(weight: Tensor, turned: bool) -> Tensor:
    return weight.T if turned else weight.flatten(1)


def _increment(weight: Tensor, layer: AdapterLayer) -> float:
    part = Increment(layer.A, layer.B, layer.magnitude, layer.scale)
    return math.fsum(_squares(b.after - b.before) for b in merged_blocks(weight, [part]))


def _norms(into: Tensor, beside: Tensor, layer: AdapterLayer) -> tuple[float, int]:
    """The mean gap over the rows, and their number."""
    one, other = (
        dora_norm(weight.contiguous(), layer.A.float(), layer.B.float(), scale=layer.scale)
        for weight in (into, beside)
    )
    gap = (one - other).abs() / other.clamp(min=torch.finfo(other.dtype).tiny)
    return float(gap.mean()), gap.numel()


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2

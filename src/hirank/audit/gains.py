"""What DoRA's magnitudes did: the gains g = m / |W + s B A|, row by row.

g is 1 where only the direction moved. How far from 1 it is decides what precision it needs. bf16
has 8 bits of significand, so its spacing is 2^-7 above 1 and 2^-8 below, and rounding to nearest
makes 1 of

    bf16   -2^-9  <= g - 1 <= 2^-8        (0.998 to 1.0039)
    fp16   -2^-12 <= g - 1 <= 2^-11       (half the spacing on either side; ties go to the even 1)

A forward that rounds g, or takes (g - 1) of rounded numbers, loses every such row whole: the zone
where the gain collapses. hirank and PEFT keep m in fp32, and hirank takes g - 1 in fp32.

Shapes     weight [N, K]; g, m, norm [N]. All in fp32 and better, whatever the files hold.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.audit.base_weights import BaseWeights
from hirank.audit.increment import adapted_rows, gain_of
from hirank.errors import HirankError
from hirank.kernels.dora_norm import row_norm

__all__ = ["HALVES", "QUANTILES", "LayerGains", "all_gains", "collapsed", "layer_gains"]
__all__ += ["need_magnitudes"]

QUANTILES = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SAME = 1e-6
"""Relative; a norm summed in another order is at most this far off, and an optimiser's step of any
usual size moves a magnitude by more."""


@dataclass(frozen=True)
class LayerGains:
    """The gains of one DoRA layer, and the sizes beside which they are to be seen."""

    name: str
    gain: Tensor
    """[N] fp32."""
    unmoved: int
    """Rows whose m is still the norm of W, in fp32 or rounded to the dtype of W."""
    dead: int
    """Rows that give zero whatever the input: m = 0, or W + s B A = 0."""
    zero_base: int
    """Rows of W that are zero."""
    base_norm: float
    """Frobenius norm of W."""
    step_norm: float
    """Frobenius norm of g (W + s B A) - W: all that the adapter changes."""

    @property
    def rows(self) -> int:
        return self.gain.numel()

    @property
    def deviation(self) -> float:
        """Root mean square of g - 1."""
        return float((self.gain.double() - 1).square().mean().sqrt())

    def quantiles(self) -> dict[str, float]:
        """Of g, from the smallest to the largest."""
        found = torch.quantile(self.gain.double(), torch.tensor(QUANTILES, dtype=torch.float64))
        return {f"{share:g}": value for share, value in zip(QUANTILES, found.tolist(), strict=True)}

    def share(self, dtype: torch.dtype) -> float:
        """Rows whose gain is 1 once rounded to `dtype`."""
        return float(collapsed(self.gain, dtype).double().mean())

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "name": self.name, "rows": self.rows, "quantiles": self.quantiles(),
            "rms_deviation": self.deviation, "exactly_one": self.share(torch.float32),
            "rounds_to_one": {name: self.share(dtype) for name, dtype in HALVES.items()},
            "unmoved": self.unmoved, "dead": self.dead, "zero_rows_of_base": self.zero_base,
            "base_norm": self.base_norm, "increment_norm": self.step_norm,
        }  # fmt: skip


def collapsed(gain: Tensor, dtype: torch.dtype) -> Tensor:
    """Which gains [N] are 1 once rounded to `dtype`."""
    return gain.to(dtype) == 1


def need_magnitudes(folder: AdapterFolder) -> None:
    """Raises HirankError for an adapter that has no gains."""
    if not folder.dora:
        raise HirankError(
            f"{folder.folder} is a LoRA adapter and has no magnitudes, so all its gains are 1: "
            "give a DoRA adapter."
        )


@torch.no_grad()
def layer_gains(layer: AdapterLayer, weight: Tensor) -> LayerGains:
    """The gains of one layer on its base weight [N, K].

    A LoRA layer has gains of 1, and no magnitude that could be unmoved.
    """
    base, m = row_norm(weight.contiguous()), layer.magnitude
    gain, norm = gain_of(layer, weight)
    return LayerGains(
        name=layer.name,
        gain=gain,
        unmoved=0 if m is None else int(_unmoved(m, base, weight.dtype).sum()),
        dead=int(((norm == 0) if m is None else (m == 0) | (norm == 0)).sum()),
        zero_base=int((base == 0).sum()),
        base_norm=float(base.double().norm()),
        step_norm=_step_norm(layer, weight, gain),
    )


def _unmoved(magnitude: Tensor, base: Tensor, stored: torch.dtype) -> Tensor:
    m = magnitude.double()
    norms = base.double(), base.to(stored).double(), base.to(magnitude.dtype).double()
    close = [(m - norm).abs() <= _SAME * norm for norm in norms]
    return torch.stack(close).any(0)


def _step_norm(layer: AdapterLayer, weight: Tensor, gain: Tensor) -> float:
    rows = adapted_rows(layer, weight, gain)
    return math.sqrt(math.fsum(float((r.adapted - r.base).double().square().sum()) for r in rows))


def all_gains(
    folder: AdapterFolder, base: BaseWeights, tick: Callable[[str], None] = lambda name: None
) -> list[LayerGains]:
    """The gains of all layers, one layer in memory at a time; `tick` hears each name."""
    found = []
    for layer in folder:
        tick(layer.name)
        found.append(layer_gains(layer, base.of(layer)))
    return found

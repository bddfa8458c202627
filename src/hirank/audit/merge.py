"""What rounding leaves of a merge: measured on every element while it is computed.

    before  W, as the target dtype holds it         after   g (W + s B A), unrounded
    stored  after, rounded                          error   (stored - before) - (after - W)

A bf16 number has 8 bits, so an increment below a 512th of its weight is rounded away, and what is
left of the others is off by up to as much. The weight looks fine; the training is gone.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hirank.adapters.merge import Block

__all__ = ["DESTROYED", "LOSSY", "Fidelity", "FidelityMeter", "LayerFidelity", "Verdict"]

Verdict = Literal["safe", "lossy", "destroyed"]
LOSSY, DESTROYED = 0.1, 0.5
"""RMS distortion from which a merge is lossy, and from which the training counts as destroyed. If
every increment is rounded away it is 1."""


@dataclass
class _Sums:
    """Of one layer, or of all; in fp64."""

    elements: int = 0
    weight: float = 0.0  # sum of squares
    increment: float = 0.0
    error: float = 0.0
    largest_error: float = 0.0
    changed: int = 0
    swallowed: int = 0

    def add(self, other: "_Sums") -> None:
        for name in ("elements", "weight", "increment", "error", "changed", "swallowed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest_error = max(self.largest_error, other.largest_error)


@dataclass(frozen=True)
class LayerFidelity:
    """One layer's merge. Shares and ratios are of 1."""

    name: str
    distortion: float
    """RMS of the error over RMS of the increment."""
    largest: float
    """Largest error over RMS of the increment."""
    swallowed: float
    """Share of the elements with an increment that are stored as if they had none."""
    change: float
    """|increment| / |W|, Frobenius norms."""


@dataclass(frozen=True)
class Fidelity:
    """A whole merge."""

    dtype: str
    total: LayerFidelity
    layers: list[LayerFidelity]
    distance: float | None = None
    """Of the logits, see `hirank.audit.served`; None: the merged model was not loaded."""

    @property
    def verdict(self) -> Verdict:
        """Of all layers together: their errors and increments add up.

        Errors are independent of each other and increments are not, so a model may keep what its
        weights seem to lose: logits that kept most of it make a destroyed merge a lossy one.
        """
        found = _verdict(self.total.distortion)
        kept = self.distance is not None and self.distance < DESTROYED
        return "lossy" if found == "destroyed" and kept else found

    @property
    def worst(self) -> LayerFidelity:
        return max(self.layers, key=lambda layer: layer.distortion)

    @property
    def advice(self) -> str:
        """What to do about it, in one sentence."""
        if not self.total.change:
            return "The adapter changes no weight, so the merged model is the base: was it trained?"
        cost = f"{_percent(self.total.distortion)} RMS of what was trained"
        kept = f"Rounding to {self.dtype} costs {cost}"
        if self.verdict == "safe":
            return f"{kept}: serve the merged model."
        if self.verdict == "lossy":
            return (
                f"{kept}, of which much may average out: see with --check what the model keeps, or "
                "serve the adapter unmerged, or merge with --dtype float32."
            )
        return (
            f"Rounding to {self.dtype} ruins {cost}: serve the adapter unmerged, "
            "merge with --dtype float32, or train with a larger scale or learning rate."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        words = {"verdict": self.verdict, "advice": self.advice, "dtype": self.dtype}
        layers = [asdict(layer) | {"verdict": _verdict(layer.distortion)} for layer in self.layers]
        return words | {"total": asdict(self.total), "layers": layers}


@dataclass
class FidelityMeter:
    """Watches a merge, see `hirank.adapters.merge_files.Watch`."""

    _sums: dict[str, _Sums] = field(default_factory=dict)
    _dtype: str = ""

    @torch.no_grad()
    def __call__(self, name: str, block: Block, stored: Tensor) -> None:
        if not stored.numel():
            return
        increment = block.after - block.before
        before = block.before
        if stored.dtype != block.dtype:
            before = _as_stored(before, stored.dtype)
        moved = stored.to(increment.dtype) - before
        error = moved - increment
        least, most = torch.aminmax(error)
        # What has no increment is stored as it was: so the others that are, are swallowed.
        changed, left = _nonzero(increment), _nonzero(moved)
        self._dtype = str(stored.dtype).removeprefix("torch.")
        self._sums.setdefault(name, _Sums()).add(
            _Sums(
                increment.numel(),
                _squares(block.before),
                _squares(increment),
                _squares(error),
                max(-float(least), float(most)),
                changed,
                changed - left,
            )
        )

    @classmethod
    def joined(cls, meters: Iterable["FidelityMeter"]) -> "FidelityMeter":
        """One that saw what all of them saw, each other layers."""
        whole = cls()
        for meter in meters:
            whole._sums |= meter._sums
            whole._dtype = meter._dtype
        return whole

    def result(self, distance: float | None = None) -> Fidelity:
        """What was seen so far; `distance` of the logits, if it was measured."""
        total = _Sums()
        for sums in self._sums.values():
            total.add(sums)
        layers = [_layer(name, sums) for name, sums in self._sums.items()]
        return Fidelity(self._dtype, _layer("all layers", total), layers, distance)


def _as_stored(before: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype`; what that would make infinite is left as it is."""
    rounded = before.to(dtype).to(before.dtype)
    if dtype == torch.float16 and not rounded.isfinite().all():
        rounded = torch.where(rounded.isfinite(), rounded, before)
    return rounded


def _layer(name: str, sums: _Sums) -> LayerFidelity:
    typical = math.sqrt(sums.increment / sums.elements) if sums.elements else 0.0
    return LayerFidelity(
        name,
        _ratio(math.sqrt(sums.error), math.sqrt(sums.increment)),
        _ratio(sums.largest_error, typical),
        _ratio(sums.swallowed, sums.changed),
        _ratio(math.sqrt(sums.increment), math.sqrt(sums.weight)),
    )


def _ratio(part: float, whole: float) -> float:
    """0 of nothing is 0; something of nothing is infinite."""
    return part / whole if whole else (math.inf if part else 0.0)


def _squares(tensor: Tensor) -> float:
    """Of one block; PyTorch adds up in many partial sums, so fp32 is good to six digits."""
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _nonzero(tensor: Tensor) -> int:
    """NumPy counts several times as fast."""
    return int(np.count_nonzero(tensor.numpy() != 0))


def _verdict(distortion: float) -> Verdict:
    if distortion >= DESTROYED:
        return "destroyed"
    return "lossy" if distortion >= LOSSY else "safe"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"

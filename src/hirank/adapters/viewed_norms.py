"""The kept norm of layers whose W, A and B become matrices by a view: all but plain linears.

A norm is served by the tensors it belongs to, so the views have to be the same ones at every call.
They are kept beside the norm, for as long as they are views of what the layer holds.

Of small weights on a CPU the norm itself is compared, by a quick computation: that takes less time
than the looks at W, A and B. Only where it differs is the norm computed with care.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.adapters.gain import NormCache
from hirank.kernels.cast_windows import LayerCasts
from hirank.kernels.dora_norm import row_norm

__all__ = ["ViewedNormCache", "as_they_lie"]

Three = tuple[Tensor, Tensor, Tensor]

_SMALL = 2**20  # operations, as many as the looks take time for
_SMALL_WEIGHT = 2**16  # entries


def as_they_lie(weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Three:
    return weight, lora_A, lora_B


class _Small(NamedTuple):
    """The norm of a small weight."""

    look: Tensor  # [N], by which a change is noticed
    norm: Tensor  # [N]


class _Views(NamedTuple):
    held: Three
    marks: tuple[object, ...]
    views: Three


def _marks(tensors: Three) -> tuple[object, ...]:
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.requires_grad, t.dtype) for t in tensors])


@dataclass(eq=False)
class ViewedNormCache(NormCache):
    """A `NormCache` that knows how a layer's parameters become matrices."""

    is_linear = False

    turn: Callable[[Tensor, Tensor, Tensor], Three] = as_they_lie
    _views: _Views | None = field(default=None, repr=False)
    _small: dict[torch.dtype, _Small] = field(default_factory=dict, repr=False)

    def views(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> Three:
        """W, A and B as `turn` makes them of what a layer holds; if they can, the last call's."""
        kept, marks = self._views, _marks((weight, lora_A, lora_B))
        if (
            kept is None
            or kept.held[0] is not weight
            or kept.held[1] is not lora_A
            or kept.held[2] is not lora_B
            or kept.marks != marks
        ):
            held = weight, lora_A, lora_B
            kept = _Views(held, marks, self.turn(*held))
            copied = any(
                view.data_ptr() != t.data_ptr() for view, t in zip(kept.views, held, strict=True)
            )
            self._views = None if copied else kept  # a copy would not see its layer change
        return kept.views

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self._views = None
        self._small.clear()
        super().clear()

    def at_hand(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, LayerCasts | None]:
        """As `NormCache.at_hand`; a new view of a weight counts as the one that is kept."""
        kept = self._views
        if kept is not None and weight is not kept.views[0] and _alike(weight, kept.views[0]):
            weight = kept.views[0]
        if weight.is_cpu and _is_small(weight, lora_A, lora_B, dtype):
            return self._small_norm(weight, lora_A, lora_B, scale, dtype), None
        return super().at_hand(weight, lora_A, lora_B, scale, dtype)

    def _small_norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        kept = self._small.get(dtype)
        with torch.no_grad():
            if kept is not None and torch.equal(_look(weight, lora_A, lora_B, scale), kept.look):
                return kept.norm
        with torch.inference_mode(False), torch.no_grad():  # it must serve training, too
            look = _look(weight, lora_A, lora_B, scale)
            kept = _Small(look, _by_definition(weight, lora_A, lora_B, scale))
        self._small[dtype] = kept
        self.counted += 1
        return kept.norm


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same entries of one tensor, in the same order."""
    return (
        a._is_view()
        and a._base is b._base
        and a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    )


def _look(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """||W + s B A|| per row or its square, quickly. No autocast is on: the weights are wide."""
    if weight.is_contiguous():
        full = torch.addmm(weight, lora_B, lora_A, alpha=scale)
        norm: Tensor = torch.linalg.vector_norm(full, dim=1)
        return norm
    return torch.addmm(weight.t(), lora_A.t(), lora_B.t(), alpha=scale).square_().sum(0)


def _is_small(weight: Tensor, lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> bool:
    (n, k), (r, columns) = weight.shape, lora_A.shape
    entries = n * k
    return (
        entries <= _SMALL_WEIGHT
        and entries * r <= _SMALL
        and columns == k
        and tuple(lora_B.shape) == (n, r)  # not that of a grouped convolution
        and weight.dtype == lora_A.dtype == lora_B.dtype == dtype
        and dtype in (torch.float32, torch.float64)
    )


def _by_definition(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """In fp64, rounded once; of an untrained adapter to the bit what the frozen weight has."""
    if not (scale and lora_A.any() and lora_B.any()):
        return row_norm(weight)
    full = torch.addmm(weight.double(), lora_B.double(), lora_A.double(), alpha=scale)
    norm: Tensor = torch.linalg.vector_norm(full, dim=1)
    return norm.to(weight.dtype)

"""What a group of kept norms watches, as the host sees it at one time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels.norm_table import NormEntry

if TYPE_CHECKING:
    from hirank.adapters.gain import NormCache
    from hirank.adapters.groups import Member

__all__ = ["Source", "Survey", "copied", "mark_of", "places_of", "version"]

Source = Callable[[], tuple[Tensor, Tensor, Tensor, float] | None]
"""Where a cache finds W, A, B and s at any time; None once the layer is gone."""


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def copied(norms: list[Tensor]) -> Sequence[Tensor]:
    if len(norms) == 1:
        return [norms[0].clone()]
    return torch.split(torch.cat(norms), [len(norm) for norm in norms])


class Survey(NamedTuple):
    """What belongs to a group as things are now, in one order."""

    caches: list[weakref.ref[NormCache]]
    members: list[Member]
    entries: list[NormEntry]
    marks: list[tuple[Any, ...]]

    def again(self) -> Survey:
        """The same tensors as they are now. That a layer has others, its own call tells."""
        return self._replace(marks=[mark_of(entry) for entry in self.entries])

    def is_trained(self) -> bool:
        """Whether a step of an optimizer may have changed an adapter."""
        return any(entry.lora_A.requires_grad for entry in self.entries)


def mark_of(entry: NormEntry) -> tuple[Any, ...]:
    """Addresses and shapes, version of W; then scale and versions of A and B."""
    weight, A, B, scale, norm = entry
    pointers = (weight.data_ptr(), A.data_ptr(), B.data_ptr(), norm.data_ptr())
    shapes = weight.shape, A.shape, B.shape
    return (*pointers, shapes, version(weight), scale, version(A), version(B))


def places_of(marks: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What a table is built on."""
    return [(*mark[:5], mark[6]) for mark in marks]

"""The kept norm of a grouped convolution's adapter, whose effective kernel is dense."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.adapters.capture import capturing
from hirank.adapters.viewed_norms import ViewedNormCache
from hirank.kernels.grouped_norm import grouped_norm, grouped_norm_op

__all__ = ["GroupedNormCache", "GroupedNorms"]


class GroupedNorms:
    """Stands in for a `GroupedNormCache` while a layer is traced: computes at every call."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """As `grouped_norm`, for A and B as cast to `dtype`."""
        A, B = lora_A.detach().to(dtype), lora_B.detach().to(dtype)
        found: Tensor = grouped_norm_op(weight.detach(), A, B, scale, self.groups)
        return found


class _Kept(NamedTuple):
    """A norm and what it was computed from. Replaced as a whole, so that threads may share it."""

    norm: Tensor  # [N]
    mark: tuple[Any, ...]
    prints: list[Tensor]


@dataclass(eq=False)
class GroupedNormCache(ViewedNormCache):
    """A `NormCache` by `grouped_norm`: W, A and B are compared by value, on every device."""

    groups: int = 1
    _kept: dict[torch.dtype, _Kept] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedNormCache":
        return GroupedNormCache(groups=self.groups)

    def __reduce__(self) -> Any:
        return _new, (self.groups,)

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self._kept.clear()
        super().clear()

    def _checked(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
        training: bool,
    ) -> tuple[Tensor, None]:
        if weight.is_meta or lora_A.is_meta:
            return torch.empty(weight.shape[0], device="meta"), None
        if weight.is_cuda and capturing():  # a graph cannot compare, so it computes each time
            A, B = lora_A.to(dtype), lora_B.to(dtype)
            return grouped_norm(weight, A, B, scale=scale, groups=self.groups, look=False), None
        kept = self._kept.get(dtype)
        tensors = (weight, lora_A, lora_B)
        mark = (scale, *[(t.shape, t.dtype, t.device) for t in tensors])
        prints = [_print(t) for t in tensors]
        if kept is None or mark != kept.mark or not all(map(torch.equal, prints, kept.prints)):
            norm = GroupedNorms(self.groups).norm(*tensors, scale, dtype)
            kept = self._kept[dtype] = _Kept(norm, mark, prints)
            self.counted += 1
        return kept.norm, None


def _new(groups: int) -> GroupedNormCache:
    return GroupedNormCache(groups=groups)


def _print(matrix: Tensor) -> Tensor:
    """A product with a fixed random vector: reads every entry, and is small."""
    wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    draw = torch.Generator().manual_seed(0x5EED)
    vector = torch.rand(matrix.shape[1], generator=draw, dtype=wide).sub_(0.5).to(matrix.device)
    with torch.autocast(matrix.device.type, enabled=False):
        return matrix.detach().to(wide) @ vector

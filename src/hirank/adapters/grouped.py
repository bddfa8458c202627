"""The kept norm of a grouped convolution's adapter, whose effective kernel is dense."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.gain import NormCache, _Value
from hirank.adapters.groups import in_backward
from hirank.kernels.grouped_norm import grouped_norm

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
        return grouped_norm(weight.detach(), A, B, scale=scale, groups=self.groups)


@dataclass(eq=False)
class GroupedNormCache(NormCache):
    """A `NormCache` by `grouped_norm`. Changes are found by value, on every device."""

    groups: int = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupedNormCache":
        return GroupedNormCache(groups=self.groups)

    def __reduce__(self) -> Any:
        return _new, (self.groups,)

    def _checked_norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        if weight.is_meta or lora_A.is_meta:
            return torch.empty(weight.shape[0], device="meta")
        value = self._values.get(dtype)
        if value is not None and in_backward():
            return value.norm
        base = self._base_of(weight)
        mark = (scale, lora_A.device, lora_A.dtype, lora_B.dtype)
        prints = self._fingerprints(lora_A, lora_B)
        if value is None or not _holds(value, base, mark, prints):
            norm = GroupedNorms(self.groups).norm(weight, lora_A, lora_B, scale, dtype)
            value = self._values[dtype] = _Value(norm, base, mark, prints)
            self.counted += 1
        return value.norm


def _new(groups: int) -> GroupedNormCache:
    return GroupedNormCache(groups=groups)


def _holds(value: _Value, base: Any, mark: tuple[Any, ...], prints: tuple[Tensor, Tensor]) -> bool:
    same = (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(prints, value.prints, strict=True)
    )
    return base is value.base and mark == value.mark and all(same)

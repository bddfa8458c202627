"""Keep the row norm of W + sBA for as long as it is true, and not a step longer.

The norm depends on weights only, so it is computed once per weight change: accumulation
micro-batches, recomputation under checkpointing and inference all reuse it.

How a change is noticed. Version counters do not do: fused optimizers, `.data` writes and
`vector_to_parameters` leave them as they were. So the adapter is compared *by value*: a product of
A with a fixed random vector, and of B likewise, read every weight once and are two small
matrix-vector products. A change too small to show in them is below fp32 rounding of the norm.
The frozen base is large; it is watched by address, version counter and a sample of its entries.
The magnitude is not part of the norm and so cannot make it stale.

After overwriting part of a base weight through `.data`, where neither counter nor sample need show
it, call `NormCache.clear` (`hirank.accelerate` does it for every layer).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hirank.kernels.dora_norm import dora_norm, row_square_sum

__all__ = ["NormCache"]

_SAMPLES = 1024  # entries of a base weight that are compared
_SEED = 0x5EED


def _probe(length: int, like: Tensor, salt: int) -> Tensor:
    """A fixed random vector: the same on every call, so it need not be kept with the model."""
    made = torch.Generator().manual_seed(_SEED + salt)
    return torch.rand(length, generator=made, dtype=like.dtype).sub_(0.5).to(like.device)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().T.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@dataclass(slots=True)
class _Base:
    """||W||^2 and the marks by which a changed W is recognised."""

    mark: tuple[Any, ...]
    sample: Tensor
    square_sum: Tensor  # [N]


@dataclass(slots=True)
class NormCache:
    """The norm of one adapter on one layer. Holds a few vectors; never saved with a model."""

    computed: int = 0
    """How many times the norm was computed: once per change of weights."""
    _base: _Base | None = field(default=None, repr=False)
    _mark: tuple[Any, ...] | None = field(default=None, repr=False)
    _prints: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _norm: Tensor | None = field(default=None, repr=False)
    _probes: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self._base = self._mark = self._prints = self._norm = self._probes = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "NormCache":
        return NormCache()  # a copied layer has weights of its own

    def __reduce__(self) -> tuple[type["NormCache"], tuple[()]]:
        return NormCache, ()

    @torch.inference_mode(False)  # what is kept must serve training as well
    @torch.no_grad()
    def norm(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """||W + s B A|| per row, [N] fp32 (fp64 for fp64), for A and B as cast to `dtype`.

        On the meta device nothing is computed: the result is an empty meta tensor.
        """
        if weight.is_meta or lora_A.is_meta:
            return torch.empty(weight.shape[0], device="meta")
        base = self._base_of(weight)
        mark = (scale, dtype, lora_A.device, lora_A.dtype, lora_B.dtype)
        prints = self._fingerprints(lora_A, lora_B)
        fresh = (
            self._norm is not None
            and mark == self._mark
            and self._prints is not None
            and all(_same(a, b) for a, b in zip(prints, self._prints, strict=True))
        )
        if not fresh:
            self._norm = dora_norm(
                weight, lora_A.to(dtype), lora_B.to(dtype), scale=scale, base_sq=base.square_sum
            )
            self._mark, self._prints = mark, prints
            self.computed += 1
        assert self._norm is not None
        return self._norm

    def _base_of(self, weight: Tensor) -> _Base:
        mark = (weight.data_ptr(), _version(weight), weight.shape, weight.dtype, weight.device)
        sample = _sample(weight)
        base = self._base
        if base is None or base.mark != mark or not _same(base.sample, sample):
            base = self._base = _Base(mark, sample, row_square_sum(weight))
            self._norm = None
        return base

    def _fingerprints(self, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
        A, B = _wide(lora_A.detach()), _wide(lora_B.detach())
        probes = self._probes
        if probes is None or not (
            probes[0].shape[0] == A.shape[1]
            and probes[1].shape[0] == B.shape[1]
            and probes[0].dtype == A.dtype
            and probes[0].device == A.device
            and probes[1].dtype == B.dtype
        ):
            probes = self._probes = (_probe(A.shape[1], A, 1), _probe(B.shape[1], B, 2))
        with torch.autocast(A.device.type, enabled=False):
            return A @ probes[0], B @ probes[1]

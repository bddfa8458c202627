"""Keep the row norm of W + sBA for as long as it is true, and not a step longer.

The norm depends on weights only, so it is computed once per weight change: accumulation
micro-batches, recomputation under checkpointing and inference all reuse it.

How a change is noticed. Version counters do not do: fused optimizers, `.data` writes and
`vector_to_parameters` leave them as they were. So the adapter is compared *by value*. The frozen
base is large; it is watched by address, version counter and a sample of its entries. The magnitude
is not part of the norm and so cannot make it stale.

    CPU    at every call a product of A with a fixed random vector, and of B likewise, reads every
           weight once; a change too small to show in them is below fp32 rounding of the norm.
    GPU    once per pass through the model, for all its layers together: `adapters/groups`.

A layer that runs again inside a backward pass (checkpointing) uses the norm of its forward.

After overwriting part of a base weight through `.data`, where neither counter nor sample need show
it, call `NormCache.clear` (`hirank.accelerate` does it for every layer).
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hirank.adapters.capture import capturing
from hirank.adapters.groups import Family, Member
from hirank.adapters.survey import Source, version
from hirank.kernels._apart import apart
from hirank.kernels.cast_windows import LayerCasts
from hirank.kernels.dora_norm import dora_norm, row_norm, row_square_sum
from hirank.kernels.norm_replay import ReplayableNormTable

__all__ = ["NormCache", "base_norm", "norm_of"]

_SAMPLES = 1024  # entries of a base weight that are compared
_SEED = 0x5EED


def _probe(length: int, like: Tensor, salt: int) -> Tensor:
    """A fixed random vector: the same on every call, so it need not be kept with the model."""
    made = torch.Generator().manual_seed(_SEED + salt)
    return torch.rand(length, generator=made, dtype=like.dtype).sub_(0.5).to(like.device)


def _wide_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_type(tensor))


def _sample(weight: Tensor) -> Tensor:
    """A view of some entries, where the layout has one."""
    flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach().T.reshape(-1)
    return flat[:: _stride(flat.numel())]


@functools.lru_cache(maxsize=1024)
def _stride(entries: int) -> int:
    stride = max(1, entries // _SAMPLES)
    while math.gcd(stride, entries) > 1:  # else only some rows or columns would be watched
        stride += 1
    return stride


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@dataclass(slots=True)
class _Base:
    """||W||^2 and the marks by which a changed W is recognised."""

    mark: tuple[Any, ...]
    sample: Tensor
    square_sum: Tensor  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class _Value:
    """A norm and what it was computed from. Replaced as a whole, so that threads may share it."""

    norm: Tensor  # [N]
    base: _Base
    mark: tuple[Any, ...]
    prints: tuple[Tensor, Tensor]  # [R], [N]


@dataclass(eq=False)
class NormCache:
    """The norm of one adapter on one layer. Holds a few vectors; never saved with a model.

    Threads may share it. All that is kept, is kept by the dtype in which A and B multiply, so no
    call can meet the norm of another's dtype.
    """

    is_linear: ClassVar[bool] = True
    """Whether W, A and B are matrices as they lie, those of a plain linear layer."""

    source: Source = field(default=lambda: None, repr=False)
    owner: Callable[[], Any] = field(default=lambda: None, repr=False)
    """The layer it belongs to, which a copied cache has lost."""
    family: Family = field(default_factory=Family, repr=False)
    """The caches of its model."""
    members: dict[torch.dtype, Member] = field(default_factory=dict, repr=False)
    """On a GPU: its places among them."""
    counted: int = 0
    """How often it was computed, as far as no table counts that."""
    recorded: list[ReplayableNormTable] = field(default_factory=list, repr=False)
    """What graphs play and so must live as long as the layer."""
    _values: dict[torch.dtype, _Value] = field(default_factory=dict, repr=False)
    _base: _Base | None = field(default=None, repr=False)
    _probes: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.family.join(self)
        _REGISTRY.append(weakref.ref(self, _REGISTRY.remove))

    @property
    def computed(self) -> int:
        """How many times the norm was computed: once per change of weights. Waits for a GPU."""
        counts = [member.group.computed(self) for member in list(self.members.values())]
        return self.counted + sum(counts)

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self.counted = self.computed
        self.members.clear()
        self._values.clear()
        self._base = self._probes = None
        self.family.changes += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "NormCache":
        return NormCache()  # a copied layer has weights of its own

    def __reduce__(self) -> tuple[type["NormCache"], tuple[()]]:
        return NormCache, ()

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
        return self.at_hand(weight, lora_A, lora_B, scale, dtype)[0]

    def at_hand(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, LayerCasts | None]:
        """The norm as by `norm`, and where A and B lie in `dtype`, if layers share their casts."""
        member = self.members.get(dtype)
        if member is not None and member.serves(weight, lora_A, lora_B, scale):
            return member.norm, member.casts
        if (
            member is not None
            and member.visible[:1] == (scale,)
            and member.group.renew(member, weight, lora_A, lora_B)
        ):
            return member.norm, member.casts
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
            return self._checked(weight, lora_A, lora_B, scale, dtype, training)

    def _checked(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
        training: bool,
    ) -> tuple[Tensor, LayerCasts | None]:
        if weight.is_meta or lora_A.is_meta:
            return torch.empty(weight.shape[0], device="meta"), None
        group = None
        if self.source() is not None:
            group = self.family.group(weight, lora_A, lora_B, dtype)
        if weight.is_cuda and capturing():
            found = None if group is None else group.record(self)
            if found is None:
                found = _in_capture(weight, lora_A, lora_B, scale, dtype)
            return found, None  # a graph casts for itself
        if group is not None:
            return group.norm(self, weight, lora_A, lora_B, scale, training)
        kept = self._kept_value(weight, lora_A, lora_B, scale, dtype)
        if kept is not None:
            return kept.norm, None
        found = apart(
            weight.device, lambda: self._norm_by_value(weight, lora_A, lora_B, scale, dtype)
        )
        return found, None

    def _kept_value(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> _Value | None:
        """The last norm if nothing has changed. Makes nothing that stays, so it needs no thread."""
        value = self._values.get(dtype)
        if (
            value is None
            or value.base is not self._base
            or value.base.mark != _base_mark(weight)
            or value.mark != _mark(scale, lora_A, lora_B)
            or not self._probes_fit(lora_A, lora_B)
        ):
            return None
        found = _sample(weight), *self._fingerprints(lora_A, lora_B)
        known = value.base.sample, *value.prints
        return value if all(map(_same, found, known)) else None

    def _norm_by_value(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        value, base = self._values.get(dtype), self._base_of(weight)
        mark, prints = _mark(scale, lora_A, lora_B), self._fingerprints(lora_A, lora_B)
        if (
            value is None
            or base is not value.base
            or mark != value.mark
            or not all(_same(a, b) for a, b in zip(prints, value.prints, strict=True))
        ):
            A, B = lora_A.to(dtype), lora_B.to(dtype)
            norm = dora_norm(weight, A, B, scale=scale, base_sq=base.square_sum)
            value = self._values[dtype] = _Value(norm, base, mark, prints)
            self.counted += 1
        return value.norm

    def _base_of(self, weight: Tensor) -> _Base:
        """||W||^2, kept while W is the same."""
        mark, sample, base = _base_mark(weight), _sample(weight), self._base
        if base is None or base.mark != mark or not _same(base.sample, sample):
            base = self._base = _Base(mark, sample.clone(), row_square_sum(weight))
        return base

    def _fingerprints(self, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
        A, B = _wide(lora_A.detach()), _wide(lora_B.detach())
        if not self._probes_fit(lora_A, lora_B):
            self._probes = (_probe(A.shape[1], A, 1), _probe(B.shape[1], B, 2))
        assert self._probes is not None
        with torch.autocast(A.device.type, enabled=False):
            return A @ self._probes[0], B @ self._probes[1]

    def _probes_fit(self, lora_A: Tensor, lora_B: Tensor) -> bool:
        """Whether the vectors that A and B are multiplied with are there, and like them."""
        return self._probes is not None and all(
            probe.shape[0] == factor.shape[1]
            and probe.dtype == _wide_type(factor)
            and probe.device == factor.device
            for probe, factor in zip(self._probes, (lora_A, lora_B), strict=True)
        )


def _mark(scale: float, lora_A: Tensor, lora_B: Tensor) -> tuple[Any, ...]:
    return scale, lora_A.device, lora_A.dtype, lora_B.dtype


def _base_mark(weight: Tensor) -> tuple[Any, ...]:
    layout = weight.shape, weight.stride()  # a transpose lies at the same address
    return weight.data_ptr(), version(weight), layout, weight.dtype, weight.device


def _in_capture(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """The norm by its definition and without a look at any value, so that it can be recorded."""
    warnings.warn(
        "A CUDA graph computes hirank's norms each time it is played, because the model had not "
        "run with these weights before: run it once in the same way, then capture it.",
        RuntimeWarning,
        stacklevel=2,
    )
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    A, height = lora_A.to(dtype).to(wide), max(1, _RECORDED // max(1, weight.shape[1]))
    with torch.autocast(weight.device.type, enabled=False):
        rows = [torch.split(matrix, height) for matrix in (weight, lora_B.to(dtype))]
        norms = [
            torch.linalg.vector_norm(torch.addmm(W.to(wide), B.to(wide), A, alpha=scale), dim=1)
            for W, B in zip(*rows, strict=True)
        ]
    return torch.cat(norms)


_RECORDED = 2**24  # entries of W + s B A that a graph forms at a time

# For compiled code, which knows a layer by its weights.

_REGISTRY: list["weakref.ref[NormCache]"] = []
_BY_ADDRESS: dict[tuple[int, int, int], "weakref.ref[NormCache]"] = {}


def norm_of(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """`NormCache.norm` of whichever cache watches these very weights; computed if none does."""
    key = (weight.data_ptr(), lora_A.data_ptr(), lora_B.data_ptr())
    ref = _BY_ADDRESS.get(key)
    cache = None if ref is None else ref()
    inputs = None if cache is None else cache.source()
    if inputs is None or _addresses(inputs) != key:
        cache, inputs = _found(key)
    if cache is not None and inputs is not None and inputs[3] == scale:
        W, A, B, s = inputs
        return cache.norm(W, A, B, s, dtype)
    with torch.no_grad():
        if weight.is_cuda and capturing():
            return _in_capture(weight, lora_A, lora_B, scale, dtype)
        A, B = lora_A.to(dtype), lora_B.to(dtype)
        return apart(weight.device, lambda: dora_norm(weight, A, B, scale=scale))


def _addresses(inputs: tuple[Tensor, Tensor, Tensor, float]) -> tuple[int, int, int]:
    weight, A, B, _ = inputs
    return weight.data_ptr(), A.data_ptr(), B.data_ptr()


def _found(key: tuple[int, int, int]) -> tuple[NormCache | None, Any]:
    for ref in list(_REGISTRY):
        cache = ref()
        inputs = None if cache is None else cache.source()
        if inputs is not None and _addresses(inputs) == key:
            if len(_BY_ADDRESS) > 2 * len(_REGISTRY):
                _BY_ADDRESS.clear()
            _BY_ADDRESS[key] = ref
            return cache, inputs
    return None, None


@torch.no_grad()
def base_norm(weight: Tensor) -> Tensor:
    """||W|| per row, [N] fp32 (fp64 for fp64): to the bit what `NormCache.norm` gives for B = 0."""
    return row_norm(weight)

"""Keep the row norm of W + sBA for as long as it is true, and not a step longer.

The norm depends on weights only, so it is computed once per weight change: accumulation
micro-batches, recomputation under checkpointing and inference all reuse it.

How a change is noticed. Version counters do not do: fused optimizers, `.data` writes and
`vector_to_parameters` leave them as they were. So the adapter is compared *by value*. The frozen
base is large; it is watched by address, version counter and a sample of its entries. The magnitude
is not part of the norm and so cannot make it stale.

    CPU    at every call a product of A with a fixed random vector, and of B likewise, reads every
           weight once; a change too small to show in them is below fp32 rounding of the norm.
    GPU    once per pass through the model. What the host can see (an optimizer's step, a version,
           an address, a scale) is computed again at once. For what it cannot see one kernel hashes
           the bits of all adapters, and another computes again the norms of those that changed
           (`kernels/norm_table`). Nothing waits for the device.

A layer that runs again inside a backward pass (checkpointing) uses the norm of its forward.

After overwriting part of a base weight through `.data`, where neither counter nor sample need show
it, call `NormCache.clear` (`hirank.accelerate` does it for every layer).
"""

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hirank.kernels.dora_norm import dora_norm, fits_triton, row_square_sum
from hirank.kernels.norm_table import NormEntry, NormTable

__all__ = ["NormCache", "Source", "base_norm"]

Source = Callable[[], tuple[Tensor, Tensor, Tensor, float] | None]
"""Where a cache finds W, A, B and s at any time; None once the layer is gone."""

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
    stride = max(1, flat.numel() // _SAMPLES)
    while math.gcd(stride, weight.shape[-1]) > 1:  # else only some columns would be watched
        stride += 1
    return flat[::stride].clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@dataclass(slots=True)
class _Base:
    """||W||^2 and the marks by which a changed W is recognised."""

    mark: tuple[Any, ...]
    sample: Tensor
    square_sum: Tensor  # [N]


@dataclass(eq=False)
class NormCache:
    """The norm of one adapter on one layer. Holds a few vectors; never saved with a model."""

    source: Source = field(default=lambda: None, repr=False)
    owner: Callable[[], Any] = field(default=lambda: None, repr=False)
    """The layer it belongs to, which a copied cache has lost."""
    _base: _Base | None = field(default=None, repr=False)
    _mark: tuple[Any, ...] | None = field(default=None, repr=False)
    _prints: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _norm: Tensor | None = field(default=None, repr=False)
    _probes: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _computed: int = 0
    _group: "_Group | None" = field(default=None, repr=False)
    _seen: int = -1
    _visible: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _REGISTRY.append(weakref.ref(self, _REGISTRY.remove))
        for group in _GROUPS.values():
            group.stale = True

    @property
    def computed(self) -> int:
        """How many times the norm was computed: once per change of weights. Waits for a GPU."""
        return self._computed + (self._group.computed(self) if self._group else 0)

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self._computed = self.computed
        if self._group:
            self._group.stale = True
        self._base = self._mark = self._prints = self._norm = self._probes = self._group = None
        self._seen = -1

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
        group = self._group
        if group is not None and group.serves(self, lora_A, lora_B, scale, dtype):
            self._seen = group.passes
            assert self._norm is not None
            return self._norm
        with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
            return self._checked_norm(weight, lora_A, lora_B, scale, dtype)

    def _checked_norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        if weight.is_meta or lora_A.is_meta:
            return torch.empty(weight.shape[0], device="meta")
        if self.source() is not None and _fits_table(weight, lora_A, lora_B, dtype):
            return self._norm_of_group(_group_of(weight, lora_A, dtype))
        return self._norm_by_value(weight, lora_A, lora_B, scale, dtype)

    def _norm_of_group(self, group: "_Group") -> Tensor:
        if self._group is not group:
            self.clear()
            self._group, group.stale = group, True
        group.refresh()
        self._seen = group.passes
        assert self._norm is not None
        return self._norm

    def _norm_by_value(
        self,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        if self._norm is not None and _in_backward():
            return self._norm
        base = self._base_of(weight)
        mark = (scale, dtype, lora_A.device, lora_A.dtype, lora_B.dtype, id(base))
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
            self._computed += 1
        assert self._norm is not None
        return self._norm

    def _base_of(self, weight: Tensor, look: bool = True) -> _Base:
        """||W||^2, kept while W is the same; `look` compares a sample of it, and waits for it."""
        mark = (weight.data_ptr(), _version(weight), weight.shape, weight.dtype, weight.device)
        sample = _sample(weight) if look else weight.new_empty(0)
        base = self._base
        if base is None or base.mark != mark or not _same(base.sample, sample):
            base = self._base = _Base(mark, sample, row_square_sum(weight))
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


# On a GPU: all layers together.

_REGISTRY: list["weakref.ref[NormCache]"] = []
_GROUPS: dict[tuple[Any, ...], "_Group"] = {}


_STEPS = itertools.count(1)
_step = 0


def _count_step(*_: Any) -> None:
    global _step
    _step = next(_STEPS)


register_optimizer_step_post_hook(_count_step)


class _Group:
    """The caches of one device and one set of dtypes, brought up to date together.

    A pass through the models runs each layer once, so a layer that comes by for the second time
    since the last refresh begins a new pass, and refreshes all.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.passes = 0
        self.stale = True
        """Caches came, went or forgot since the table was built."""
        self._dtype = dtype
        self._step = -1
        self._caches: list[weakref.ref[NormCache]] = []
        self._marks: list[tuple[Any, ...]] = []
        self._table: NormTable | None = None

    def serves(
        self, cache: NormCache, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype
    ) -> bool:
        """Whether what the cache holds is good for this call: the hot path, so few and cheap."""
        return (
            not self.stale
            and dtype == self._dtype
            and (cache._seen != self.passes or _in_backward())
            and cache._visible == (scale, _version(A), _version(B))
            and (self._step == _step or not A.requires_grad)
        )

    def computed(self, cache: NormCache) -> int:
        counts = [] if self._table is None else self._table.computed.tolist()
        found = (n for c, n in zip(self._caches, counts, strict=True) if c() is cache)
        return next(found, 0)

    def refresh(self) -> None:
        """Compute what visibly changed, and let the device look for what did not show."""
        caches, entries, marks = self._survey()
        if self.stale or [m[:5] for m in marks] != [m[:5] for m in self._marks]:
            self._rebuild(caches, entries)
        assert self._table is not None
        visible = self._visible(caches, entries, marks)
        for cache, entry in visible:
            self._compute(cache, entry)
        if visible:
            self._table.accept()
        else:
            self._table.refresh()
        self._marks, self._step, self.stale = marks, _step, False
        self.passes += 1

    def _rebuild(self, caches: list[NormCache], entries: list[NormEntry]) -> None:
        for cache in caches:
            cache._computed = cache.computed
        self._table = NormTable(entries, self._dtype)
        self._caches, self._marks = [weakref.ref(cache) for cache in caches], []

    def _visible(
        self, caches: list[NormCache], entries: list[NormEntry], marks: list[tuple[Any, ...]]
    ) -> list[tuple[NormCache, NormEntry]]:
        both = list(zip(caches, entries, strict=True))
        if not self._marks:
            return both
        stepped = self._step != _step
        return [
            pair
            for pair, mark, last in zip(both, marks, self._marks, strict=True)
            if mark != last or (stepped and pair[1].lora_A.requires_grad)
        ]

    def _compute(self, cache: NormCache, entry: NormEntry) -> None:
        base_sq = cache._base_of(entry.weight, look=False).square_sum
        A, B = entry.lora_A.to(self._dtype), entry.lora_B.to(self._dtype)
        dora_norm(entry.weight, A, B, scale=entry.scale, base_sq=base_sq, out=entry.norm)
        cache._computed += 1

    def _survey(self) -> tuple[list[NormCache], list[NormEntry], list[tuple[Any, ...]]]:
        caches, entries, marks = [], [], []
        for cache in [found for ref in _REGISTRY if (found := ref()) is not None]:
            inputs = cache.source()
            if inputs is None or not self._takes(cache, *inputs):
                continue
            weight, A, B, scale = inputs
            if cache._norm is None:
                cache._norm = torch.empty(weight.shape[0], device=weight.device)
            cache._group = self
            caches.append(cache)
            entries.append(NormEntry(weight, A, B, scale, cache._norm))
            pointers = (weight.data_ptr(), A.data_ptr(), B.data_ptr(), cache._norm.data_ptr())
            cache._visible = (scale, _version(A), _version(B))
            marks.append((*pointers, *cache._visible, _version(weight), A.shape))
        return caches, entries, marks

    def _takes(self, cache: NormCache, weight: Tensor, A: Tensor, B: Tensor, scale: float) -> bool:
        if cache._group is not None:
            return cache._group is self
        return _fits_table(weight, A, B, self._dtype) and _group_of(weight, A, self._dtype) is self


def _group_of(weight: Tensor, lora_A: Tensor, dtype: torch.dtype) -> _Group:
    key = (weight.device, weight.dtype, lora_A.dtype, dtype)
    if key not in _GROUPS:
        _GROUPS[key] = _Group(dtype)
    return _GROUPS[key]


def _fits_table(weight: Tensor, lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> bool:
    return (
        fits_triton(weight, lora_A, lora_B)
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and lora_A.dtype == lora_B.dtype
        and weight.device == lora_A.device == lora_B.device
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def base_norm(weight: Tensor) -> Tensor:
    """||W|| per row, [N] fp32 (fp64 for fp64): to the bit what `NormCache.norm` gives for B = 0."""
    return row_square_sum(weight).sqrt_()

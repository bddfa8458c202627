"""Keep the row norm of an adapted weight whose base is quantised.

    norm^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>

||W||^2 is kept while the base is frozen, so that a new norm after an optimizer step costs one
dequantisation and one product [N, K] x [K, R], accumulated in fp32. With B = 0 it is ||W|| to the
bit: m taken from it gives g = 1 exactly.

How a change is noticed. A and B are compared by value, the stored weight by address, version and
a sample, as in `adapters/gain`: on a CPU at every call; on a GPU for all layers of a model at once
when a pass through it begins, so that the host waits once a pass. A layer that runs again inside a
backward pass (checkpointing) is not looked at again on a GPU, unless something was computed or
compared since its forward.
"""

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hirank.adapters.capture import capturing
from hirank.adapters.dequantise import Packed
from hirank.adapters.groups import in_backward
from hirank.adapters.survey import version
from hirank.kernels.dora_norm import dora_norm_ref
from hirank.kernels.prints import PrintTable, key_of, printable

__all__ = ["QuantisedNorms", "Watch"]

_SAMPLES = 1024  # entries of each stored tensor that are compared
_SEED = 0x5EED


class _Value(NamedTuple):
    norm: Tensor  # [N]
    mark: tuple[Any, ...]
    prints: Tensor
    inputs: "tuple[weakref.ref[Tensor], weakref.ref[Tensor], weakref.ref[Any]]"  # A, B, base layer


class _Base(NamedTuple):
    mark: tuple[Any, ...]
    sample: Tensor
    square_sum: Tensor  # [N]


class Watch:
    """The norms of one model on a GPU: compares all of them at once when a pass begins."""

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[QuantisedNorms] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._count = self._trained = 0  # looks so far, and at the last call with gradients
        self._seen: dict[int, set[int]] = {}  # by thread: who came by in this pass
        self._held: dict[int, _Value] = {}  # by cache: the value found to be true
        self._tables: dict[torch.device, tuple[Any, PrintTable]] = {}  # of all its caches

    def __deepcopy__(self, memo: dict[int, Any]) -> "Watch":
        return Watch()

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()

    def join(self, cache: "QuantisedNorms") -> None:
        """From now on its values are compared."""
        self._caches.add(cache)

    def turn(self) -> None:
        """Other layers or adapters run from now on, so that the next call begins a pass."""
        with self._lock:
            self._seen.clear()

    def vouches(self, cache: "QuantisedNorms", value: _Value, training: bool) -> bool:
        """Whether this value was found to be true when the pass began, or computed since."""
        with self._lock:
            seen = self._seen.setdefault(threading.get_ident(), set())
            if in_backward():
                if self._count != self._trained:
                    self._compare()
            elif id(cache) in seen or not seen:
                seen.clear()
                self._compare()
            if not in_backward():
                seen.add(id(cache))
            self._trained = self._count if training else self._trained
            return self._held.get(id(cache)) is value

    def computed(self, cache: "QuantisedNorms", value: _Value, training: bool) -> None:
        """A value is new, and so true until the next pass."""
        with self._lock:
            self._seen.setdefault(threading.get_ident(), set()).add(id(cache))
            self._held[id(cache)] = value
            self._count += 1
            self._trained = self._count if training else self._trained

    def _compare(self) -> None:
        self._count += 1
        found = [(c, v) for c in list(self._caches) for v in c.values() if _alive(v)]
        self._held = {}
        for device in {value.prints.device for _, value in found}:
            here = [(c, v) for c, v in found if v.prints.device == device]
            true = self._are_true([value for _, value in here], device)
            self._held |= {id(c): v for (c, v), is_true in zip(here, true, strict=True) if is_true}

    def _are_true(self, values: list[_Value], device: torch.device) -> list[bool]:
        """Whether what each was computed from is as it was. Waits for the device, once."""
        inputs = [_inputs_of(value) for value in values]
        then = torch.cat([value.prints for value in values])
        if not all(map(printable, inputs)) or then.dtype != torch.int32:
            now = torch.cat([_prints(*tensors) for tensors in inputs])
            return [torch.equal(now, then)] * len(values)
        sets = [_as_set(tensors) for tensors in inputs]
        key, table = [key_of(given) for given in sets], self._tables.get(device)
        if table is None or table[0] != key:
            table = self._tables[device] = key, PrintTable(sets)
        both: list[list[int]] = torch.stack([table[1].prints(), then]).tolist()
        return [now == before for now, before in zip(*both, strict=True)]


def _alive(value: _Value) -> bool:
    return all(ref() is not None for ref in value.inputs)


def _inputs_of(value: _Value) -> list[Tensor]:
    A, B, layer = (ref() for ref in value.inputs)
    return [cast(Tensor, A), cast(Tensor, B), *value.mark[0].stored(layer)]


def _as_set(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int | None]]:
    """A and B are looked at as a whole, the stored weight by a sample."""
    return [(t, None if i < 2 else _SAMPLES) for i, t in enumerate(tensors)]


class QuantisedNorms:
    """The norm of one adapter over a quantised base. Holds a few vectors; never saved."""

    def __init__(self, watch: Watch | None = None, beside: "QuantisedNorms | None" = None) -> None:
        """`beside`: the norm of another adapter on the same layer, to share ||W||^2 with."""
        self.computed = 0
        """How often the norm was computed: once per change of weights."""
        self.watch = Watch() if watch is None else watch
        self.watch.join(self)
        self._values: dict[torch.dtype, _Value] = {}
        self._base: list[_Base] = [] if beside is None else beside._base
        self._table: tuple[Any, PrintTable] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantisedNorms":
        return QuantisedNorms()  # a copied layer has weights of its own

    def __reduce__(self) -> tuple[type["QuantisedNorms"], tuple[()]]:
        return QuantisedNorms, ()

    def clear(self) -> None:
        """Forget everything: the next call computes anew."""
        self._values.clear()
        self._base.clear()

    def values(self) -> list[_Value]:
        """What is kept, one for each dtype in which the layer was called."""
        return list(self._values.values())

    def base_norm(self, packed: Packed) -> Tensor:
        """||W|| per row, [N] fp32: to the bit what `norm` gives for B = 0."""
        with torch.inference_mode(False), torch.no_grad():
            return self._square_sum(packed).sqrt()

    def norm(self, packed: Packed, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
        """||W + s B A|| per row, [N] fp32, for A and B as cast to the compute dtype.

        On the meta device nothing is computed: the result is an empty meta tensor.
        """
        if lora_A.is_meta:
            return torch.empty(lora_B.shape[0], device="meta")
        training = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            A, B = lora_A.detach(), lora_B.detach()
            if A.is_cuda and capturing():
                return _in_capture(packed, A, B, scale)
            return self._checked(packed, A, B, scale, (lora_A, lora_B), training)

    def _checked(
        self,
        packed: Packed,
        A: Tensor,
        B: Tensor,
        scale: float,
        owners: tuple[Tensor, Tensor],
        training: bool,
    ) -> Tensor:
        value = self._values.get(packed.dtype)
        stored = packed.kind.stored(packed.layer)
        mark = (packed.kind, scale, *(_mark(t) for t in (*owners, *stored)))
        together = not _one_by_one(A)
        if value is not None and value.mark == mark:
            if together and self.watch.vouches(self, value, training):
                return value.norm
            if not together and torch.equal(_prints(A, B, *stored), value.prints):
                return value.norm
        prints = self._prints_now(A, B, *stored) if together else _prints(A, B, *stored)
        norm = _norm(packed, A, B, scale, self._square_sum(packed))
        refs = (weakref.ref(owners[0]), weakref.ref(owners[1]), weakref.ref(packed.layer))
        value = self._values[packed.dtype] = _Value(norm, mark, prints, refs)
        self.computed += 1
        self.watch.computed(self, value, training)
        return norm

    def _prints_now(self, *tensors: Tensor) -> Tensor:
        """Without a wait: the table stays for as long as the tensors do."""
        if not printable(tensors):
            return _prints(*tensors)
        given = _as_set(tensors)
        key = key_of(given)
        if self._table is None or self._table[0] != key:
            self._table = key, PrintTable([given])
        return self._table[1].prints()

    def _square_sum(self, packed: Packed) -> Tensor:
        """||W||^2, kept while W is the same."""
        stored = packed.kind.stored(packed.layer)
        mark, sample = tuple(map(_mark, stored)), _prints_of_base(stored)
        base = self._base[0] if self._base else None
        if base is None or base.mark != mark or not torch.equal(base.sample, sample):
            base = _Base(mark, sample, packed.square_sum())
            self._base[:] = [base]
        return base.square_sum


def _one_by_one(tensor: Tensor) -> bool:
    """Whether a look at values costs no wait for a device."""
    return tensor.device.type == "cpu"


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    where = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape)
    return (*where, version(tensor))


def _norm(packed: Packed, A: Tensor, B: Tensor, scale: float, square_sum: Tensor) -> Tensor:
    dtype = packed.dtype
    return dora_norm_ref(packed.weight(), A.to(dtype), B.to(dtype), scale, square_sum)


def _in_capture(packed: Packed, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """By the definition, a block of rows at a time, without a look at any value."""
    warnings.warn(
        "A CUDA graph computes the norms of quantised layers each time it is played.",
        RuntimeWarning,
        stacklevel=2,
    )
    dtype = packed.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, right = packed.weight(), A.to(dtype).to(wide)
    height = max(1, _RECORDED // max(1, weight.shape[1]))
    with torch.autocast(weight.device.type, enabled=False):
        blocks = zip(torch.split(weight, height), torch.split(B.to(dtype), height), strict=True)
        norms = [
            torch.linalg.vector_norm(torch.addmm(W.to(wide), b.to(wide), right, alpha=scale), dim=1)
            for W, b in blocks
        ]
    return torch.cat(norms)


_RECORDED = 2**24  # entries of W + s B A that a graph forms at a time


def _prints(A: Tensor, B: Tensor, *stored: Tensor) -> Tensor:
    """What changes when A, B or the stored weight do: a few numbers a row."""
    wide = torch.promote_types(torch.promote_types(A.dtype, B.dtype), torch.float32)
    with torch.no_grad(), torch.autocast(A.device.type, enabled=False):
        parts = [t.to(wide) @ _probe(t.shape[1], wide, t.device) for t in (A, B)]
    return torch.cat([*parts, _prints_of_base(stored).to(wide)])


def _prints_of_base(stored: Sequence[Tensor]) -> Tensor:
    return torch.cat([_sample(tensor) for tensor in stored])


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLES) | 1  # odd, so that no power of two hides columns
    return flat[::stride].float()


_probes: dict[tuple[Any, ...], Tensor] = {}


def _probe(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fixed random vector."""
    key = length, dtype, device
    if key not in _probes:
        made = torch.Generator().manual_seed(_SEED + length)
        _probes[key] = torch.rand(length, generator=made, dtype=dtype).sub_(0.5).to(device)
    return _probes[key]

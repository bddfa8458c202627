"""On a GPU: the norms of all layers of a model, brought up to date together.

A pass through the model runs its layers in their order, so a layer that comes by after a later one,
or for the first time, begins a new pass, and refreshes all. What the host can see (an optimizer's
step, a version, an address, a scale) is computed again whatever the prints say; the device compares
the prints of the others (`kernels/norm_table`). Nothing waits. What a backward pass will use is a
copy, as the table's own norms may be computed again before.

Threads share all of it. A call that finds its norm in order takes no lock; whatever changes
something takes one. Passes are counted for each thread on its own, and a stream that is not the
one of the last refresh waits for it, on the device.

While a CUDA graph is being captured nothing is known of the times when it will be played, so the
refresh itself is recorded, once a graph: played, it compares the prints and computes what changed.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from hirank.adapters.capture import capture_id, capturing, raw_stream
from hirank.adapters.survey import Survey, copied, mark_of, places_of, version
from hirank.kernels._apart import apart
from hirank.kernels.cast_windows import Castable, CastWindows, LayerCasts
from hirank.kernels.dora_norm import as_it_lies, fits_triton
from hirank.kernels.norm_replay import ReplayableNormTable
from hirank.kernels.norm_table import NormEntry

if TYPE_CHECKING:
    from hirank.adapters.gain import NormCache

__all__ = ["Family", "Group", "Member", "in_backward"]

LOCK = RLock()

_STEPS = itertools.count(1)
_step = 0


def _count_step(*_: Any) -> None:
    global _step
    _step = next(_STEPS)


register_optimizer_step_post_hook(_count_step)


_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    return _graph_task() != -1


class Family:
    """The caches of one model. A copy is the family of the copied layers, and empty."""

    def __init__(self) -> None:
        self.changes = 0
        """Caches that came, went or forgot so far."""
        self.turns = 0
        """How often it was said that other layers or adapters run from now on."""
        self._caches: list[weakref.ref[NormCache]] = []
        self._groups: dict[tuple[Any, ...], Group] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        return Family()

    def __reduce__(self) -> tuple[type[Family], tuple[()]]:
        return Family, ()

    def join(self, cache: NormCache) -> None:
        with LOCK:
            self._caches.append(weakref.ref(cache, self._leave))
            self.changes += 1

    def _leave(self, ref: weakref.ref[NormCache]) -> None:
        self._caches.remove(ref)

    def turn(self) -> None:
        """Other layers or adapters run from now on, so that the next call begins a pass."""
        with LOCK:
            self.turns += 1

    def caches(self) -> list[NormCache]:
        return [found for ref in list(self._caches) if (found := ref()) is not None]

    def group(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype
    ) -> Group | None:
        """The group for such weights; None where the kernels do not take them."""
        key = _key(weight, lora_A, lora_B, dtype)
        if key is None:
            return None
        with LOCK:
            if key not in self._groups:
                self._groups[key] = Group(self, key)
            return self._groups[key]


def _key(weight: Tensor, lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> Any:
    """What the layers of a group have in common."""
    fits = (
        fits_triton(as_it_lies(weight), lora_A, lora_B)
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and lora_A.dtype == lora_B.dtype
        and weight.device == lora_A.device == lora_B.device
        and lora_A.shape[1] == weight.shape[1]
        and tuple(lora_B.shape) == (weight.shape[0], lora_A.shape[0])
    )
    turned = not weight.is_contiguous()
    return (weight.device, weight.dtype, lora_A.dtype, turned, dtype) if fits else None


@dataclass(eq=False, slots=True)
class Member:
    """The place of one cache in a group."""

    group: Group
    live: Tensor  # [N], which the table writes
    norm: Tensor  # [N], which is served: `live`, or a copy that a backward pass can rely on
    casts: LayerCasts | None = None
    """Where A and B lie as they multiply, whenever the norm is good; None: each call casts."""
    position: int | None = None
    """When it comes by in a pass, as learned; None: it never did."""
    visible: tuple[Any, ...] = ()
    sizes: tuple[int, ...] = ()
    watched: tuple[Tensor, ...] = ()
    """W, A and B as last surveyed."""

    def knows(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
        """Whether a call comes with the tensors that are watched."""
        return [*map(id, self.watched)] == [id(weight), id(lora_A), id(lora_B)]

    def serves(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> bool:
        """Whether the norm is good for this call: the hot path, so few and cheap."""
        group = self.group
        try:
            versions = lora_A._version, lora_B._version, weight._version
        except RuntimeError:  # inference tensors have no version
            versions = version(lora_A), version(lora_B), version(weight)
        pointers = lora_A.data_ptr(), lora_B.data_ptr(), weight.data_ptr()
        if not (
            group.built == group.family.changes
            and group.turns == group.family.turns
            and self.visible == (scale, *versions, *pointers)
            and self.sizes == (weight.numel(), lora_A.numel(), lora_B.numel())
            and self.watched[0] is weight  # `visible` is written last
            # its data may have been transposed where they lie
            and (weight.t() if group.turned else weight).is_contiguous()
            and lora_A.is_contiguous()
            and lora_B.is_contiguous()
            and self.watched[1] is lora_A
            and self.watched[2] is lora_B
            and (group.step == _step or not lora_A.requires_grad)
            and (self.norm is not self.live or not torch.is_grad_enabled())
        ):
            return False
        if group.index is not None:  # what is launched now must follow the refresh, and must run
            stream = raw_stream(group.index)
            if stream != group.stream or (stream and capturing()):
                return False
        return group.continues(self.position)


class Group:
    """The caches of one model that share a device and dtypes."""

    def __init__(self, family: Family, key: tuple[Any, ...]) -> None:
        self.family = family
        self.last: dict[int, int] = {}
        """By thread: the position of the layer that came by last."""
        self.count = self.trained = 0
        """Refreshes so far, and how many there were at the last one with gradients."""
        self.built = -1
        """How many changes of the family the table has seen."""
        self.step = -1
        self.turns = 0
        self.index: int | None = key[0].index if key[0].type == "cuda" else None
        self._key = key
        self.turned: bool = key[3]
        self._device: torch.device = key[0]
        self._dtype: torch.dtype = key[-1]
        self._caches: list[weakref.ref[NormCache]] = []
        self._marks: list[tuple[Any, ...]] = []
        self._found: Survey | None = None
        """The last survey; None: ask the layers anew."""
        self._table: ReplayableNormTable | None = None
        self._windows: CastWindows | None = None
        self.stream = 0
        self._done: torch.cuda.Event | None = None
        self._capture: int | None = None
        self._is_recorded = False
        self._positions: weakref.WeakKeyDictionary[NormCache, int] = weakref.WeakKeyDictionary()

    def continues(self, position: int | None) -> bool:
        """Whether a layer goes on with a pass: it comes later than the one before it.

        In a backward pass: whether nothing was refreshed since the forward pass it belongs to.
        """
        if _graph_task() != -1:
            return self.count == self.trained
        thread = get_ident()
        if position is None or position <= self.last.get(thread, position):
            return False
        self.last[thread] = position
        return True

    def computed(self, cache: NormCache) -> int:
        """How often the table computed the norm of one cache. Waits for the device."""
        with LOCK:
            counts = [] if self._table is None else self._table.computed.tolist()
            found = (n for c, n in zip(self._caches, counts, strict=True) if c() is cache)
            return next(found, 0)

    def norm(
        self,
        cache: NormCache,
        weight: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        scale: float,
        training: bool,
    ) -> tuple[Tensor, LayerCasts | None]:
        """The norm and casts of one cache, all others brought up to date with it."""
        with LOCK:
            self._wait()
            member = cache.members.get(self._dtype)
            if member is None or member.group is not self:
                self.built = -1
            elif not member.knows(weight, lora_A, lora_B) or member.visible[:1] != (scale,):
                self._found = None
            self.refresh(training)
            member = cache.members[self._dtype]
            if not in_backward():
                member.position = self._positions.setdefault(cache, len(self._positions))
                self.last[get_ident()] = member.position
            return member.norm, member.casts

    def renew(self, member: Member, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
        """Begin a pass before which nothing visibly changed: in short what `norm` would do.

        False: something did, or may have, so that nothing was done.
        """
        with LOCK:
            if (
                self._found is None
                or member.position is None
                or self.built != self.family.changes
                or self.turns != self.family.turns
                or not member.knows(weight, lora_A, lora_B)
                or not self._lie_as_before(weight, lora_A, lora_B)
                or torch.is_inference_mode_enabled()
                or in_backward()
                or (self.index is not None and capturing())
            ):
                return False
            found, step = self._found.again(), _step
            if found.marks != self._marks or (self.step != step and found.is_trained()):
                return False
            self._wait()
            self._launch([], len(found.entries))
            self._serve(found, step, torch.is_grad_enabled())
            self.last[get_ident()] = member.position
            return True

    def _lie_as_before(self, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
        _, weight_type, adapter_type, turned, _ = self._key
        return (
            (weight.t() if turned else weight).is_contiguous()
            and lora_A.is_contiguous()
            and lora_B.is_contiguous()
            and weight.dtype == weight_type
            and lora_A.dtype == lora_B.dtype == adapter_type
        )

    def _wait(self) -> None:
        stream = 0 if self.index is None else raw_stream(self.index)
        if stream != self.stream and self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self.stream = stream

    def refresh(self, training: bool) -> None:
        """Compute what visibly changed, and let the device look for what did not show.

        `training`: gradients will be asked for, so what is served must stay as it is.
        """
        changes, step, turns = self.family.changes, _step, self.family.turns
        found = None
        if self.built == changes:
            found = self._survey() if self._found is None else self._found.again()
        if found is None or places_of(found.marks) != places_of(self._marks):
            found = apart(self._device, self._rebuild)
        self._launch(self._visible(found, step), len(found.entries))
        # what the host knows, only now: another thread may act on it at once
        self.built, self.turns = changes, turns
        self._serve(found, step, training)

    def _serve(self, found: Survey, step: int, training: bool) -> None:
        self._marks, self.step, self._found = found.marks, step, found
        self.count += 1
        if self._windows is not None:
            self._windows.turn += 1
        if training:
            self.trained = self.count
        live = [member.live for member in found.members]
        served = copied(live) if training else live
        for member, norm, entry, mark in zip(
            found.members, served, found.entries, found.marks, strict=True
        ):
            W, A, B, _, _, W_version, scale, *versions = mark
            member.norm, member.watched = norm, entry[:3]
            member.sizes = tuple([t.numel() for t in entry[:3]])
            member.visible = (scale, *versions, W_version, A, B, W)
        if self.index is not None:
            if self._done is None:
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(self._device))

    def _launch(self, visible: list[int], count: int) -> None:
        table = self._table
        assert table is not None
        if 0 < len(visible) < count:  # makes flags that the table keeps
            apart(self._device, lambda: table.refresh(force=visible))
        else:
            table.refresh(force=bool(visible))

    def _here(self) -> list[tuple[NormCache, tuple[Tensor, Tensor, Tensor, float]]]:
        """The caches that belong to the group as things are now, and what they watch."""
        found = []
        for cache in self.family.caches():
            inputs = cache.source()
            if inputs is not None:
                weight, A, B, _ = inputs
                if _key(weight, A, B, self._dtype) == self._key:
                    found.append((cache, inputs))
        return found

    def _survey(self) -> Survey:
        found = Survey([], [], [], [])
        for cache, (weight, A, B, scale) in self._here():
            member = cache.members.get(self._dtype)
            if member is None or member.group is not self:
                fresh = torch.empty(weight.shape[0], device=self._device)
                member = cache.members[self._dtype] = Member(self, fresh, fresh)
                member.position = self._positions.get(cache)
            entry = NormEntry(weight, A, B, scale, member.live)
            found.caches.append(weakref.ref(cache))
            found.members.append(member)
            found.entries.append(entry)
            found.marks.append(mark_of(entry))
        return found

    def _rebuild(self) -> Survey:
        counts = [] if self._table is None else self._table.computed.tolist()
        for ref, count in zip(self._caches, counts, strict=True):
            cache = ref()
            if cache is not None:
                cache.counted += count
                if self._is_recorded:  # the norms belong to a graph now
                    cache.members.pop(self._dtype, None)
        found = self._survey()
        self._dismiss(found.caches)
        self._table = ReplayableNormTable(found.entries, self._dtype)
        self._share_casts(found)
        self._caches, self._marks = found.caches, []
        self._capture, self._is_recorded = None, False
        return found

    def _share_casts(self, found: Survey) -> None:
        """Windows over the layers that cast at every call: fp32 adapters that multiply in bf16."""
        shared: list[Member] = []
        layers: list[Castable] = []
        for ref, member, entry in zip(found.caches, found.members, found.entries, strict=True):
            cache, (_, A, B, scale, _) = ref(), entry
            member.casts = None
            casts = self._dtype == torch.bfloat16 and A.dtype == torch.float32 and A.numel()
            if casts and cache is not None and cache.is_linear:
                shared.append(member)
                layers.append(Castable(A, B, scale))
        self._windows = CastWindows(layers, self._dtype) if layers else None
        if self._windows is not None:
            for i, member in enumerate(shared):
                member.casts = LayerCasts(self._windows, i)

    def _dismiss(self, kept: list[weakref.ref[NormCache]]) -> None:
        """Caches that the table no longer watches have no norm that could be served."""
        here = {id(ref()) for ref in kept}
        for cache in self.family.caches():
            member = cache.members.get(self._dtype)
            if member is not None and member.group is self and id(cache) not in here:
                del cache.members[self._dtype]

    def _visible(self, found: Survey, step: int) -> list[int]:
        if not self._marks:
            return list(range(len(found.entries)))
        stepped = self.step != step
        return [
            i
            for i, (entry, mark) in enumerate(zip(found.entries, found.marks, strict=True))
            if mark != self._marks[i] or (stepped and entry.lora_A.requires_grad)
        ]

    def record(self, cache: NormCache) -> Tensor | None:
        """The norm for a graph that is being captured; None: the table does not know the weights.

        Host and device stay as they are: nothing runs before the graph is played.
        """
        with LOCK:
            member = cache.members.get(self._dtype)
            if self._table is None or member is None or member.group is not self:
                return None
            number = None if self.index is None else capture_id(raw_stream(self.index))
            if number is None or number != self._capture:
                if not self._knows_all():
                    return None
                self._table.refresh()
                self._capture, self._is_recorded = number, True
            if self._table not in cache.recorded:
                cache.recorded.append(self._table)
            return member.live

    def _knows_all(self) -> bool:
        """Whether the table is built on the weights as they are, but for the values of A and B."""
        marks = []
        for cache, (weight, A, B, scale) in self._here():
            member = cache.members.get(self._dtype)
            if member is None or member.group is not self:
                return False
            marks.append(mark_of(NormEntry(weight, A, B, scale, member.live)))
        return [mark[:7] for mark in marks] == [mark[:7] for mark in self._marks]

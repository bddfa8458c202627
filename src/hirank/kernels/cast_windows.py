"""A and B of layers that run one after the other, cast to the compute dtype in one launch.

    window      a few layers in the order of the model: the one that asks, and those that follow it
                (in a backward pass, those before it), as one after the other will ask next
    place       where one window lies; a thread and stream has one, and its launches follow each
                other, so a new window may take the place of the last

A layer that finds its cast in the window launches nothing. Under checkpointing the window of a
recomputation serves the backward pass of the same layers as well: of some twenty casts in a block,
two launches are left.

Freshness  a window is as good as the norm: it belongs to one refresh of its model's norms, which
           every pass begins with, and how its layers lie is looked at when it is cast. What code
           writes through `.data` in the middle of a pass, to a layer that is yet to come in it,
           shows in the next pass, as it does in the norm.
Order      where layers run in another order than they lie, windows are of little use; a place
           whose windows are not used makes them narrower, down to none until the next pass.
Memory     one window of at most `WINDOW_BYTES` for each thread and stream that runs layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._apart import lasting_bytes
from hirank.kernels._operands import Cast, rides
from hirank.kernels._triton import Launcher, interpreting, jit, tl

__all__ = ["WINDOW_BYTES", "CastWindows", "Castable", "LayerCasts"]

WINDOW_BYTES = 64 * 10**6
_WIDEST = 8  # layers: a decoder block has seven
_BLOCK = 4096  # numbers that one program casts
_ALIGN = 64  # numbers: places begin on whole cache lines
_VIEWS = 4096  # that a place keeps: windows begin where they began in the last pass


@jit(do_not_specialize=["base"])
def _window_kernel(
    out, pointers, counts, starts, factors, blocks, base, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    # one program casts one block of one matrix: A, times its factor, or B
    matrix = tl.load(blocks + tl.program_id(0) * 2)
    index = tl.load(blocks + tl.program_id(0) * 2 + 1)
    count = tl.load(counts + matrix)
    o = index.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p_from = tl.load(pointers + matrix).to(tl.pointer_type(tl.float32)) + o
    p_to = out + (tl.load(starts + matrix) - base) + o
    if EVEN:  # 16 bytes at a time: the product says what a hint would not keep
        p_from, p_to = tl.multiple_of(p_from, [16]), tl.multiple_of(p_to, [16])
        count = count // 8 * 8
    b = tl.load(p_from, mask=o < count, other=0.0) * tl.load(factors + matrix)
    tl.store(p_to, b.to(out.dtype.element_ty), mask=o < count)


_window = Launcher(_window_kernel)


class Castable(NamedTuple):
    """One layer's adapter, in fp32 and contiguous."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    scale: float


class _Place:
    """Where a thread's window on one stream lies."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.first = self.last = 0
        self.turn = -1
        self.used, self.width = 0, _WIDEST
        self.casts: list[Cast] = []
        self.views: dict[tuple[int, int], Cast] = {}


class CastWindows:
    """Windows over the layers of one model that share a device and dtypes.

    Args:
        layers: in the order in which they lie in the model, at least one; on one GPU.
        dtype: 16 bits, in which they multiply.
    """

    turn = 0
    """Refreshes of the norms so far; whoever refreshes them counts. A new one ends all windows."""

    def __init__(self, layers: Sequence[Castable], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._device = layers[0].lora_A.device
        matrices = [t for layer in layers for t in layer[:2]]
        counts = self._counts = [t.numel() for t in matrices]
        sizes = [-(-count // _ALIGN) * _ALIGN for count in counts]
        self._starts = [0, *accumulate(sizes)]  # of matrices, had all of them a place
        self._addresses = [t.data_ptr() for t in matrices]
        self._even = not any(n % 8 for n in counts) and not any(p % 16 for p in self._addresses)
        self.factors = [float(x.scale) if rides(x.scale) else 1.0 for x in layers]
        programs = [-(-count // _BLOCK) for count in counts]  # of each matrix
        self._programs = [0, *accumulate(programs)]
        both = [f for factor in self.factors for f in (factor, 1.0)]
        self._tables = (
            self._there(self._addresses, torch.int64),
            self._there(counts, torch.int64),
            self._there(self._starts[:-1], torch.int64),
            self._there(both, torch.float32),
        )
        matrix = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(programs))
        index = torch.arange(len(matrix)) - torch.tensor(self._programs)[matrix]
        blocks = torch.stack([matrix, index], dim=1)  # [programs, 2]: matrix, block of it
        self._blocks = blocks.to(self._device, torch.int32)
        self._places = threading.local()

    def _there(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)

    def cast(self, i: int, onward: bool) -> Cast | None:
        """A and B of layer i; good until this thread asks for another.

        None where no window pays: the caller casts for itself.

        Args:
            onward: whether later layers will ask next, or earlier ones.
        """
        place = self._place()
        if place.turn != self.turn or not place.first <= i < place.last:
            if not self._fill(place, i, onward):
                return None
        place.used += 1
        return place.casts[i - place.first]

    def _place(self) -> _Place:
        kept: dict[Any, _Place] = self._places.__dict__
        stream = 0 if interpreting() else torch._C._cuda_getCurrentRawStream(self._device.index)
        place = kept.get(stream)
        if place is None:
            place = kept[stream] = _Place(self._memory())
        return place

    def _memory(self) -> Tensor:
        widest = max(self._end(i, _WIDEST)[1] for i in range(len(self._layers)))
        if interpreting():
            return torch.empty(widest, dtype=self._dtype)
        with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
            found = lasting_bytes(widest * self._dtype.itemsize, self._device.index)
            return found.view(self._dtype)

    def _end(self, first: int, width: int) -> tuple[int, int]:
        """Behind the last layer of the window that begins at `first`, and its numbers."""
        last = first + 1
        most = min(first + width, len(self._layers))
        while last < most and self._numbers(first, last + 1) * self._dtype.itemsize <= WINDOW_BYTES:
            last += 1
        return last, self._numbers(first, last)

    def _begin(self, last: int, width: int) -> int:
        """The first layer of the window that ends with `last`."""
        first, least = last, max(0, last + 1 - width)
        while (
            first > least
            and self._numbers(first - 1, last + 1) * self._dtype.itemsize <= WINDOW_BYTES
        ):
            first -= 1
        return first

    def _numbers(self, first: int, last: int) -> int:
        return self._starts[2 * last] - self._starts[2 * first]

    def _fill(self, place: _Place, i: int, onward: bool) -> bool:
        turn = self.turn
        self._learn(place)
        if place.width == 1:
            if place.turn == turn:
                return False
            place.width = 2  # another pass may have another order
        first = i if onward else self._begin(i, place.width)
        last = self._end(i, place.width)[0] if onward else i + 1
        if not self._lie_as_they_lay(first, last):
            return False
        a, b = self._programs[2 * first], self._programs[2 * last]
        place.turn = -1  # should the launch fail
        _window(
            (b - a, 1, 1), (place.out, *self._tables, self._blocks[a:b]),
            (self._starts[2 * first],), (self._even, _BLOCK), num_warps=8,
        )  # fmt: skip
        place.first, place.last, place.turn, place.used = first, last, turn, 0
        place.casts = [self._view(place, j) for j in range(first, last)]
        return True

    def _learn(self, place: _Place) -> None:
        """Narrower where half of the last window was of no use, wider where all of it was used."""
        count = place.last - place.first
        if place.turn != -1 and count > 1:
            if 2 * place.used <= count:
                place.width = max(1, place.width // 2)
                place.first = place.last = 0
            elif place.used >= count:
                place.width = min(_WIDEST, 2 * place.width)

    def _lie_as_they_lay(self, first: int, last: int) -> bool:
        matrices = [t for layer in self._layers[first:last] for t in layer[:2]]
        now = [t.data_ptr() for t in matrices]
        return now == self._addresses[2 * first : 2 * last] and all(
            t.is_contiguous() and t.numel() == count
            for t, count in zip(matrices, self._counts[2 * first :], strict=False)
        )

    def _view(self, place: _Place, i: int) -> Cast:
        key = place.first, i
        found = place.views.get(key)
        if found is None:
            if len(place.views) >= _VIEWS:
                place.views.clear()
            found = place.views[key] = self._made(place, i)
        return found

    def _made(self, place: _Place, i: int) -> Cast:
        base = self._starts[2 * place.first]
        with torch.inference_mode(False), torch.no_grad():
            A, B = (
                place.out[start - base : start - base + t.numel()].view(t.shape)
                for start, t in zip(self._starts[2 * i :], self._layers[i][:2], strict=False)
            )
            return Cast(A, A.t(), B, self.factors[i])


class LayerCasts(NamedTuple):
    """Where one layer finds its casts."""

    windows: CastWindows
    place: int

    def at(self, *, onward: bool) -> Cast | None:
        """As `CastWindows.cast`."""
        return self.windows.cast(self.place, onward)

"""By what a change of values shows: one number for each of many sets of tensors, in two launches.

    print[e] = sum of hash(bits, place) over the tensors of set e, modulo 2^32

Of a large tensor that hardly ever changes, some entries are looked at and not all: `most` of them,
at an odd distance, so that all columns come by.

Shapes     a set is a list of (tensor, most); print [sets] int32.
Cost       reads what is looked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._triton import HAS_TRITON, Launcher, interpreting, jit, tl

__all__ = ["PrintTable", "hash_bits", "key_of", "printable"]

Set = Sequence[tuple[Tensor, int | None]]

_CHUNK = 4096  # entries that one program looks at


@jit
def hash_bits(bits, place):
    x = bits ^ (place * -1640531527)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 739982445
    x = x ^ ((x >> 12) & 0xFFFFF)
    return x * 695872825


@jit
def _kernel(out, addresses, rows, chunks, CHUNK: tl.constexpr):
    # one program hashes one chunk of one tensor
    row = tl.load(chunks + tl.program_id(0) * 2)
    index = tl.load(chunks + tl.program_id(0) * 2 + 1)
    p_row = rows + row * 5
    owner, width = tl.load(p_row), tl.load(p_row + 1)
    count, step, salt = tl.load(p_row + 2), tl.load(p_row + 3), tl.load(p_row + 4)
    address = tl.load(addresses + row)
    o = index * CHUNK + tl.arange(0, CHUNK)
    mask = o < count
    o_at = o.to(tl.int64) * step
    if width == 4:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + o_at, mask=mask, other=0)
    elif width == 2:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + o_at, mask=mask, other=0)
        bits = bits.to(tl.int32)
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int8)) + o_at, mask=mask, other=0)
        bits = bits.to(tl.int32)
    value = tl.where(mask, hash_bits(bits, o + salt * 1013904223), 0)
    tl.atomic_add(out + owner, tl.sum(value, axis=0))


_launch = Launcher(_kernel)


def printable(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel takes them: on one GPU (or interpreted), one entry after the other."""
    first = tensors[0]
    here = (first.is_cuda and HAS_TRITON) or interpreting()
    return here and all(t.is_contiguous() and t.device == first.device for t in tensors)


def key_of(given: Set) -> tuple[Any, ...]:
    """What a table is built on."""
    return tuple([(t.data_ptr(), t.numel(), t.dtype) for t, _ in given])


class PrintTable:
    """Where the tensors of many sets lie on their device.

    All are `printable`, on one device. They must outlive the table's use at the addresses they have
    now; a caller that sees `key_of` a set change builds a new table.
    """

    def __init__(self, sets: Sequence[Set]) -> None:
        device = sets[0][0][0].device
        addresses: list[int] = []
        rows: list[list[int]] = []
        chunks: list[list[int]] = []
        for owner, given in enumerate(sets):
            for salt, (tensor, most) in enumerate(given):
                width, count, step = _seen(tensor, most)
                chunks += [[len(rows), i] for i in range(-(-count // _CHUNK))]
                addresses.append(tensor.data_ptr())
                rows.append([owner, width, count, step, salt])
        self._sets = len(sets)
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(device)
        self._rows = torch.tensor(rows, dtype=torch.int32).to(device)
        self._chunks = torch.tensor(chunks or [[0, 0]], dtype=torch.int32).to(device)
        self._programs = len(chunks)

    def prints(self) -> Tensor:
        """[sets] int32, as the values are now."""
        out = torch.zeros(self._sets, dtype=torch.int32, device=self._rows.device)
        if self._programs:
            tables = out, self._addresses, self._rows, self._chunks
            _launch((self._programs, 1, 1), tables, (), (_CHUNK,), num_warps=4)
        return out


def _seen(tensor: Tensor, most: int | None) -> tuple[int, int, int]:
    """Bytes of what is hashed at a time; how many of those, and how far apart."""
    width = min(tensor.element_size(), 4)
    count = tensor.numel() * tensor.element_size() // width
    if most is None or count <= most:
        return width, count, 1
    step = (count // most) | 1
    return width, -(-count // step), step

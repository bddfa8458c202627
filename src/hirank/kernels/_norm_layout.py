"""What the launches of the norm go over: tables made on the host, to lie on the device.

Adapters that can be multiplied as they lie are; the others get a place in a scratch, which layers
share in turns: a group of layers fits it together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels._norm_tuning import SCRATCH_BYTES, NormTile

__all__ = ["CHUNK", "PACK", "ROOT", "Group", "Layout", "NormEntry", "lay_out", "lies_even"]

CHUNK = 8192
"""Elements that one program hashes."""
PACK = (16, 256)
"""Rows and columns that one program packs."""
ROOT = 1024
"""Rows whose parts one program adds up."""

_ALIGN = 16  # bytes: of every address and row that a tensor descriptor takes


class NormEntry(NamedTuple):
    """One layer: where its weights are, and where its norm goes."""

    weight: Tensor  # [N, K], contiguous or the transpose of what is
    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    scale: float
    norm: Tensor  # [N] fp32, written in place


class Group(NamedTuple):
    """Layers that share the scratch at one time: the programs that pack, then those that square."""

    packs: Tensor  # [programs, 4]: layer, kind (0 A, 1 B), block of rows, block of columns
    tiles: Tensor  # [programs, 3]: layer, block of rows, split of K


class Layout(NamedTuple):
    """All tables, on the CPU."""

    pointers: (
        Tensor  # [layers, 6]: W, A, B, norm; A and B as multiplied: address, or scratch offset
    )
    sizes: Tensor  # [layers, 10]: see `_size`
    groups: list[Group]
    roots: Tensor  # [programs, 2]: layer, block of rows
    chunks: Tensor  # [programs, 3]: layer, kind (2 is W), index
    parts: int  # partial sums of all layers
    scratch_bytes: int


def lay_out(entries: Sequence[NormEntry], dtype: torch.dtype, tile: NormTile) -> Layout:
    """The tables for `entries`, whose A and B multiply in `dtype`."""
    places, members, scratch_bytes = _places(entries, dtype)
    sizes, parts = [], 0
    for entry, (A, B) in zip(entries, places, strict=True):
        sizes.append(_size(entry, A, B, tile.split_k, parts))
        parts += sizes[-1][0] * sizes[-1][3]
    return Layout(
        pointers=torch.tensor(
            [_pointers(e, *p) for e, p in zip(entries, places, strict=True)], dtype=torch.int64
        ),
        sizes=torch.tensor(sizes, dtype=torch.int32),
        groups=[_group(some, sizes, places, tile) for some in members],
        roots=_cat([_grid([i], _blocks(size[0], ROOT)) for i, size in enumerate(sizes)]),
        chunks=_cat([c for i, size in enumerate(sizes) for c in _chunks(i, *size[:3])]),
        parts=parts,
        scratch_bytes=scratch_bytes,
    )


def lies_even(tensor: Tensor) -> bool:
    """Whether a tensor descriptor takes the matrix as it lies."""
    row = tensor.shape[1] * tensor.element_size()
    return tensor.data_ptr() % _ALIGN == 0 and row % _ALIGN == 0


# Where A and B are multiplied from.


class _Place(NamedTuple):
    address: int  # or the offset into the scratch
    width: int  # elements from row to row
    packed: bool
    end: int  # of the scratch that is taken by now


def _places(
    entries: Sequence[NormEntry], dtype: torch.dtype
) -> tuple[list[tuple[_Place, _Place]], list[range], int]:
    """Places of A and B; groups of layers; bytes of scratch that the largest group takes."""
    places: list[tuple[_Place, _Place]] = []
    starts, most = [0], 0
    for i, entry in enumerate(entries):
        taken = places[-1][1].end if i > starts[-1] else 0
        pair = _pair(entry, dtype, taken)
        if pair[1].end > SCRATCH_BYTES and taken:
            starts.append(i)
            pair = _pair(entry, dtype, 0)
        places.append(pair)
        most = max(most, pair[1].end)
    ends = [*starts[1:], len(entries)]
    return places, [range(a, b) for a, b in zip(starts, ends, strict=True)], most


def _pair(entry: NormEntry, dtype: torch.dtype, taken: int) -> tuple[_Place, _Place]:
    A = _place(entry.lora_A, dtype, taken)
    return A, _place(entry.lora_B, dtype, A.end)


def _place(tensor: Tensor, dtype: torch.dtype, taken: int) -> _Place:
    rows, columns = tensor.shape
    if not tensor.numel():
        return _Place(0, _ALIGN, False, taken)  # never read
    if tensor.dtype == dtype and lies_even(tensor):
        return _Place(tensor.data_ptr(), columns, False, taken)
    width = _up(columns * dtype.itemsize, _ALIGN) // dtype.itemsize
    return _Place(taken, width, True, _up(taken + rows * width * dtype.itemsize, 128))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# Rows of the tables.


def _pointers(entry: NormEntry, A: _Place, B: _Place) -> list[int]:
    tensors = (entry.weight, entry.lora_A, entry.lora_B, entry.norm)
    return [*(t.data_ptr() for t in tensors), A.address, B.address]


def _size(entry: NormEntry, A: _Place, B: _Place, split_k: int, parts: int) -> list[int]:
    """N, K, R, splits of K, first part, widths and packed or not of A and B, R or 0 for s = 0."""
    (n, k), r = entry.weight.shape, entry.lora_A.shape[0]
    used = r if entry.scale else 0
    return [n, k, r, -(-k // split_k), parts, A.width, B.width, A.packed, B.packed, used]


def _group(
    members: range,
    sizes: list[list[int]],
    places: list[tuple[_Place, _Place]],
    tile: NormTile,
) -> Group:
    packs, tiles = [], []
    for i in members:
        n, k, r, splits = sizes[i][:4]
        for kind, (rows, columns) in enumerate(((r, k), (n, r))):
            if places[i][kind].packed:
                blocks = _blocks(rows, PACK[0]), _blocks(columns, PACK[1])
                packs.append(_grid([i], [kind], *blocks))
        tiles.append(_grid([i], _blocks(n, tile.block_n), range(splits)))
    return Group(_cat(packs), _cat(tiles))


def _chunks(layer: int, n: int, k: int, r: int) -> list[Tensor]:
    counts = (r * k, n * r, CHUNK)
    return [_grid([layer], [kind], _blocks(count, CHUNK)) for kind, count in enumerate(counts)]


def _blocks(count: int, block: int) -> range:
    return range(-(-count // block))


def _grid(*axes: Iterable[int]) -> Tensor:
    return torch.cartesian_prod(*(torch.tensor(list(axis), dtype=torch.int32) for axis in axes))


def _cat(grids: list[Tensor]) -> Tensor:
    return torch.cat(grids) if grids else torch.empty(0, 4, dtype=torch.int32)

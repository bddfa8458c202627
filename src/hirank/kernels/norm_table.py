"""The row norms of many layers at once, computed again only where weights changed: three launches.

    print[l] = sum of hash(bits, position) over all of A and B and a sample of W, modulo 2^32
    norm[l]  = || W[n] + s B[n] A ||      where print[l] differs from the last one, else untouched

The comparison happens on the device: no launch depends on what the host knows, nothing waits.
The norm is taken tile by tile over W + s B A on tensor cores with fp32 sums. Nothing larger than
a tile is formed and nothing cancels, so no row needs a second look.

Shapes     per layer: weight [N, K]; lora_A [R, K]; lora_B [N, R]; norm [N] fp32.
Precision  A and B are rounded to `dot_dtype`, as in the forward; products of bf16 pairs are exact
           in fp32. fp32 operands use full-precision products.
Cost       prints read every adapter once; the norm is 2 N K R operations and reads W once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels._triton import dot_type, jit, tl, tl_type, triton
from hirank.kernels._tuning import NORM

__all__ = ["NormEntry", "NormTable"]

_CHUNK = 8192  # elements hashed by one program
_ROOT = 1024  # rows whose parts one program adds up


class NormEntry(NamedTuple):
    """One layer: where its weights are, and where its norm goes."""

    weight: Tensor  # [N, K]
    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    scale: float
    norm: Tensor  # [N] fp32, written in place


@jit
def _hash(bits, position):
    x = bits ^ (position * -1640531527)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 739982445
    x = x ^ ((x >> 12) & 0xFFFFF)
    return x * 695872825


@jit
def _bits(address, offset, count, WIDE: tl.constexpr):
    if WIDE:
        p = address.to(tl.pointer_type(tl.int32)) + offset
    else:
        p = address.to(tl.pointer_type(tl.int16)) + offset
    return tl.load(p, mask=offset < count, other=0).to(tl.int32)


@jit
def _print_kernel(
    new, following, pointers, sizes, chunks,
    WIDE: tl.constexpr, W_WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # one program hashes one chunk of A (kind 0), of B (kind 1), or a strided sample of W (kind 2)
    p_chunk = chunks + tl.program_id(0) * 3
    layer, kind, index = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    n = tl.load(sizes + layer * 5).to(tl.int64)
    k = tl.load(sizes + layer * 5 + 1).to(tl.int64)
    r = tl.load(sizes + layer * 5 + 2).to(tl.int64)
    offset = index.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    if kind == 2:
        address = tl.load(pointers + layer * 4)
        count = n * k
        offset = offset * (tl.maximum(count // CHUNK, 1) | 1)  # odd: all columns come by
        bits = _bits(address, offset, count, W_WIDE)
    else:
        address = tl.load(pointers + layer * 4 + 1 + kind)
        count = tl.where(kind == 0, r * k, n * r)
        bits = _bits(address, offset, count, WIDE)
    position = offset.to(tl.int32) + kind * 1013904223
    value = tl.where(offset < count, _hash(bits, position), 0)
    tl.atomic_add(new + layer, tl.sum(value, axis=0))
    if (kind == 0) & (index == 0):
        tl.store(following + layer, 0)


@jit
def _unchanged(new, old, layer, FORCE: tl.constexpr):
    same = tl.load(new + layer) == tl.load(old + layer)
    return same & (FORCE == 0)


@jit
def _squares_kernel(
    part, new, old, pointers, sizes, scales, blocks,
    FORCE: tl.constexpr, W_TYPE: tl.constexpr, AB_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    # one program sums the squares of BLOCK_N rows over SPLIT_K columns of one layer
    p_block = blocks + tl.program_id(0) * 3
    layer, i_n, i_k = tl.load(p_block), tl.load(p_block + 1), tl.load(p_block + 2)
    if _unchanged(new, old, layer, FORCE):
        return
    p_size = sizes + layer * 5
    N, K, R, start = tl.load(p_size), tl.load(p_size + 1), tl.load(p_size + 2), tl.load(p_size + 4)
    weight = tl.load(pointers + layer * 4).to(tl.pointer_type(W_TYPE))
    lora_A = tl.load(pointers + layer * 4 + 1).to(tl.pointer_type(AB_TYPE))
    lora_B = tl.load(pointers + layer * 4 + 2).to(tl.pointer_type(AB_TYPE))
    scale = tl.load(scales + layer)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    row = o_n.to(tl.int64)[:, None]
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for k in range(i_k * SPLIT_K, tl.minimum((i_k + 1) * SPLIT_K, K), BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_dot = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for r in range(0, R, BLOCK_R):
            o_r = r + tl.arange(0, BLOCK_R)
            m_r = o_r < R
            b_B = tl.load(lora_B + row * R + o_r[None, :],
                          mask=m_n[:, None] & m_r[None, :], other=0.0)  # fmt: skip
            b_A = tl.load(lora_A + o_r.to(tl.int64)[:, None] * K + o_k[None, :],
                          mask=m_r[:, None] & m_k[None, :], other=0.0)  # fmt: skip
            b_dot = tl.dot(b_B.to(DOT_TYPE), b_A.to(DOT_TYPE), b_dot, input_precision="ieee")
        b_W = tl.load(weight + row * K + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_full = b_W.to(tl.float32) + scale * b_dot
        b_sum += tl.sum(b_full * b_full, axis=1)
    tl.store(part + start + i_k * N + o_n, b_sum, mask=m_n)


@jit
def _root_kernel(
    part, new, old, computed, pointers, sizes, blocks, FORCE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    # one program adds up the parts of BLOCK_N rows, in a fixed order
    layer, i_n = tl.load(blocks + tl.program_id(0) * 3), tl.load(blocks + tl.program_id(0) * 3 + 1)
    if _unchanged(new, old, layer, FORCE):
        return
    p_size = sizes + layer * 5
    N, splits, start = tl.load(p_size), tl.load(p_size + 3), tl.load(p_size + 4)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i in range(0, splits):
        b_sum += tl.load(part + start + i * N + o_n, mask=o_n < N, other=0.0)
    norm = tl.load(pointers + layer * 4 + 3).to(tl.pointer_type(tl.float32))
    tl.store(norm + o_n, tl.sqrt_rn(b_sum), mask=o_n < N)
    if i_n == 0:
        tl.store(computed + layer, tl.load(computed + layer) + 1)


class NormTable:
    """Pointers of many layers on their device, and the prints of what they last held.

    All entries share the dtypes of weight and adapter, and one device. The tensors must outlive
    the table's use at the addresses they have now; a caller that sees one move builds a new table.
    """

    def __init__(self, entries: Sequence[NormEntry], dot_dtype: torch.dtype) -> None:
        first = entries[0]
        self._device = first.weight.device
        self._wide = first.lora_A.dtype == torch.float32
        self._w_wide = first.weight.dtype == torch.float32
        self._types = (
            tl_type(first.weight.dtype),
            tl_type(first.lora_A.dtype),
            dot_type(dot_dtype),
        )
        self._tile = NORM
        pointers = [[t.data_ptr() for t in (e.weight, e.lora_A, e.lora_B, e.norm)] for e in entries]
        sizes, parts = [], 0
        for n, k, r in ([*e.weight.shape, e.lora_A.shape[0]] for e in entries):
            splits = triton.cdiv(k, self._tile.split_k)
            sizes.append([n, k, r, splits, parts])
            parts += n * splits
        self._pointers = self._put(pointers, torch.int64)
        self._sizes = self._put(sizes, torch.int32)
        self._scales = self._put([e.scale for e in entries], torch.float32)
        self._tiles = self._put(_tiles(sizes, self._tile.block_n), torch.int32)
        self._roots = self._put(_tiles([[n, 0, 0, 1, 0] for n, *_ in sizes], _ROOT), torch.int32)
        self._chunks = self._put(_chunks(sizes), torch.int32)
        self._part = torch.empty(parts, dtype=torch.float32, device=self._device)
        self._prints = torch.zeros(3, len(entries), dtype=torch.int32, device=self._device)
        self.computed = torch.zeros(len(entries), dtype=torch.int32, device=self._device)
        self._turn = 0

    def _put(self, values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self._device)

    def _print(self) -> tuple[Tensor, Tensor]:
        old, new, following = (self._prints[(self._turn + i) % 3] for i in range(3))
        self._turn += 1
        _print_kernel[(self._chunks.shape[0],)](
            new, following, self._pointers, self._sizes, self._chunks,
            WIDE=self._wide, W_WIDE=self._w_wide, CHUNK=_CHUNK,
        )  # fmt: skip
        return old, new

    def accept(self) -> None:
        """Take the weights as they are for those the norms belong to: one launch."""
        self._print()

    def refresh(self, *, force: bool = False) -> None:
        """Bring every norm up to date: three launches, no synchronisation.

        `force` computes all norms, whatever the prints say.
        """
        old, new = self._print()
        w_type, ab_type, dot_type = self._types
        tile = self._tile
        _squares_kernel[(self._tiles.shape[0],)](
            self._part, new, old, self._pointers, self._sizes, self._scales, self._tiles,
            FORCE=force, W_TYPE=w_type, AB_TYPE=ab_type, DOT_TYPE=dot_type,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_R=tile.block_r,
            SPLIT_K=tile.split_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        _root_kernel[(self._roots.shape[0],)](
            self._part, new, old, self.computed, self._pointers, self._sizes, self._roots,
            FORCE=force, BLOCK_N=_ROOT,
        )  # fmt: skip


def _tiles(sizes: list[list[int]], block_n: int) -> Tensor:
    """(layer, block of rows, split of K) of every program."""
    rows = []
    for layer, (n, _, _, splits, _) in enumerate(sizes):
        blocks = torch.arange(triton.cdiv(n, block_n))
        rows.append(torch.cartesian_prod(torch.tensor([layer]), blocks, torch.arange(splits)))
    return torch.cat(rows)


def _chunks(sizes: list[list[int]]) -> Tensor:
    """(layer, kind, index) of every program that hashes."""
    rows = []
    for layer, (n, k, r, _, _) in enumerate(sizes):
        for kind, count in enumerate((r * k, n * r, _CHUNK)):
            index = torch.arange(triton.cdiv(count, _CHUNK))
            rows.append(torch.cartesian_prod(torch.tensor([layer]), torch.tensor([kind]), index))
    return torch.cat(rows)

"""The row norms of many layers at once, computed again only where weights changed.

    print[l] = sum of hash(bits, position) over all of A and B and a sample of W, modulo 2^32
    norm[l]  = || W[n] + s B[n] A ||      where print[l] differs from the last one, else untouched

The comparison happens on the device: no launch depends on what the host knows, nothing waits.
The norm is taken by its definition, tile by tile over W + s B A on tensor cores with fp32 sums.
Nothing larger than a tile is formed and nothing cancels, so no row needs a second look, and ||W||^2
need not be kept: it comes with the tile of W, which has to be read anyway.

Launches   one for the prints, one for the squares, one for the roots. Adapters that cannot be
           multiplied as they lie (fp32 under bf16; odd sizes) are packed first, a group of layers
           at a time within `SCRATCH_BYTES`: two launches a group instead of one in all.
Shapes     per layer: weight [N, K]; lora_A [R, K]; lora_B [N, R]; norm [N] fp32. Weights may all
           be turned, that is lie as [K, N], as those of embeddings do.
Precision  A and B are rounded to `dot_dtype`, as in the forward; products of bf16 pairs are exact
           in fp32. fp32 operands use full-precision products. With B = 0 a row's bits are those of
           the same weight without adapter, provided `dot_dtype` is the same.
Memory     one fp32 for every row and `split_k` columns, and the packed group; freed on return.
Cost       prints read every adapter once; the norm is 2 N K R operations and reads W once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hirank.kernels._norm_layout import CHUNK, PACK, ROOT, NormEntry, lay_out, lies_even
from hirank.kernels._norm_tuning import norm_tile
from hirank.kernels._triton import Launcher, dot_type, jit, tl, tl_type, use_workspace
from hirank.kernels.prints import hash_bits

__all__ = ["NormEntry", "NormTable"]

# How the GPU does it. The rows of `pointers`, `sizes` and the blocks: `_norm_layout`.


@jit
def _bits(address, offset, count, WIDE: tl.constexpr, EVEN: tl.constexpr):
    if WIDE:
        p = address.to(tl.pointer_type(tl.int32)) + offset
    else:
        p = address.to(tl.pointer_type(tl.int16)) + offset
    if EVEN:  # 16 bytes a load: the product says what a hint would not keep
        p, count = tl.multiple_of(p, [16]), count // 8 * 8
    return tl.load(p, mask=offset < count, other=0).to(tl.int32)


@jit
def _print_kernel(
    new, following, pointers, sizes, chunks,
    WIDE: tl.constexpr, W_WIDE: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # one program hashes one chunk of A (kind 0), of B (kind 1), or a strided sample of W (kind 2)
    p_chunk = chunks + tl.program_id(0) * 3
    layer, kind, index = tl.load(p_chunk), tl.load(p_chunk + 1), tl.load(p_chunk + 2)
    n = tl.load(sizes + layer * 10).to(tl.int64)
    k = tl.load(sizes + layer * 10 + 1).to(tl.int64)
    r = tl.load(sizes + layer * 10 + 2).to(tl.int64)
    offset = index.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    if kind == 2:
        address = tl.load(pointers + layer * 6)
        count = n * k
        offset = offset * (tl.maximum(count // CHUNK, 1) | 1)  # odd: all columns come by
        bits = _bits(address, offset, count, W_WIDE, False)
    else:
        address = tl.load(pointers + layer * 6 + 1 + kind)
        count = tl.where(kind == 0, r * k, n * r)
        bits = _bits(address, offset, count, WIDE, EVEN)
    position = offset.to(tl.int32) + kind * 1013904223
    value = tl.where(offset < count, hash_bits(bits, position), 0)
    tl.atomic_add(new + layer, tl.sum(value, axis=0))
    if (kind == 0) & (index == 0):
        tl.store(following + layer, 0)


@jit
def _kept(new, old, forced, layer):
    return (tl.load(new + layer) == tl.load(old + layer)) & (tl.load(forced + layer) == 0)


@jit
def _pack_kernel(
    scratch, new, old, forced, pointers, sizes, blocks,
    AB_TYPE: tl.constexpr, TYPE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # one program copies one block of A (kind 0) or B (kind 1)
    p_block = blocks + tl.program_id(0) * 4
    layer, kind = tl.load(p_block), tl.load(p_block + 1)
    if _kept(new, old, forced, layer):
        return
    p_size = sizes + layer * 10
    N, K, R = tl.load(p_size), tl.load(p_size + 1), tl.load(p_size + 2)
    rows, columns = tl.where(kind == 0, R, N), tl.where(kind == 0, K, R)
    width = tl.load(p_size + 5 + kind)
    if EVEN:
        columns, width = tl.multiple_of(columns, 8), tl.multiple_of(width, 8)
    p_from = tl.load(pointers + layer * 6 + 1 + kind).to(tl.pointer_type(AB_TYPE))
    p_to = scratch.to(tl.int64) + tl.load(pointers + layer * 6 + 4 + kind)
    p_to = p_to.to(tl.pointer_type(TYPE))
    o_row = tl.load(p_block + 2) * ROWS + tl.arange(0, ROWS)[:, None]
    o_column = tl.load(p_block + 3) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p_from += o_row.to(tl.int64) * columns + o_column
    p_to += o_row.to(tl.int64) * width + o_column
    if EVEN:
        p_from, p_to = tl.multiple_of(p_from, [16, 16]), tl.multiple_of(p_to, [16, 16])
    b = tl.load(p_from, mask=(o_row < rows) & (o_column < columns), other=0.0)
    tl.store(p_to, b.to(TYPE), mask=(o_row < rows) & (o_column < width))  # padded with zeros


@jit
def _operand(scratch, pointers, sizes, layer, i, TYPE: tl.constexpr):
    packed = tl.load(sizes + layer * 10 + 7 + i).to(tl.int64)
    address = tl.load(pointers + layer * 6 + 4 + i) + packed * scratch.to(tl.int64)
    address = tl.where(address == 0, pointers.to(tl.int64), address)  # empty: any that is valid
    return address.to(tl.pointer_type(TYPE))


@jit
def _tile(p, o_row, o_column, rows, columns, width, VECTOR: tl.constexpr):
    # VECTOR elements can always be moved together, they start on whole 16 bytes
    p += o_row[:, None].to(tl.int64) * width + o_column[None, :]
    if VECTOR > 1:
        p = tl.multiple_of(p, [16, 16])
    return tl.load(p, mask=(o_row[:, None] < rows) & (o_column[None, :] < columns), other=0.0)


@jit
def _weight_tile(p, o_n, o_k, N, K, TURNED: tl.constexpr, VECTOR: tl.constexpr):
    if TURNED:
        return tl.trans(_tile(p, o_k, o_n, K, N, N, VECTOR))
    else:
        return _tile(p, o_n, o_k, N, K, K, VECTOR)


@jit
def _squares_kernel(
    part, scratch, new, old, forced, pointers, sizes, scales, blocks,
    W_TYPE: tl.constexpr, TYPE: tl.constexpr, DOT: tl.constexpr,
    W_VECTOR: tl.constexpr, TURNED: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, FLAT: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    # one program sums the squares of BLOCK_N rows over SPLIT_K columns of one layer
    p_block = blocks + tl.program_id(0) * 3
    layer, i_n, i_k = tl.load(p_block), tl.load(p_block + 1), tl.load(p_block + 2)
    kept = _kept(new, old, forced, layer)
    if not SPECIALIZED:  # warps cannot be split in a kernel that may return early
        if kept:
            return
    p_size = sizes + layer * 10
    N, K = tl.load(p_size), tl.load(p_size + 1)
    R, ranks = tl.load(p_size + 2), tl.load(p_size + 9)
    if TURNED:
        N = tl.multiple_of(N, W_VECTOR)
    else:
        K = tl.multiple_of(K, W_VECTOR)
    lda = tl.multiple_of(tl.load(p_size + 5), VECTOR)
    ldb = tl.multiple_of(tl.load(p_size + 6), VECTOR)
    scale = tl.load(scales + layer)
    weight = tl.load(pointers + layer * 6).to(tl.pointer_type(W_TYPE))
    lora_A = _operand(scratch, pointers, sizes, layer, 0, TYPE)
    lora_B = _operand(scratch, pointers, sizes, layer, 1, TYPE)
    if DESCRIPTORS:  # loads past the edges give zeros, and no thread holds addresses
        d_A = tl.make_tensor_descriptor(
            lora_A, shape=[tl.maximum(R, 1), lda], strides=[lda, 1], block_shape=[BLOCK_R, BLOCK_K]
        )
        d_B = tl.make_tensor_descriptor(
            lora_B, shape=[N, ldb], strides=[ldb, 1], block_shape=[BLOCK_N, BLOCK_R]
        )
        if W_VECTOR > 1 and not TURNED:
            d_W = tl.make_tensor_descriptor(
                weight, shape=[N, K], strides=[K, 1], block_shape=[BLOCK_N, BLOCK_K]
            )
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k, o_r = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R)
    # without ranks one step past all edges, so that the order of the sums is that of other layers
    first = tl.where(ranks == 0, 1 << 24, 0)
    last = first + tl.maximum(ranks, 1)
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    end = tl.where(kept, 0, tl.minimum((i_k + 1) * SPLIT_K, K))
    for k in tl.range(
        i_k * SPLIT_K, end, BLOCK_K, flatten=FLAT, warp_specialize=SPECIALIZED
    ):  # fmt: skip
        b_dot = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
        for r in range(first, last, BLOCK_R):
            if DESCRIPTORS:
                b_B = d_B.load([i_n * BLOCK_N, r])
                b_A = d_A.load([r, k])
            else:
                b_B = _tile(lora_B, o_n, r + o_r, N, ldb, ldb, VECTOR)
                b_A = _tile(lora_A, r + o_r, k + o_k, R, lda, lda, VECTOR)
            b_dot = tl.dot(b_B.to(DOT), b_A.to(DOT), b_dot, input_precision="ieee")
        if DESCRIPTORS and W_VECTOR > 1 and not TURNED:
            b_W = d_W.load([i_n * BLOCK_N, k])
        else:
            b_W = _weight_tile(weight, o_n, k + o_k, N, K, TURNED, W_VECTOR)
        b_full = b_W.to(tl.float32) + scale * b_dot
        b_sum += tl.sum(b_full * b_full, axis=1)
    p_part = part + tl.load(p_size + 4) + i_k * N + o_n
    tl.store(p_part, b_sum, mask=o_n < tl.where(kept, 0, N))


@jit
def _root_kernel(
    part, new, old, forced, computed, pointers, sizes, blocks,
    ROOT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # one program adds up the parts of BLOCK_N rows, in a fixed order
    p_block = blocks + tl.program_id(0) * 2
    layer, i_n = tl.load(p_block), tl.load(p_block + 1)
    if _kept(new, old, forced, layer):
        return
    p_size = sizes + layer * 10
    N, splits, start = tl.load(p_size), tl.load(p_size + 3), tl.load(p_size + 4)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for i in range(0, splits):
        b_sum += tl.load(part + start + i * N + o_n, mask=o_n < N, other=0.0)
    if ROOT:
        b_sum = tl.sqrt_rn(b_sum)
    norm = tl.load(pointers + layer * 6 + 3).to(tl.pointer_type(tl.float32))
    tl.store(norm + o_n, b_sum, mask=o_n < N)
    if i_n == 0:
        tl.store(computed + layer, tl.load(computed + layer) + 1)


# What is launched.

_PRINT = Launcher(_print_kernel)
_PACK = Launcher(_pack_kernel)
_SQUARES = Launcher(_squares_kernel)
_ROOT = Launcher(_root_kernel)


class NormTable:
    """Pointers of many layers on their device, and the prints of what they last held.

    All entries share the dtypes of weight and adapter, and one device; all are contiguous, but that
    the weights may all be transposes of contiguous ones. The tensors must outlive the table's use
    at the addresses they have now; a caller that sees one move builds a new table.

    Args:
        entries: the layers, at least one.
        dot_dtype: fp32, bf16 or fp16, in which A and B multiply.
        root: whether to write the norms, or their squares.
    """

    def __init__(
        self, entries: Sequence[NormEntry], dot_dtype: torch.dtype, *, root: bool = True
    ) -> None:
        first = entries[0]
        self._device = first.weight.device
        self._types = first.weight.dtype, first.lora_A.dtype, dot_dtype
        self._root = root
        self._turned = not first.weight.is_contiguous()
        lying = [e.weight.t() if self._turned else e.weight for e in entries]
        self._even = all(map(lies_even, lying))
        self._tile = norm_tile(dot_dtype, self._device, self._even and first.weight.itemsize == 2)
        self._even_packs = all(_aligned(t) for e in entries for t in (e.lora_A, e.lora_B))
        self._options = self._tile.options(self._device)
        made = lay_out(entries, dot_dtype, self._tile)
        self._parts, self._scratch_bytes = made.parts, made.scratch_bytes
        self._pointers, self._sizes = made.pointers.to(self._device), made.sizes.to(self._device)
        self._scales = torch.tensor([e.scale for e in entries]).to(self._device, torch.float32)
        self._groups = [(g.packs.to(self._device), g.tiles.to(self._device)) for g in made.groups]
        self._roots, self._chunks = made.roots.to(self._device), made.chunks.to(self._device)
        # rows of whole 16 bytes: Triton compiles a kernel anew for every alignment it meets
        rows = 3, -(-len(entries) // 4) * 4
        self._prints = torch.zeros(rows, dtype=torch.int32, device=self._device).unbind()
        self._flags: dict[tuple[int, ...] | bool, Tensor] = {}
        self._turn = 0
        self.computed = torch.zeros(len(entries), dtype=torch.int32, device=self._device)

    def accept(self) -> None:
        """Take the weights as they are for those the norms belong to: one launch."""
        with self._on_device():
            self._print()

    def refresh(self, *, force: bool | Sequence[int] = False) -> None:
        """Bring every norm up to date, without waiting for the device.

        Args:
            force: True computes all norms, indices of entries compute those, whatever the prints
                say. The prints decide on the others.
        """
        with self._on_device():
            old, new = self._print()
            self._compute(old, new, self._forced(force))

    def compute(self) -> None:
        """Compute every norm and look at no prints."""
        with self._on_device():
            self._compute(self._prints[0], self._prints[0], self._forced(True))

    def _print(self) -> tuple[Tensor, Tensor]:
        old, new, following = (self._prints[(self._turn + i) % 3] for i in range(3))
        self._turn += 1
        w_type, ab_type, _ = self._types
        _PRINT(
            (self._chunks.shape[0], 1, 1),
            (new, following, self._pointers, self._sizes, self._chunks),
            (),
            (ab_type == torch.float32, w_type == torch.float32, self._even_packs, CHUNK),
            num_warps=4,
        )
        return old, new

    def _forced(self, force: bool | Sequence[int]) -> Tensor:
        key = force if isinstance(force, bool) else tuple(force)
        if key not in self._flags:
            if len(self._flags) > 8:  # callers repeat themselves, step by step
                self._flags.clear()
            flags = torch.full((self._sizes.shape[0],), key is True, dtype=torch.int32)
            if not isinstance(key, bool):
                flags[list(key)] = 1
            self._flags[key] = flags.to(self._device, non_blocking=True)
        return self._flags[key]

    def _compute(self, old: Tensor, new: Tensor, forced: Tensor) -> None:
        part = torch.empty(self._parts, dtype=torch.float32, device=self._device)
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)
        changed = new, old, forced
        for packs, tiles in self._groups:
            if packs.shape[0]:
                self._pack(scratch, changed, packs)
            self._square(part, scratch, changed, tiles)
        _ROOT(
            (self._roots.shape[0], 1, 1),
            (part, *changed, self.computed, self._pointers, self._sizes, self._roots),
            (),
            (self._root, ROOT),
            num_warps=4,
        )

    def _pack(self, scratch: Tensor, changed: tuple[Tensor, ...], blocks: Tensor) -> None:
        _, ab_type, dtype = self._types
        _PACK(
            (blocks.shape[0], 1, 1),
            (scratch, *changed, self._pointers, self._sizes, blocks),
            (),
            (tl_type(ab_type), tl_type(dtype), self._even_packs, *PACK),
            num_warps=4,
        )

    def _square(
        self, part: Tensor, scratch: Tensor, changed: tuple[Tensor, ...], blocks: Tensor
    ) -> None:
        w_type, _, dtype = self._types
        tile = self._tile
        _SQUARES(
            (blocks.shape[0], 1, 1),
            (part, scratch, *changed, self._pointers, self._sizes, self._scales, blocks),
            (),
            (tl_type(w_type), tl_type(dtype), dot_type(dtype),
             16 // w_type.itemsize if self._even else 1, self._turned, 16 // dtype.itemsize,
             tile.block_n, tile.block_k, tile.block_r, tile.split_k,
             tile.descriptors, tile.flat, tile.specialized),
            **self._options,
        )  # fmt: skip

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        use_workspace()
        if self._device.index == torch._C._cuda_getDevice():
            yield
            return
        with torch.cuda.device(self._device):
            yield


def _aligned(tensor: Tensor) -> bool:
    """Whether eight elements can always be moved together."""
    return tensor.data_ptr() % 16 == 0 and tensor.shape[1] % 8 == 0

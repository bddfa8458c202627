"""Two products of one result in one GEMM, with gain and bias in its epilogue; for Hopper.

    out = g (a1 b1 + a2 b2) + bias        g = m / norm        (g = 1 where norm = 0)

An adapted linear is twice of this shape: forward x W^T + h B^T with gain and bias, backward
t W + tB A for dx. As two GEMMs and a pass the result goes through memory three times more. Here the
second product is a few more steps of the first one's loop, and the sum is rounded once.

Both pairs share one loop into one accumulator; a step selects its pair by descriptor, so that the
loop stays one that the compiler pipelines. Programs are persistent: each walks over several tiles,
and the loads of the next begin while one is finished.

Shapes     a1 [M, K1]; a2 [M, K2]; out [M, N]; m, norm, bias [N].
           b1 [N, K1], b2 [N, K2] with `by_column` (as a linear layer keeps its weight, forward);
           b1 [K1, N], b2 [K2, N] without (backward).
Precision  operands bf16 or fp16; sums, gain and bias in fp32, one rounding at the store.
Where      Hopper, from sizes that fill it; elsewhere `dora_linear` uses cuBLAS. Both measured:
           docs/LOG.md and benchmarks/trials.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hirank.kernels._triton import Launcher, direct, in_fp32, jit, tl, use_workspace
from hirank.kernels._tuning import Joined, tiles

__all__ = ["joined_gemm", "joined_tile"]

_GROUP = 8  # rows of tiles that go down the columns together


@jit
def _place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    # GROUP rows of tiles go down the columns together, so that what they share stays in L2
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first = tile // width * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    i_m = first + tile % width % height
    return i_m * BLOCK_M, tile % width // height * BLOCK_N


@jit
def _described(matrix, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    return tl.make_tensor_descriptor(
        matrix, shape=[rows, columns], strides=[columns, 1], block_shape=[HEIGHT, WIDTH]
    )


@jit
def _finished(b_acc, magnitude, norm, bias, o_n, N, HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr):
    m_n = o_n < N
    if HAS_GAIN:
        b_norm = tl.load(norm + o_n, mask=m_n, other=1.0)
        b_m = tl.load(magnitude + o_n, mask=m_n, other=1.0).to(tl.float32)
        alive = b_norm > 0
        # div_rn: m / m must be exactly 1, or a fresh adapter would not be its base
        b_g = tl.where(alive, tl.div_rn(b_m, tl.where(alive, b_norm, 1.0)), 1.0)
        b_acc = b_acc * b_g[None, :]
    if HAS_BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    return b_acc


@jit
def _joined_kernel(
    out, a1, b1, a2, b2, magnitude, norm, bias, M, N, K1, K2,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, BY_COLUMN: tl.constexpr, IN_FP32: tl.constexpr,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    d_a1 = _described(a1, M, K1, BLOCK_M, BLOCK_K)
    d_a2 = _described(a2, M, K2, BLOCK_M, BLOCK_K)
    if BY_COLUMN:
        d_b1 = _described(b1, N, K1, BLOCK_N, BLOCK_K)
        d_b2 = _described(b2, N, K2, BLOCK_N, BLOCK_K)
    else:
        d_b1 = _described(b1, K1, N, BLOCK_K, BLOCK_N)
        d_b2 = _described(b2, K2, N, BLOCK_K, BLOCK_N)
    d_out = _described(out, M, N, BLOCK_M, BLOCK_N)
    first_steps = tl.cdiv(K1, BLOCK_K)
    steps = first_steps + tl.cdiv(K2, BLOCK_K)
    count = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        at_m, at_n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for step in range(steps):
            k = tl.where(step < first_steps, step, step - first_steps) * BLOCK_K
            if step < first_steps:
                d_a = d_a1
                d_b = d_b1
            else:
                d_a = d_a2
                d_b = d_b2
            b_a = d_a.load([at_m, k])
            if BY_COLUMN:
                b_b = d_b.load([at_n, k]).T
            else:
                b_b = d_b.load([k, at_n])
            if IN_FP32:
                b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_acc)
            else:
                b_acc = tl.dot(b_a, b_b, b_acc)
        o_n = at_n + tl.arange(0, BLOCK_N)
        b_acc = _finished(b_acc, magnitude, norm, bias, o_n, N, HAS_GAIN, HAS_BIAS)
        d_out.store([at_m, at_n], b_acc.to(out.dtype.element_ty))


_joined = Launcher(_joined_kernel)


def joined_tile(a1: Tensor, b1: Tensor, b2: Tensor, *, by_column: bool) -> Joined | None:
    """The tile for these operands; None where two GEMMs are the better or the only way."""
    known = tiles(a1.device).joined
    if not known or a1.dtype not in _HALVES or not direct(a1):
        return None
    if not (_fetchable(a1) and _fetchable(b1) and _fetchable(b2)):
        return None
    N, other = (b1.shape[0], b2.shape[1]) if by_column else (b1.shape[1], b2.shape[0])
    if N & 7 or other & 7:  # rows of out, and of the second left factor
        return None
    M = a1.shape[0]
    for tile in known:
        if -(-M // tile.block_m) * -(-N // tile.block_n) >= tile.least:
            return tile
    return None


_HALVES = (torch.bfloat16, torch.float16)


def _fetchable(matrix: Tensor) -> bool:
    """Whether tensor descriptors can describe it: rows of whole 16 bytes, one after the other."""
    rows, columns = matrix.shape
    return (
        not columns & 7
        and rows * columns > 0
        and not matrix.data_ptr() & 15
        and matrix.is_contiguous()
    )


def joined_gemm(
    tile: Joined,
    out: Tensor,
    a1: Tensor,
    b1: Tensor,
    a2: Tensor,
    b2: Tensor,
    *,
    by_column: bool,
    magnitude: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """out [M, N] <- g (a1 b1 + a2 b2) + bias, returned; `joined_tile` must have agreed."""
    (M, K1), K2 = a1.shape, a2.shape[1]
    gain = (out, out) if magnitude is None or norm is None else (magnitude, norm)
    use_workspace()
    _joined(
        (tile.programs, 1, 1),
        (out, a1, b1, a2, b2, *gain, out if bias is None else bias),
        (M, b1.shape[0] if by_column else b1.shape[1], K1, K2),
        (gain[0] is not out, bias is not None, by_column, in_fp32(a1.dtype), tile.programs,
         _GROUP, tile.block_m, tile.block_n, tile.block_k),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out

"""The launches of an adapted embedding around its lookups and its two small products.

    gather      h = A[:, ids]^T                     cast to the dtype of the table
    join_rows   y = g (W[ids] + s h B^T)            in place of W[ids]      g = m / norm, or 1
    stretched   s g B                               what dy meets on its way to th = s (g dy) B
    row_sums    part = sums of dy W[ids]            over blocks of tokens
    scatter     dA[:, v] = sum of th[m]^T           over the tokens m whose id is v

Scatter compares every id with every other: for the tokens of a batch that is less than the sorting
which PyTorch does, it is one launch instead of thirty, and the order of its sums is fixed.

Shapes     ids [M]; W [V, D]; A [R, V]; B [D, R]; y, dy [M, D]; h, th [M, R]; m, norm [D];
           part [parts, D].   M tokens, V entries, D dimensions, R rank.
Precision  loads widen to fp32, one rounding at the store; sums in fp32, in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hirank.kernels._compose import load_gain
from hirank.kernels._triton import Launcher, in_fp32, jit, tl

__all__ = ["MOST_SCATTERED", "gather", "join_rows", "row_sums", "scatter", "stretched"]

MOST_SCATTERED = 16384
"""Tokens for which comparing all with all takes no longer than sorting them."""

# How the GPU does it.


@jit
def _gather_kernel(h, lora_A, ids, M, R, V, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (o_m[:, None] < M) & (o_r[None, :] < R)
    b_id = tl.load(ids + o_m, mask=o_m < M, other=0).to(tl.int64)
    b_h = tl.load(lora_A + o_r[None, :].to(tl.int64) * V + b_id[:, None], mask=mask, other=0.0)
    tl.store(
        h + o_m[:, None].to(tl.int64) * R + o_r[None, :], b_h.to(h.dtype.element_ty), mask=mask
    )


@jit
def _join_kernel(
    y, h, lora_B, magnitude, norm, scale, M, D, R,
    HAS_GAIN: tl.constexpr, IN_FP32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < M, o_d < D
    b_v = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for r in range(0, R, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        m_r = o_r < R
        p_h = h + o_m[:, None] * R + o_r[None, :]
        b_h = tl.load(p_h, mask=m_m[:, None] & m_r[None, :], other=0.0)
        p_B = lora_B + o_d[None, :] * R + o_r[:, None]
        b_B = tl.load(p_B, mask=m_d[None, :] & m_r[:, None], other=0.0).to(h.dtype.element_ty)
        if IN_FP32:
            b_v = tl.dot(b_h.to(tl.float32), b_B.to(tl.float32), b_v, input_precision="ieee")
        else:
            b_v = tl.dot(b_h, b_B, b_v)
    p_y = y + o_m[:, None] * D + o_d[None, :]
    mask = m_m[:, None] & m_d[None, :]
    b_v = tl.load(p_y, mask=mask, other=0.0).to(tl.float32) + scale * b_v
    if HAS_GAIN:
        b_v *= load_gain(magnitude, norm, o_d, m_d)[None, :]
    tl.store(p_y, b_v.to(y.dtype.element_ty), mask=mask)


@jit
def _stretched_kernel(
    out, lora_B, magnitude, norm, scale, D, R,
    HAS_GAIN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (o_d[:, None] < D) & (o_r[None, :] < R)
    offsets = o_d[:, None] * R + o_r[None, :]
    b_B = tl.load(lora_B + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if HAS_GAIN:
        b_B *= load_gain(magnitude, norm, o_d, o_d < D)[:, None]
    tl.store(out + offsets, b_B.to(out.dtype.element_ty), mask=mask)


@jit
def _sums_kernel(part, dy, weight, ids, M, D, ROWS, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        o_m = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK_M)
        b_id = tl.load(ids + o_m, mask=o_m < M, other=0).to(tl.int64)
        mask = (o_m[:, None] < M) & m_d[None, :]
        p_dy = dy + o_m[:, None].to(tl.int64) * D + o_d[None, :]
        b_dy = tl.load(p_dy, mask=mask, other=0.0).to(tl.float32)
        b_W = tl.load(weight + b_id[:, None] * D + o_d[None, :], mask=mask, other=0.0)
        b_sum += b_dy * b_W.to(tl.float32)
    tl.store(part + tl.program_id(0) * D + o_d, tl.sum(b_sum, axis=0), mask=m_d)


@jit
def _scatter_kernel(
    dA, th, ids, M, R, V, PADDING, IN_FP32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # tokens of one id all add up the same, and write it to the same place
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < R
    b_id = tl.load(ids + o_m, mask=o_m < M, other=-1).to(tl.int64)
    b_sum = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for k in range(0, M, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        b_other = tl.load(ids + o_k, mask=o_k < M, other=-2).to(tl.int64)
        b_same = (b_id[:, None] == b_other[None, :]).to(tl.float32)
        p_th = th + o_k[:, None].to(tl.int64) * R + o_r[None, :]
        b_th = tl.load(p_th, mask=(o_k[:, None] < M) & m_r[None, :], other=0.0)
        if IN_FP32:
            b_sum = tl.dot(b_same, b_th.to(tl.float32), b_sum, input_precision="ieee")
        else:
            b_sum = tl.dot(b_same.to(th.dtype.element_ty), b_th, b_sum)
    p_dA = dA + o_r[None, :].to(tl.int64) * V + b_id[:, None]
    mask = (o_m[:, None] < M) & (b_id[:, None] != PADDING) & m_r[None, :]
    tl.store(p_dA, b_sum.to(dA.dtype.element_ty), mask=mask)


_gather = Launcher(_gather_kernel)
_join = Launcher(_join_kernel)
_stretched = Launcher(_stretched_kernel)
_sums = Launcher(_sums_kernel)
_scatter = Launcher(_scatter_kernel)

_ROWS, _PARTS = 128, 64  # least rows to a partial sum; most of the sums


def _ranks(rank: int) -> int:
    return 16 if rank <= 16 else 32 if rank <= 32 else 64


def _wide(tensor: Tensor) -> bool:
    """Whether operands of a product go to fp32."""
    return in_fp32(tensor.dtype) or tensor.dtype == torch.float32


# What is launched.


def gather(lora_A: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """h [M, R] in `dtype`; ids are known to be in range."""
    (r, v), m = lora_A.shape, ids.shape[0]
    h = lora_A.new_empty((m, r), dtype=dtype)
    _gather((-(-m // 32), -(-r // 32), 1), (h, lora_A, ids), (m, r, v), (32, 32), num_warps=4)
    return h


def join_rows(
    y: Tensor,
    h: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    scale: float,
) -> None:
    """y [M, D] <- g (y + s h B^T)"""
    (m, d), r = y.shape, h.shape[1]
    gain = (y, y) if magnitude is None or norm is None else (magnitude, norm)
    _join(
        (-(-m // 64), -(-d // 128), 1),
        (y, h, lora_B, *gain),
        (float(scale), m, d, r),
        (gain[0] is not y, _wide(h), 64, 128, _ranks(r)),
        num_warps=4,
    )


def stretched(
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """s g B, [D, R] in `dtype`."""
    d, r = lora_B.shape
    out = lora_B.new_empty((d, r), dtype=dtype)
    gain = (out, out) if magnitude is None or norm is None else (magnitude, norm)
    _stretched(
        (-(-d // 64), -(-r // 64), 1),
        (out, lora_B, *gain),
        (float(scale), d, r),
        (gain[0] is not out, 64, 64),
        num_warps=4,
    )
    return out


def row_sums(dy: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """part [parts, D], whose sum is that of dy W[ids] over all tokens."""
    m, d = dy.shape
    rows = max(_ROWS, -(-m // _PARTS // 16) * 16)
    parts = -(-m // rows)
    part = dy.new_empty((parts, d), dtype=torch.float32)
    _sums((parts, -(-d // 128), 1), (part, dy, weight, ids), (m, d, rows), (16, 128), num_warps=4)
    return part


def scatter(th: Tensor, ids: Tensor, lora_A: Tensor, padding: int | None) -> Tensor:
    """dA [R, V]; the column of the padding gets nothing."""
    (m, r), v = th.shape, lora_A.shape[1]
    dA = torch.zeros_like(lora_A)
    ranks = _ranks(r)
    _scatter(
        (-(-m // 64), -(-r // ranks), 1),
        (dA, th, ids),
        (m, r, v, -1 if padding is None else padding),
        (_wide(th), 64, 64, ranks),
        num_warps=4,
    )
    return dA

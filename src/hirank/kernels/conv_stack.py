"""What surrounds the convolutions of an adapted convolution whose two kernels move as one.

The base kernel W and the adapter's A move over the input alike, so the kernel [W; A] of N + R out
channels gives both branches in one call, and one transposed call gives the gradient of the input.
The branches may as well come apart, where one call would take the GPU longer.

    stack       wa = [W; A] and B, in the compute dtype
    join        y = g (u + s B h) + b               u = W * x,  h = A * x        g = m / norm, or 1
    spread      [t; .] with t = g dy, and part = sum(dy u)
    finish      dm = (sum(part) + s sum(B raw)) / norm,  dB = s g raw      raw = dy h^T

Each is one launch, where PyTorch's parts would be several.

Shapes     wa [N + R, C, *k]; B [N, R]; u, y, dy [I, N, S]; h [I, R, S]; t [I, N + R, S]; raw
           [I, N, R]; part [spans, I, N]; m, norm, b [N]. Images of u and h may lie apart.
           I images, N out channels, R rank, S positions (all spatial dimensions in one).
Precision  loads widen to fp32, one rounding at the store; sums in fp32, in a fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hirank.kernels._compose import load_gain
from hirank.kernels._triton import Launcher, in_fp32, jit, tl

__all__ = ["finish", "join", "spread", "stack"]

# How the GPU does it.


@jit
def _cast_block(out, given, i, count, BLOCK: tl.constexpr):
    o = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(given + o, mask=o < count)
    tl.store(out + o, b.to(out.dtype.element_ty), mask=o < count)


@jit
def _stack_kernel(
    wa, out_B, weight, lora_A, lora_B, w_count, a_count, b_count, w_blocks, a_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    if i < w_blocks:
        _cast_block(wa, weight, i, w_count, BLOCK)
    elif i < w_blocks + a_blocks:
        _cast_block(wa + w_count, lora_A, i - w_blocks, a_count, BLOCK)
    else:
        _cast_block(out_B, lora_B, i - w_blocks - a_blocks, b_count, BLOCK)


@jit
def _join_kernel(
    y, kept, u, h, lora_B, magnitude, norm, bias, scale, N, R, S, U_IMAGE, H_IMAGE,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP_H: tl.constexpr, IN_FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    o_s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    i_n, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n, m_s = o_n < N, o_s < S
    p_u = u + image * U_IMAGE
    p_h = h + image * H_IMAGE
    b_v = tl.zeros([BLOCK_N, BLOCK_S], dtype=tl.float32)
    for r in range(0, R, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        m_h = (o_r[:, None] < R) & m_s[None, :]
        o_h = o_r[:, None].to(tl.int64) * S + o_s[None, :]
        b_h = tl.load(p_h + o_h, mask=m_h, other=0.0)
        b_B = tl.load(
            lora_B + o_n[:, None] * R + o_r[None, :],
            mask=m_n[:, None] & (o_r[None, :] < R), other=0.0,
        )  # fmt: skip
        if IN_FP32:
            b_v = tl.dot(b_B.to(tl.float32), b_h.to(tl.float32), b_v, input_precision="ieee")
        else:
            b_v = tl.dot(b_B, b_h, b_v)
        if KEEP_H:
            if i_n == 0:
                tl.store(kept + image * R * S + o_h, b_h, mask=m_h)
    mask = m_n[:, None] & m_s[None, :]
    offsets = o_n[:, None].to(tl.int64) * S + o_s[None, :]
    b_v = tl.load(p_u + offsets, mask=mask, other=0.0).to(tl.float32) + scale * b_v
    if HAS_GAIN:
        b_v *= load_gain(magnitude, norm, o_n, m_n)[:, None]
    if HAS_BIAS:
        b_v += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    tl.store(y + image * N * S + offsets, b_v.to(y.dtype.element_ty), mask=mask)


@jit
def _spread_kernel(
    t, part, dy, u, magnitude, norm, P, N, R, S, SPAN, U_IMAGE,
    HAS_GAIN: tl.constexpr, NEED_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # planes of dy are rows of a matrix [I N, S]; those of t have R others between images
    o_p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    m_p = o_p < P
    place = (o_p + o_p // N * R) * S
    p_u = u + o_p // N * U_IMAGE + o_p % N * S
    if HAS_GAIN:
        b_g = load_gain(magnitude, norm, o_p % N, m_p)
    b_sum = tl.zeros([BLOCK_P, BLOCK_S], dtype=tl.float32)
    for start in range(0, SPAN, BLOCK_S):
        o_s = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK_S)
        mask = m_p[:, None] & (o_s[None, :] < S)
        b_dy = tl.load(dy + o_p[:, None] * S + o_s[None, :], mask=mask, other=0.0).to(tl.float32)
        b_t = b_dy
        if HAS_GAIN:
            b_t = b_dy * b_g[:, None]
        tl.store(t + place[:, None] + o_s[None, :], b_t.to(t.dtype.element_ty), mask=mask)
        if NEED_M:
            b_u = tl.load(p_u[:, None] + o_s[None, :], mask=mask, other=0.0)
            b_sum += b_dy * b_u.to(tl.float32)
    if NEED_M:
        line = part + tl.program_id(1).to(tl.int64) * P
        tl.store(line + o_p, tl.sum(b_sum, axis=1), mask=m_p)


@jit
def _finish_kernel(
    dm, dB, part, raw, lora_B, magnitude, norm, scale, images, parts, N, R,
    HAS_GAIN: tl.constexpr, NEED_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_g = tl.full([BLOCK_N], 1.0, dtype=tl.float32)
    if HAS_GAIN:
        b_g = load_gain(magnitude, norm, o_n, m_n)
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for r in range(0, R, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        mask = m_n[:, None] & (o_r[None, :] < R)
        offsets = o_n[:, None] * R + o_r[None, :]
        b_raw = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
        p_raw = raw + offsets
        for _ in range(0, images):
            b_raw += tl.load(p_raw, mask=mask, other=0.0).to(tl.float32)
            p_raw += N * R
        b_dB = b_raw * (scale * b_g)[:, None]
        tl.store(dB + offsets, b_dB.to(dB.dtype.element_ty), mask=mask)
        if NEED_M:
            b_B = tl.load(lora_B + offsets, mask=mask, other=0.0).to(tl.float32)
            b_sum += scale * tl.sum(b_raw * b_B, axis=1)
    if NEED_M:
        p_part = part + o_n
        for _ in range(0, parts):
            b_sum += tl.load(p_part, mask=m_n, other=0.0)
            p_part += N
        b_norm = tl.load(norm + o_n, mask=m_n, other=1.0).to(tl.float32)
        alive = b_norm > 0
        b_dm = tl.where(alive, b_sum / tl.where(alive, b_norm, 1.0), 0.0)
        tl.store(dm + o_n, b_dm.to(dm.dtype.element_ty), mask=m_n)


_stack = Launcher(_stack_kernel)
_join = Launcher(_join_kernel)
_spread = Launcher(_spread_kernel)
_finish = Launcher(_finish_kernel)

_COPIED = 4096  # elements that one program casts
_SPAN = 4096  # positions that one program of the backward pass adds up
_TILE = 2048  # elements it handles at a time


def _up_to(count: int, least: int, most: int) -> int:
    """The power of two that holds `count`, within bounds."""
    return min(max(least, 1 << (count - 1).bit_length()), most)


# What is launched.


def stack(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[W; A] and B in `dtype`, of contiguous W, A [R, C, *k] and B [N, R, 1 ...].

    Of W [0, C, *k], A and B alone.
    """
    n, r = lora_B.shape[:2]
    wa = weight.new_empty((len(weight) + r, *weight.shape[1:]), dtype=dtype)
    B = weight.new_empty((n, r), dtype=dtype)
    counts = weight.numel(), lora_A.numel(), n * r
    w, a, b = (-(-count // _COPIED) for count in counts)
    _stack(
        (w + a + b, 1, 1), (wa, B, weight, lora_A, lora_B), (*counts, w, a), (_COPIED,), num_warps=8
    )
    return wa, B


def join(
    u: Tensor,
    h: Tensor,
    B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [I, N, ...] of u [I, N, ...] and h [I, R, ...]; and h, if asked for in its own memory."""
    n, r = B.shape
    images, _, *sizes = u.shape
    positions = math.prod(sizes)
    y = u.new_empty((images, n, *sizes))
    kept = h.new_empty((images, r, *sizes)) if keep else h
    gain = (B, B) if magnitude is None or norm is None else (magnitude, norm)
    wide, ranks = _up_to(positions, 16, 128), _up_to(r, 16, 64)
    _join(
        (-(-positions // wide), -(-n // 64), images),
        (y, kept, u, h, B, *gain, B if bias is None else bias),
        (float(scale), n, r, positions, u.stride(0), h.stride(0)),
        (gain[0] is not B, bias is not None, keep, in_fp32(B.dtype) or B.dtype == torch.float32,
         64, wide, ranks),
        num_warps=4,
    )  # fmt: skip
    return y, kept


def spread(
    dy: Tensor, u: Tensor | None, rank: int, magnitude: Tensor | None, norm: Tensor | None
) -> tuple[Tensor, Tensor]:
    """t [I, N + R, ...] whose last R channels are to be filled, and part [spans, I, N].

    dy is contiguous; u is given where m wants a gradient, else part means nothing.
    """
    images, n, *sizes = dy.shape
    positions = math.prod(sizes)
    t = dy.new_empty((images, n + rank, *sizes))
    wide = _up_to(positions, 16, _TILE)
    high, spans = max(1, _TILE // wide), -(-positions // _SPAN)
    part = dy
    if u is not None:
        part = dy.new_empty((spans, images, n), dtype=torch.float32)
    gain = (dy, dy) if magnitude is None or norm is None else (magnitude, norm)
    _spread(
        (-(-images * n // high), spans, 1),
        (t, part, dy, dy if u is None else u, *gain),
        (images * n, n, rank, positions, min(_SPAN, -(-positions // wide) * wide),
         0 if u is None else u.stride(0)),
        (gain[0] is not dy, u is not None, high, wide),
        num_warps=4,
    )  # fmt: skip
    return t, part


def finish(
    part: Tensor | None,
    raw: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, Tensor]:
    """dm [N], where there is a part, and dB, of the shape and dtype of B as it lies."""
    images, n, r = raw.shape
    dB = torch.empty_like(lora_B)
    gain = (lora_B, lora_B) if magnitude is None or norm is None else (magnitude, norm)
    dm = None if part is None or magnitude is None else torch.empty_like(magnitude)
    ranks = _up_to(r, 16, 128)
    _finish(
        (-(-n // 16), 1, 1),
        (dB if dm is None else dm, dB, raw if part is None else part, raw, lora_B, *gain),
        (float(scale), images, 1 if part is None else part.numel() // n, n, r),
        (gain[0] is not lora_B, dm is not None, 16, ranks),
        num_warps=1,
    )
    return dm, dB

"""One adapted linear on few tokens without gradients: what decoding does, in three launches.

    u = x W^T + b                       the base layer, by cuBLAS
    h = s x A^T                         one launch, A as it lies
    y = g (u + h B^T) + (1 - g) b       one launch, in place of u, B as it lies

The meaning is `dora_linear`'s. With a few tokens a layer's time is that of its launches and of the
weights it reads, so A and B are cast where they are loaded, and the low-rank product, gain and bias
share a launch. The base product stays cuBLAS's: a fresh adapter gives exactly what its base gives.

Shapes     x [M, K]; A [R, K]; B [N, R]; h [M, S, R] in S parts of K, which the second launch adds
           in their order; u, y [M, N]; magnitude, norm, bias [N].
Precision  A and B are rounded to the dtype of x, as in `dora_linear`; h stays fp32; y is rounded
           from fp32 once more than u was.
Paper      DoRA, arXiv 2402.09353, eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels._triton import Launcher, direct, interpreting, jit, tl

__all__ = ["MOST_ROWS", "decodes", "dora_decode"]

MOST_ROWS = 16
"""Tokens up to which A and B are read anew for each of them."""
_HIDDEN, _JOIN = (1, 2048), (16, 128)  # tiles: ranks x features, features x ranks
_SPLIT = 2  # parts of K, so that a small rank, too, gives every multiprocessor something to do
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _hidden_kernel(
    h, x, lora_A, scale, K, R, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # one program: BLOCK_R ranks of one token over a part of the features
    i_m, i_s = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    p_A = lora_A + o_r.to(tl.int64)[:, None] * K
    b_sum = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
    for k in range(i_s * BLOCK_K, K, SPLIT * BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        b_x = tl.load(x + i_m * K + o_k, mask=o_k < K, other=0.0)
        b_A = tl.load(p_A + o_k[None, :], mask=(o_r[:, None] < R) & (o_k[None, :] < K), other=0.0)
        b_A = b_A.to(b_x.dtype).to(tl.float32)
        b_sum += b_A * b_x.to(tl.float32)[None, :]
    tl.store(h + (i_m * SPLIT + i_s) * R + o_r, scale * tl.sum(b_sum, axis=1), mask=o_r < R)


@jit
def _join_kernel(
    u, h, lora_B, magnitude, norm, bias, N, R,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    # one program: BLOCK_N features of one token
    i_m = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_u = u + i_m * N + o_n
    p_B = lora_B + o_n.to(tl.int64)[:, None] * R
    b_sum = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    for r in range(0, R, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        b_h = tl.zeros([BLOCK_R], dtype=tl.float32)
        for i_s in tl.static_range(SPLIT):
            b_h += tl.load(h + (i_m * SPLIT + i_s) * R + o_r, mask=o_r < R, other=0.0)
        b_B = tl.load(p_B + o_r[None, :], mask=m_n[:, None] & (o_r[None, :] < R), other=0.0)
        b_sum += b_B.to(u.dtype.element_ty).to(tl.float32) * b_h[None, :]
    b_y = tl.load(p_u, mask=m_n, other=0.0).to(tl.float32) + tl.sum(b_sum, axis=1)
    if HAS_GAIN:
        b_norm = tl.load(norm + o_n, mask=m_n, other=1.0)
        b_m = tl.load(magnitude + o_n, mask=m_n, other=1.0).to(tl.float32)
        alive = b_norm > 0
        b_g = tl.where(alive, tl.div_rn(b_m, tl.where(alive, b_norm, 1.0)), 1.0)
        b_y = b_y * b_g
        if HAS_BIAS:
            b_y += (1 - b_g) * tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_u, b_y.to(u.dtype.element_ty), mask=m_n)


_hidden = Launcher(_hidden_kernel)
_join = Launcher(_join_kernel)


def decodes(x: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
    """Whether this call is one for `dora_decode`: few tokens, plain tensors, Triton at hand."""
    return (
        0 < x.numel() <= MOST_ROWS * weight.shape[1]
        and (direct(x) or (interpreting() and type(x) is Tensor and not torch.is_grad_enabled()))
        and x.dtype in _FLOATS
        and x.dtype == weight.dtype
        and lora_A.dtype in _FLOATS
        and lora_B.dtype in _FLOATS
        and lora_A.is_contiguous()
        and lora_B.is_contiguous()
    )


def dora_decode(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """y [..., N] of x [..., K] without gradients; `decodes` must have agreed."""
    u = F.linear(x, weight, bias)
    (N, K), R = weight.shape, lora_A.shape[0]
    M = x.numel() // K
    h = torch.empty(M, _SPLIT, R, dtype=torch.float32, device=x.device)
    rows, width = _HIDDEN
    _hidden(
        (-(-R // rows), M, _SPLIT),
        (h, x.contiguous(), lora_A),
        (float(scale), K, R),  # one kernel serves 2 and 2.0
        (rows, width, _SPLIT),
        num_warps=4,
    )
    scalars = (u, u) if magnitude is None or norm is None else (magnitude, norm)
    rows, width = _JOIN
    _join(
        (-(-N // rows), M, 1),
        (u, h, lora_B, *scalars, u if bias is None else bias),
        (N, R),
        (scalars[0] is not u, bias is not None, rows, width, _SPLIT),
        num_warps=8,
    )
    return u

"""The one elementwise pass of an adapted linear: stretch every output column by its gain.

    g = m / norm        (1 where norm = 0, see `dora_norm.dora_gain`)

    forward     y = g (u + l) + (1 - g) b      u holds the bias already; exactly u at g = 1, l = 0
    backward    t  = g dy
                dm = colsum(dy v) / norm       v = (y - b) / g, the output before gain and bias

Forward overwrites u. The low-rank branch l comes apart where adding it inside a GEMM would round
the sum once more, which over 36 layers of bf16 was seen to cost a tenth in fidelity; else u holds
it. Backward reads dy and y once each, writes t, and sums dm on the way: every
block of rows writes its own line of partial sums, added up afterwards in a fixed order. No
atomics, so two runs agree bit for bit.

Columns with |g| < 2^-10, or 2^-2 beside a bias, no longer hold v (m = 0 above all). The kernel that
adds up the partial sums notices them and computes colsum(dy v) from the inputs,

    colsum(dy v)[n] = <(dy^T x)[n], W[n]> + <(dy^T h)[n], B[n]>

where it is needed, without telling the host.

Shapes     u, l, y, dy, t [M, N]; m, norm, b, dm [N]; x [M, K]; W [N, K]; h [M, R]; B [N, R].
           h B^T is the scaled low-rank branch: whoever passes h and B has put s into one of them.
           B may be wider than the rest: it is rounded where it is read.
Precision  loads widen to fp32, one rounding at the store; sums in fp32.
Cost       forward moves 2 M N elements (3 with l), backward 3 M N. The yardstick is a copy of as
           many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hirank.kernels._ops import register_op
from hirank.kernels._triton import Launcher, direct, in_fp32, jit, tl
from hirank.kernels._tuning import tiles
from hirank.kernels.dora_norm import dora_gain

__all__ = ["gain_backward", "gain_backward_ref", "gain_forward_", "gain_forward_ref_"]

UNREADABLE = 2.0**-10
"""|g| below which y has rounded away what v was."""
UNREADABLE_BESIDE_BIAS = 2.0**-2
"""The same where a bias was added: then y is rounded to the bias's size, not to that of g v."""

_BLOCK = 2**16  # elements that the reference's backward takes at a time


def _limit(bias: Tensor | None) -> float:
    return UNREADABLE if bias is None else UNREADABLE_BESIDE_BIAS


# What it means.


def gain_forward_ref_(
    u: Tensor, magnitude: Tensor, norm: Tensor, bias: Tensor | None, lora: Tensor | None = None
) -> None:
    """u <- g (u + lora) + (1 - g) b, in place. [M, N]"""
    gain = dora_gain(magnitude, norm)
    if lora is not None:
        wide = u.to(gain.dtype).add_(lora).mul_(gain)
        u.copy_(wide if bias is None else wide.add_((1 - gain) * bias))
    elif bias is None:
        u.mul_(gain)
    elif u.dtype == gain.dtype:
        u.mul_(gain).add_((1 - gain) * bias)
    else:
        u.copy_(torch.addcmul((1 - gain) * bias, u, gain))


def gain_backward_ref(
    dy: Tensor,
    y: Tensor | None,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    lora_B: Tensor,
    need_dm: bool,
) -> tuple[Tensor, Tensor]:
    """t [M, N] and dm [N] (empty if not needed). `y` None: v is computed again for all columns.

    dy and y may have any leading dimensions.
    """
    dy, y = _rows(dy), None if y is None else _rows(y)
    if dy.is_meta:  # which columns need a second look is a matter of values
        return torch.empty_like(dy), torch.empty_like(magnitude)
    gain = dora_gain(magnitude, norm)
    if not need_dm:
        return (dy * gain).to(dy.dtype), gain.new_empty(0)
    alive = norm > 0
    readable = (gain.abs() >= _limit(bias)) if y is not None else torch.zeros_like(alive)
    t, out = torch.empty_like(dy), torch.zeros_like(gain)
    height = max(1, _BLOCK // max(1, dy.shape[1]))
    for start in range(0, dy.shape[0], height):  # blocks stay in the cache between their passes
        block = slice(start, start + height)
        t[block] = dy[block] * gain
        if y is not None:
            v = y[block].to(gain.dtype) if bias is None else y[block].to(gain.dtype) - bias
            out += (dy[block] * v).sum(0)
    if bool((alive & readable).all()):  # the ordinary case: g norm is m
        return t, (out / magnitude).to(magnitude.dtype)
    out /= torch.where(readable, gain, 1)
    rows = (alive & ~readable).nonzero().squeeze(1)
    if rows.numel():
        v = torch.addmm(x @ weight[rows].T, h, lora_B[rows].to(x.dtype).T)
        out[rows] = (dy[:, rows] * v.to(gain.dtype)).sum(0)
    return t, torch.where(alive, out / torch.where(alive, norm, 1), 0).to(magnitude.dtype)


# How the GPU does it.


@jit
def _gain(magnitude, norm, o_n, m_n):
    b_norm = tl.load(norm + o_n, mask=m_n, other=1.0).to(tl.float32)
    b_m = tl.load(magnitude + o_n, mask=m_n, other=1.0).to(tl.float32)
    alive = b_norm > 0
    # div_rn: m / m must be exactly 1, or a fresh adapter would not be its base
    b_g = tl.where(alive, tl.div_rn(b_m, tl.where(alive, b_norm, 1.0)), 1.0)
    return b_g, b_norm


@jit
def _forward_kernel(
    u, lora, magnitude, norm, bias, M, N,
    HAS_LORA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m_n = o_n < N
    mask = (o_m[:, None] < M) & m_n[None, :]
    b_g, _ = _gain(magnitude, norm, o_n, m_n)
    offsets = o_m[:, None] * N + o_n[None, :]
    p_u = u + offsets
    b_y = tl.load(p_u, mask=mask, other=0.0).to(tl.float32)
    if HAS_LORA:
        b_y += tl.load(lora + offsets, mask=mask, other=0.0).to(tl.float32)
    b_y = b_y * b_g[None, :]
    if HAS_BIAS:
        b_b = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y += ((1 - b_g) * b_b)[None, :]
    tl.store(p_u, b_y.to(u.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    t, part, dy, y, magnitude, norm, bias, M, N, ROWS,
    HAS_BIAS: tl.constexpr, NEED_DM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_g, _ = _gain(magnitude, norm, o_n, m_n)
    if HAS_BIAS:
        b_b = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)  # added up across rows at the end
    for start in range(0, ROWS, BLOCK_M):
        o_m = (i_m * ROWS + start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (o_m[:, None] < M) & m_n[None, :]
        offsets = o_m[:, None] * N + o_n[None, :]
        b_dy = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(t + offsets, (b_dy * b_g[None, :]).to(t.dtype.element_ty), mask=mask)
        if NEED_DM:
            b_v = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                b_v -= b_b[None, :]
            b_sums += b_dy * b_v
    if NEED_DM:
        tl.store(part + i_m.to(tl.int64) * N + o_n, tl.sum(b_sums, axis=0), mask=m_n)


@jit
def _columns_times(
    dy, x, weight, o_n, m_n, M, N, K, IN_FP32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # <(dy^T x)[n], weight[n]> of a few columns n
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_z = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)  # (dy^T x) [BLOCK_N, BLOCK_K]
        for m in range(0, M, BLOCK_M):
            o_m = (m + tl.arange(0, BLOCK_M)).to(tl.int64)
            m_m = o_m < M
            b_dy = tl.load(dy + o_m[None, :] * N + o_n[:, None],
                           mask=m_m[None, :] & m_n[:, None], other=0.0)  # fmt: skip
            b_x = tl.load(x + o_m[:, None] * K + o_k[None, :],
                          mask=m_m[:, None] & m_k[None, :], other=0.0)  # fmt: skip
            if IN_FP32:
                b_dy, b_x = b_dy.to(tl.float32), b_x.to(tl.float32)
            b_z += tl.dot(b_dy, b_x, input_precision="ieee")
        b_w = tl.load(weight + o_n.to(tl.int64)[:, None] * K + o_k[None, :],
                      mask=m_n[:, None] & m_k[None, :], other=0.0)  # fmt: skip
        b_sum += tl.sum(b_z * b_w.to(x.dtype.element_ty).to(tl.float32), axis=1)
    return b_sum


@jit
def _magnitude_kernel(
    dm, part, magnitude, norm, dy, x, h, weight, lora_B, M, N, K, R, PARTS,
    ALL_UNREADABLE: tl.constexpr, IN_FP32: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_g, b_norm = _gain(magnitude, norm, o_n, m_n)
    alive = b_norm > 0
    readable = tl.abs(b_g) >= LIMIT
    if ALL_UNREADABLE:
        readable = o_n < 0
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    if not ALL_UNREADABLE:
        for p in range(0, PARTS, BLOCK_P):
            o_p = (p + tl.arange(0, BLOCK_P)).to(tl.int64)
            b_sum += tl.sum(
                tl.load(part + o_p[:, None] * N + o_n[None, :],
                        mask=(o_p[:, None] < PARTS) & m_n[None, :], other=0.0), axis=0,
            )  # fmt: skip
        b_sum = b_sum / tl.where(readable, b_g, 1.0)
    if tl.sum((m_n & alive & (readable == 0)).to(tl.int32), axis=0) > 0:
        again = _columns_times(dy, x, weight, o_n, m_n, M, N, K, IN_FP32, 32, 32, BLOCK_N)
        again += _columns_times(dy, h, lora_B, o_n, m_n, M, N, R, IN_FP32, 32, 32, BLOCK_N)
        b_sum = tl.where(readable, b_sum, again)
    b_dm = tl.where(alive, b_sum / tl.where(alive, b_norm, 1.0), 0.0)
    tl.store(dm + o_n, b_dm.to(dm.dtype.element_ty), mask=m_n)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)
_magnitude = Launcher(_magnitude_kernel)


def _launch_forward_(
    u: Tensor, magnitude: Tensor, norm: Tensor, bias: Tensor | None, lora: Tensor | None = None
) -> None:
    found = tiles(u.device)
    if u.dtype not in _WIDTHS or found.obstacle is not None:
        return gain_forward_ref_(u, magnitude, norm, bias, lora)
    M, N = u.shape
    if u.numel() == 0:
        return None
    tile = found.gain_forward
    _forward(
        (-(-M // tile.block_m), -(-N // tile.block_n), 1),
        (u, u if lora is None else lora, magnitude, norm, u if bias is None else bias),
        (M, N),
        (lora is not None, bias is not None, tile.block_m, tile.block_n),
        num_warps=tile.num_warps,
    )
    return None


def _launch_backward(
    dy: Tensor,
    y: Tensor | None,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    lora_B: Tensor,
    need_dm: bool,
) -> tuple[Tensor, Tensor]:
    found = tiles(dy.device)
    if dy.dtype not in _WIDTHS or found.obstacle is not None:
        return gain_backward_ref(dy, y, magnitude, norm, bias, x, h, weight, lora_B, need_dm)
    dy, y = dy.contiguous(), None if y is None else y.contiguous()
    N = norm.shape[0]
    M = dy.numel() // N if N else 0
    t = dy.new_empty(M, N)
    dm = torch.empty_like(magnitude) if need_dm else magnitude.new_empty(0)
    if not M:
        return t, dm.zero_()
    tile = found.gain_backward
    reads_y = need_dm and y is not None
    columns = -(-N // tile.block_n)
    rows = tile.rows(M, columns)
    parts = -(-M // rows)
    part = norm.new_empty((parts, N), dtype=torch.float32) if reads_y else dm
    _backward(
        (parts, columns, 1),
        (t, part, dy, dy if y is None else y, magnitude, norm, dy if bias is None else bias),
        (M, N, rows),
        (bias is not None, reads_y, tile.block_m, tile.block_n),
        num_warps=tile.num_warps,
    )
    if need_dm:
        inputs = x.contiguous(), h.contiguous(), weight.contiguous(), lora_B.contiguous()
        _magnitude(
            (-(-N // 32), 1, 1),
            (dm, part, magnitude, norm, dy, *inputs),
            (M, N, weight.shape[1], h.shape[1], parts),
            (y is None, in_fp32(dy.dtype), _limit(bias), 32, 32),
        )
    return t, dm


_WIDTHS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of the kernels


def _like_backward(
    dy: Tensor,
    y: Tensor | None,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    x: Tensor,
    h: Tensor,
    weight: Tensor,
    lora_B: Tensor,
    need_dm: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), magnitude.new_empty(magnitude.shape[0] if need_dm else 0)


# How PyTorch sees it.

_forward_op = register_op(
    "gain_forward_(Tensor(a!) u, Tensor magnitude, Tensor norm, Tensor? bias, Tensor? lora) -> ()",
    reference=gain_forward_ref_,
    fused=_launch_forward_,
    fake=lambda u, magnitude, norm, bias, lora: None,
)
_backward_op = register_op(
    "gain_backward(Tensor dy, Tensor? y, Tensor magnitude, Tensor norm, Tensor? bias, Tensor x,"
    " Tensor h, Tensor weight, Tensor lora_B, bool need_dm) -> (Tensor, Tensor)",
    reference=gain_backward_ref,
    fused=_launch_backward,
    fake=_like_backward,
)


def gain_forward_(
    u: Tensor, magnitude: Tensor, norm: Tensor, bias: Tensor | None, lora: Tensor | None = None
) -> None:
    """u <- g (u + lora) + (1 - g) b, in place. [M, N], both contiguous"""
    (_launch_forward_ if direct(u) else _forward_op)(u, magnitude, norm, bias, lora)


def gain_backward(dy: Tensor, y: Tensor | None, *more: Any) -> tuple[Tensor, Tensor]:
    """As `gain_backward_ref`, which names the arguments: t [M, N] and dm [N].

    dy and y may have any leading dimensions.
    """
    if direct(dy):
        return _launch_backward(dy, y, *more)
    dy, y = _rows(dy), None if y is None else _rows(y)
    found: tuple[Tensor, Tensor] = _backward_op(dy, y, *more)
    return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])

"""Join DoRA's frozen branch and low-rank branch when somebody else computed the frozen one.

    out = y + (g - 1) (base - b) + g s lora        g = m / norm        (1 where norm = 0)

Every term but the last may be missing. Three uses, one op:

    y, base, lora    dropout on the adapter only: y holds W x, the branches hold W d(x), B A d(x)
    base, lora       the part to add to an output that already holds `base`
    u as lora, s = 1 u = base + s lora is one tensor already, bias included: g u + (1 - g) b.
                     One read instead of three, and g - 1 is never taken

Where the whole linear is ours, `dora_linear` needs none of this.

    backward    dy = dout, dbase = (g - 1) dout, dlora = g s dout, db = (1 - g) colsum(dout)
                dm = colsum(dout (base - b + s lora)) / norm

Backward is one pass: it reads dout, base and lora once, writes both gradients, and every block of
rows writes its own line of partial sums for dm, added up afterwards in a fixed order. No atomics:
two runs agree bit for bit.

Shapes     y, base, lora, out [M, N]; m, norm, b, dm [N]; s a number.   M tokens, N out features.
Precision  y, base, lora, out share a dtype; loads widen to fp32, one rounding at the store; sums in
           fp32. (g - 1) is taken in fp32: in bf16 it would vanish for |g - 1| < 2^-9.
Saves      base and lora, for dm alone: nothing where m is frozen.
Cost       forward moves a tensor of M N elements for each it is given, and out; backward 5 M N, or
           3 M N without base. The yardstick is a copy of as many bytes.
Paper      DoRA, arXiv 2402.09353, eq. 5; section 4.3: the norm is a constant for autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hirank.kernels._backend import check_backend
from hirank.kernels._compose import (
    Composed,
    by_formula,
    check_alike,
    compose,
    fits,
    gain_here,
    load_gain,
    packed,
    room,
)
from hirank.kernels._triton import Launcher, jit, tl
from hirank.kernels._tuning import tiles
from hirank.kernels.dora_norm import dora_gain

__all__ = ["DORA_COMPOSE", "dora_compose", "dora_compose_bwd_ref", "dora_compose_ref"]
__all__ += ["magnitude_gradient"]

# What it means.


def dora_compose_ref(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    scale: float,
) -> Tensor:
    """y + (g - 1) (base - b) + g s lora in the gain's precision, rounded once. [M, N]"""
    return _joined(base, lora, dora_gain(magnitude, norm), bias, y, scale)


def _joined(
    base: Tensor | None,
    lora: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    scale: float,
) -> Tensor:
    out = lora * (gain if scale == 1 else gain * scale)
    if bias is not None:
        out = out + (1 - gain) * bias
    if base is not None:
        out = torch.addcmul(out, base, gain - 1)
    if y is not None:
        out = out + y
    return out.to(lora.dtype)


def dora_compose_bwd_ref(
    dout: Tensor,
    base: Tensor | None,
    lora: Tensor | None,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    scale: float,
    need_base: bool,
    need_lora: bool,
    need_m: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of base [M, N], lora [M, N] and magnitude [N]; empty where none is needed.

    `base` and `lora` are read for the magnitude only. Plain tensor algebra: differentiable again.
    """
    gain = dora_gain(magnitude, norm)
    dbase, dlora, dm = dout.new_empty(0), dout.new_empty(0), magnitude.new_empty(0)
    if need_base:
        dbase = (dout * (gain - 1)).to(dout.dtype)
    if need_lora:
        dlora = (dout * (gain * scale)).to(dout.dtype)
    if need_m:
        assert lora is not None
        v = lora.to(gain.dtype) * scale
        v = v if base is None else v + base
        v = v if bias is None else v - bias
        alive = norm > 0
        dm = (dout * v).sum(0) / torch.where(alive, norm, 1)
        dm = torch.where(alive, dm, 0).to(magnitude.dtype)
    return dbase, dlora, dm


# How the GPU does it.


@jit
def _forward_kernel(
    out, base, lora, magnitude, norm, bias, y, scale, M, N,
    HAS_BASE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Y: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    m_n = o_n < N
    mask = (o_m[:, None] < M) & m_n[None, :]
    offsets = o_m[:, None] * N + o_n[None, :]
    b_g = load_gain(magnitude, norm, o_n, m_n)
    b_out = tl.load(lora + offsets, mask=mask, other=0.0).to(tl.float32) * (b_g * scale)[None, :]
    if HAS_BIAS:
        b_b = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_out += ((1 - b_g) * b_b)[None, :]
    if HAS_BASE:
        b_base = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
        b_out += (b_g - 1)[None, :] * b_base
    if HAS_Y:
        b_out += tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, b_out.to(out.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dbase, dlora, part, dout, base, lora, magnitude, norm, bias, scale, M, N, ROWS,
    HAS_BASE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEED_BASE: tl.constexpr, NEED_LORA: tl.constexpr, NEED_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_g = load_gain(magnitude, norm, o_n, m_n)
    if HAS_BIAS:
        b_b = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    # one sum an element of the tile, joined once at the end: threads meet once, not at every step
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        o_m = (i_m * ROWS + start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (o_m[:, None] < M) & m_n[None, :]
        offsets = o_m[:, None] * N + o_n[None, :]
        b_dout = tl.load(dout + offsets, mask=mask, other=0.0).to(tl.float32)
        if NEED_BASE:
            b_dbase = b_dout * (b_g - 1)[None, :]
            tl.store(dbase + offsets, b_dbase.to(dbase.dtype.element_ty), mask=mask)
        if NEED_LORA:
            b_dlora = b_dout * (b_g * scale)[None, :]
            tl.store(dlora + offsets, b_dlora.to(dlora.dtype.element_ty), mask=mask)
        if NEED_M:
            b_v = tl.load(lora + offsets, mask=mask, other=0.0).to(tl.float32) * scale
            if HAS_BASE:
                b_v += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                b_v -= b_b[None, :]
            b_sum += b_dout * b_v
    if NEED_M:
        tl.store(part + i_m.to(tl.int64) * N + o_n, tl.sum(b_sum, axis=0), mask=m_n)


@jit
def _magnitude_kernel(dm, part, norm, N, PARTS, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for p in range(0, PARTS, BLOCK_P):
        o_p = (p + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (o_p[:, None] < PARTS) & m_n[None, :]
        b_sum += tl.sum(tl.load(part + o_p[:, None] * N + o_n[None, :], mask=mask, other=0.0), 0)
    b_norm = tl.load(norm + o_n, mask=m_n, other=1.0).to(tl.float32)
    alive = b_norm > 0
    b_dm = tl.where(alive, b_sum / tl.where(alive, b_norm, 1.0), 0.0)
    tl.store(dm + o_n, b_dm.to(dm.dtype.element_ty), mask=m_n)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)
_magnitude = Launcher(_magnitude_kernel)


def _launch_forward(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    scale: float,
) -> Tensor:
    if not fits(lora):
        return dora_compose_ref(base, lora, magnitude, norm, bias, y, scale)
    lora = lora.contiguous()
    out = torch.empty_like(lora)
    if out.numel() == 0:
        return out
    M, N = lora.shape
    tile = tiles(lora.device).compose_forward
    tensors = (packed(base, lora), lora, *_rows(magnitude, norm, bias), packed(y, lora))
    _forward(
        (-(-M // tile.block_m), -(-N // tile.block_n), 1),
        (out, *tensors),
        (float(scale), M, N),
        (base is not None, bias is not None, y is not None, tile.block_m, tile.block_n),
        num_warps=tile.num_warps,
    )
    return out


def _rows(magnitude: Tensor, norm: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = magnitude.contiguous()
    return magnitude, norm.contiguous(), packed(bias, magnitude)


def _launch_backward(
    dout: Tensor,
    base: Tensor | None,
    lora: Tensor | None,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    scale: float,
    need_base: bool,
    need_lora: bool,
    need_m: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not fits(dout):
        return dora_compose_bwd_ref(
            dout, base, lora, magnitude, norm, bias, scale, need_base, need_lora, need_m
        )
    dout = dout.contiguous()
    M, N = dout.shape
    dbase, dlora, dm = room(dout, need_base), room(dout, need_lora), room(magnitude, need_m)
    if dout.numel() == 0:
        return dbase, dlora, dm.zero_()
    tile = tiles(dout.device).compose_backward
    columns = -(-N // tile.block_n)
    rows = tile.rows(M, columns)
    parts = -(-M // rows)
    part = dout.new_empty((parts, N), dtype=torch.float32) if need_m else dout
    m, n, b = _rows(magnitude, norm, bias)
    _backward(
        (parts, columns, 1),
        (dbase, dlora, part, dout, packed(base, dout), packed(lora, dout), m, n, b),
        (float(scale), M, N, rows),
        (base is not None, bias is not None, need_base, need_lora, need_m,
         tile.block_m, tile.block_n),
        num_warps=tile.num_warps,
    )  # fmt: skip
    if need_m:
        magnitude_gradient(dm, part, n)
    return dbase, dlora, dm


def magnitude_gradient(dm: Tensor, part: Tensor, norm: Tensor) -> None:
    """dm [N] <- sum(part) / norm of part [parts, N], and 0 where the norm is 0."""
    parts, N = part.shape
    _magnitude((-(-N // 32), 1, 1), (dm, part, norm), (N, parts), (32, 32))


# How PyTorch sees it.

DORA_COMPOSE = compose(
    "dora_compose",
    dora_compose_ref,
    dora_compose_bwd_ref,
    _launch_forward,
    _launch_backward,
    over=(0,),
)


def _check(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
) -> None:
    check_alike("dora_compose", lora, base, y)
    for name, row in (("magnitude", magnitude), ("norm", norm), ("bias", bias)):
        if row is not None and row.shape != lora.shape[-1:]:
            raise ValueError(
                f"dora_compose got lora {tuple(lora.shape)} and {name} {tuple(row.shape)}: "
                f"{name} must have one entry per last dimension, {lora.shape[-1]}."
            )


def dora_compose(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y + (g - 1) (base - b) + g s lora, with gradients for all tensors but the norm.

    Args:
        base: [..., N] frozen output, any float dtype; None if `lora` holds base + s lora already.
        lora: [..., N] output of B(A(x)) before scaling, same shape and dtype.
        magnitude, norm: [N] fp32 (fp64 with fp64 inputs); the norm comes from `dora_norm` and is a
            constant for autograd.
        scale: s, a plain number; 1 if `lora` holds the joined branches.
        bias: [N], if the frozen output holds a bias: the gain does not stretch it.
        y: [..., N] to add the result to; not written to.
        backend: as in `dora_linear`, but that "auto" is Triton wherever it runs.

    Returns:
        [..., N] in the dtype of `lora`.

    Raises:
        ValueError: shapes or dtypes do not fit, or Triton cannot run here and was asked for.
    """
    _check(base, lora, magnitude, norm, bias, y)
    if backend != "auto":
        check_backend(backend, lora.device)

    if by_formula(lora, backend == "torch"):
        return _joined(base, lora, gain_here(magnitude, norm), bias, y, scale)

    def flat(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.reshape(-1, lora.shape[-1]).contiguous()

    out: Tensor = Composed.apply(
        flat(base),
        flat(lora),
        magnitude,
        norm,
        bias,
        flat(y),
        scale,
        backend == "torch",
        DORA_COMPOSE,
    )
    return out.view(lora.shape)

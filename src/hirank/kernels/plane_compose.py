"""Join DoRA's branches where channels come before positions, as convolutions lay them out.

    out = y + (g - 1) (base - b) + g s lora        g = m / norm        (1 where norm = 0)

The same as `dora_compose`, with one gain for each plane of S positions instead of each column:
images would have to be copied to have their channels last. Every term but the last may be missing.

    backward    dy = dout, dbase = (g - 1) dout, dlora = g s dout, db = (1 - g) sum(dout)
                dm = sum(dout (base - b + s lora)) / norm        sums over images and positions

Shapes     y, base, lora, out [I, N, S]; m, norm, b, dm [N]; s a number.
           I images, N out channels, S positions (all spatial dimensions in one).
Precision  y, base, lora, out share a dtype; loads widen to fp32, one rounding at the store; sums in
           fp32, in a fixed order: two runs agree bit for bit.
Saves      base and lora, for dm alone: nothing where m is frozen.
Cost       forward moves a tensor of I N S elements for each it is given, and out; backward 5 I N S,
           or 3 I N S without base.
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
from hirank.kernels.dora_compose import magnitude_gradient
from hirank.kernels.dora_norm import dora_gain

__all__ = ["PLANE_COMPOSE", "plane_compose", "plane_compose_bwd_ref", "plane_compose_ref"]

# What it means.


def plane_compose_ref(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    scale: float,
) -> Tensor:
    """y + (g - 1) (base - b) + g s lora in the gain's precision, rounded once. [I, N, S]"""
    return _joined(base, lora, dora_gain(magnitude, norm), bias, y, scale)


def _joined(
    base: Tensor | None,
    lora: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    scale: float,
) -> Tensor:
    gain = gain[:, None]
    factor = gain if scale == 1 else gain * scale
    if bias is None:
        out = lora * factor
    else:
        out = torch.addcmul((1 - gain) * bias[:, None], lora.to(gain.dtype), factor)
    if base is not None:
        out = torch.addcmul(out, base, gain - 1)
    if y is not None:
        out = out + y
    return out.to(lora.dtype)


def plane_compose_bwd_ref(
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
    """Gradients of base and lora [I, N, S] and magnitude [N]; empty where none is needed.

    `base` and `lora` are read for the magnitude only. Plain tensor algebra: differentiable again.
    """
    gain = dora_gain(magnitude, norm)[:, None]
    dbase, dlora, dm = dout.new_empty(0), dout.new_empty(0), magnitude.new_empty(0)
    if need_base:
        dbase = (dout * (gain - 1)).to(dout.dtype)
    if need_lora:
        dlora = (dout * (gain * scale)).to(dout.dtype)
    if need_m:
        assert lora is not None
        v = lora.to(gain.dtype) if scale == 1 else lora.to(gain.dtype) * scale
        v = v if base is None else v + base
        v = v if bias is None else v - bias[:, None]
        alive = norm > 0
        dm = (dout * v).sum((0, 2)) / torch.where(alive, norm, 1)
        dm = torch.where(alive, dm, 0).to(magnitude.dtype)
    return dbase, dlora, dm


# How the GPU does it: planes are rows of a matrix [I N, S], each with a gain of its own.


@jit
def _forward_kernel(
    out, base, lora, magnitude, norm, bias, y, scale, P, N, S,
    HAS_BASE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Y: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    o_p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    o_s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    m_p = o_p < P
    mask = m_p[:, None] & (o_s[None, :] < S)
    offsets = o_p[:, None] * S + o_s[None, :]
    b_g = load_gain(magnitude, norm, o_p % N, m_p)
    b_out = tl.load(lora + offsets, mask=mask, other=0.0).to(tl.float32) * (b_g * scale)[:, None]
    if HAS_BIAS:
        b_b = tl.load(bias + o_p % N, mask=m_p, other=0.0).to(tl.float32)
        b_out += ((1 - b_g) * b_b)[:, None]
    if HAS_BASE:
        b_base = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
        b_out += (b_g - 1)[:, None] * b_base
    if HAS_Y:
        b_out += tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, b_out.to(out.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dbase, dlora, part, dout, base, lora, magnitude, norm, bias, scale, P, N, S, SPAN,
    HAS_BASE: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEED_BASE: tl.constexpr, NEED_LORA: tl.constexpr, NEED_M: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    o_p = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)).to(tl.int64)
    m_p = o_p < P
    b_g = load_gain(magnitude, norm, o_p % N, m_p)
    if HAS_BIAS:
        b_b = tl.load(bias + o_p % N, mask=m_p, other=0.0).to(tl.float32)
    # one sum an element of the tile, joined once at the end
    b_sum = tl.zeros([BLOCK_P, BLOCK_S], dtype=tl.float32)
    for start in range(0, SPAN, BLOCK_S):
        o_s = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK_S)
        mask = m_p[:, None] & (o_s[None, :] < S)
        offsets = o_p[:, None] * S + o_s[None, :]
        b_dout = tl.load(dout + offsets, mask=mask, other=0.0).to(tl.float32)
        if NEED_BASE:
            b_dbase = b_dout * (b_g - 1)[:, None]
            tl.store(dbase + offsets, b_dbase.to(dbase.dtype.element_ty), mask=mask)
        if NEED_LORA:
            b_dlora = b_dout * (b_g * scale)[:, None]
            tl.store(dlora + offsets, b_dlora.to(dlora.dtype.element_ty), mask=mask)
        if NEED_M:
            b_v = tl.load(lora + offsets, mask=mask, other=0.0).to(tl.float32) * scale
            if HAS_BASE:
                b_v += tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                b_v -= b_b[:, None]
            b_sum += b_dout * b_v
    if NEED_M:
        line = part + tl.program_id(1).to(tl.int64) * P
        tl.store(line + o_p, tl.sum(b_sum, axis=1), mask=m_p)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)

_TILE = 2048  # elements a program handles at a time
_SPAN = 4096  # positions that one program of the backward pass adds up


def _tile(positions: int) -> tuple[int, int]:
    """Planes and positions of a tile: powers of two, as wide as the planes are."""
    width = 16
    while width < min(positions, _TILE):
        width *= 2
    return max(1, _TILE // width), width


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
        return plane_compose_ref(base, lora, magnitude, norm, bias, y, scale)
    lora, m = lora.contiguous(), magnitude.contiguous()
    out = torch.empty_like(lora)
    if out.numel() == 0:
        return out
    images, N, S = lora.shape
    high, wide = _tile(S)
    rows = (m, norm.contiguous(), packed(bias, m))
    _forward(
        (-(-images * N // high), -(-S // wide), 1),
        (out, packed(base, lora), lora, *rows, packed(y, lora)),
        (float(scale), images * N, N, S),
        (base is not None, bias is not None, y is not None, high, wide),
        num_warps=4,
    )
    return out


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
        return plane_compose_bwd_ref(
            dout, base, lora, magnitude, norm, bias, scale, need_base, need_lora, need_m
        )
    dout, m = dout.contiguous(), magnitude.contiguous()
    dbase, dlora = room(dout, need_base), room(dout, need_lora)
    if dout.numel() == 0:
        return dbase, dlora, torch.zeros_like(m) if need_m else m.new_empty(0)
    images, N, S = dout.shape
    high, wide = _tile(S)
    spans = -(-S // _SPAN)
    part = dout.new_empty((spans, images, N), dtype=torch.float32) if need_m else dout
    _backward(
        (-(-images * N // high), spans, 1),
        (dbase, dlora, part, dout, packed(base, dout), packed(lora, dout),
         m, norm.contiguous(), packed(bias, m)),
        (float(scale), images * N, N, S, min(_SPAN, -(-S // wide) * wide)),
        (base is not None, bias is not None, need_base, need_lora, need_m, high, wide),
        num_warps=4,
    )  # fmt: skip
    dm = room(m, need_m)
    if need_m:
        magnitude_gradient(dm, part.view(-1, N), norm.contiguous())
    return dbase, dlora, dm


# How PyTorch sees it.

PLANE_COMPOSE = compose(
    "plane_compose",
    plane_compose_ref,
    plane_compose_bwd_ref,
    _launch_forward,
    _launch_backward,
    over=(0, 2),
)


def plane_compose(
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
        base: [I, N, S] frozen output, any float dtype; None if `lora` holds base + s lora already.
        lora: [I, N, S] the low-rank branch before scaling, same shape and dtype.
        magnitude, norm: [N] fp32 (fp64 with fp64 inputs); the norm is a constant for autograd.
        scale: s, a plain number; 1 if `lora` holds the joined branches.
        bias: [N], if the frozen output holds a bias: the gain does not stretch it.
        y: [I, N, S] to add the result to; not written to.
        backend: as in `dora_compose`.

    Returns:
        [I, N, S] in the dtype of `lora`.

    Raises:
        ValueError: shapes or dtypes do not fit, or Triton cannot run here and was asked for.
    """
    _check(base, lora, magnitude, norm, bias, y)
    if backend != "auto":
        check_backend(backend, lora.device)
    plain = backend == "torch"
    if by_formula(lora, plain):
        return _joined(base, lora, gain_here(magnitude, norm), bias, y, scale)
    out: Tensor = Composed.apply(base, lora, magnitude, norm, bias, y, scale, plain, PLANE_COMPOSE)
    return out


def _check(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
) -> None:
    if lora.dim() != 3:
        raise ValueError(f"plane_compose got lora {tuple(lora.shape)}: it must be [I, N, S].")
    check_alike("plane_compose", lora, base, y)
    for name, row in (("magnitude", magnitude), ("norm", norm), ("bias", bias)):
        if row is not None and tuple(row.shape) != (lora.shape[1],):
            raise ValueError(
                f"plane_compose got lora {tuple(lora.shape)} and {name} {tuple(row.shape)}: "
                f"{name} must have one entry for each of {lora.shape[1]} channels."
            )

"""One adapted linear, owned as a whole.

    y = g (x W^T + s (x A^T) B^T) + b        g = m / norm, see `dora_norm.dora_gain`

LoRA is the same without g. Written out, with v = x W^T + s h B^T and h = x A^T:

    forward     u = v + b   (the bias rides in the base GEMM, the low-rank product is added to it)
                y = g u + (1 - g) b                 exactly u at g = 1: identity at initialisation
    backward    t  = g dy
                dx = t W + s (t B) A                second product accumulated into the first
                dA = s (t B)^T x
                dB = s t^T h
                dm = colsum(dy v) / norm = colsum(dy (y - b)) / m
                db = colsum(dy)

dm needs nothing beyond the output, which the layer above mostly keeps anyway. Where |g| is so
small that y no longer holds v (m = 0 above all), those columns of v are computed again.

Shapes     x [M, K]; weight [N, K]; lora_A [R, K]; lora_B [N, R]; magnitude, norm, bias [N];
           h [M, R]; y [M, N].   M tokens, K in features, N out features, R rank.
Precision  x and weight share the compute dtype; A and B are cast to it; magnitude and norm are
           fp32 and so are g and the sums of dm. GEMMs round to the compute dtype, the gain pass
           widens and rounds once.
Saves      x and h, as LoRA does, and (for dm) the output y; the weights by reference.
Paper      DoRA, arXiv 2402.09353, eq. 5; section 4.3: the norm is a constant for autograd.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels.dora_norm import dora_gain

__all__ = ["DoraLinearGrads", "dora_linear", "dora_linear_bwd_ref", "dora_linear_fwd_ref"]

_UNREADABLE = 2.0**-10  # |g| below which y has rounded away what v was


class DoraLinearGrads(NamedTuple):
    """Gradients; None where none was asked for."""

    x: Tensor | None  # [M, K]
    lora_A: Tensor | None  # [R, K]
    lora_B: Tensor | None  # [N, R]
    magnitude: Tensor | None  # [N]
    bias: Tensor | None  # [N]


def _apply_gain(u: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """g u + (1 - g) b in the gain's precision; overwrites u."""
    if bias is None:
        return u.mul_(gain)
    if u.dtype == gain.dtype:
        return u.mul_(gain).add_((1 - gain) * bias)
    return u.copy_(torch.addcmul((1 - gain) * bias, u, gain))


def dora_linear_fwd_ref(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """y [M, N] and h = x A^T [M, R]. Without magnitude: plain LoRA."""
    h = x @ lora_A.to(x.dtype).T
    u = F.linear(x, weight, bias)
    u.addmm_(h, lora_B.to(x.dtype).T, alpha=scale)
    if magnitude is None or norm is None:
        return u, h
    return _apply_gain(u, dora_gain(magnitude, norm), bias), h


def _branch_sum(
    x: Tensor, h: Tensor, weight: Tensor, lora_B: Tensor, scale: float, rows: Tensor
) -> Tensor:
    """v of some out features only. [M, len(rows)]"""
    return torch.addmm(x @ weight[rows].T, h, lora_B[rows].to(x.dtype).T, alpha=scale)


def _magnitude_grad(
    dy: Tensor,
    y: Tensor | None,
    gain: Tensor,
    norm: Tensor,
    bias: Tensor | None,
    again: Any,
) -> Tensor:
    """colsum(dy v) / norm, reading v off y where y still tells it. [N]"""
    alive = norm > 0
    safe_norm = torch.where(alive, norm, 1)
    if y is None:
        v = again(torch.arange(dy.shape[1], device=dy.device))
        return torch.where(alive, (dy * v.to(gain.dtype)).sum(0) / safe_norm, 0)
    readable = gain.abs() >= _UNREADABLE
    widened = y if y.dtype == gain.dtype else y.to(gain.dtype)
    told = dy * (widened if bias is None else widened - bias)
    out = told.sum(0) / torch.where(readable, gain, 1) / safe_norm
    rows = (alive & ~readable).nonzero().squeeze(1)
    if rows.numel():
        out[rows] = (dy[:, rows] * again(rows).to(gain.dtype)).sum(0) / norm[rows]
    return torch.where(alive, out, 0)


def dora_linear_bwd_ref(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    needs: tuple[bool, bool, bool, bool, bool] = (True, True, True, True, True),
) -> DoraLinearGrads:
    """Hand-written backward. `needs` says which of x, A, B, magnitude, bias want a gradient.

    `y` is the forward's output; None (it was overwritten) computes v again.
    """
    need_x, need_A, need_B, need_m, need_b = needs
    A, B = lora_A.to(dy.dtype), lora_B.to(dy.dtype)
    t, dm = dy, None
    if magnitude is not None and norm is not None:
        gain = dora_gain(magnitude, norm)
        t = (dy * gain).to(dy.dtype)
        if need_m:
            dm = _magnitude_grad(
                dy, y, gain, norm, bias, lambda rows: _branch_sum(x, h, weight, B, scale, rows)
            ).to(magnitude.dtype)
    tB = t @ B if need_x or need_A else None  # [M, R]
    dx = torch.mm(t, weight).addmm_(tB, A, alpha=scale) if need_x and tB is not None else None
    dA = (tB.T @ x).mul_(scale).to(lora_A.dtype) if need_A and tB is not None else None
    dB = (t.T @ h).mul_(scale).to(lora_B.dtype) if need_B else None
    db = dy.sum(0) if need_b and bias is not None else None
    return DoraLinearGrads(dx, dA, dB, dm, db)


def _plain(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """The formula as autograd would see it: only for gradients of gradients."""
    v = F.linear(x, weight) + scale * F.linear(F.linear(x, lora_A.to(x.dtype)), lora_B.to(x.dtype))
    if magnitude is not None and norm is not None:
        v = dora_gain(magnitude, norm).to(x.dtype) * v
    return v if bias is None else v + bias


def _saved(ctx: Any) -> list[Tensor | None]:
    """What forward saved; y comes back as None if later code overwrote it in place."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError:
        *rest, _ = ctx._raw_saved_tensors
        return [*(s.unpack() for s in rest), None]  # any other overwritten tensor still raises


class _DoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        magnitude: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        norm: Tensor | None,
        scale: float,
    ) -> Tensor:
        y, h = dora_linear_fwd_ref(x, weight, lora_A, lora_B, magnitude, norm, bias, scale)
        wants_dm = magnitude is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(
            x, lora_A, lora_B, magnitude, bias, weight, norm, h, y if wants_dm else None
        )
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, lora_A, lora_B, magnitude, bias, weight, norm, h, y = _saved(ctx)
        assert x is not None and lora_A is not None and lora_B is not None
        assert weight is not None and h is not None
        if torch.is_grad_enabled():  # double backward: rare, so by autograd on the plain formula
            return *_differentiable_grads(ctx, dys[0]), None, None, None
        grads = dora_linear_bwd_ref(
            dys[0], x, h, y, weight, lora_A, lora_B, magnitude, norm, bias, ctx.scale,
            needs=ctx.needs_input_grad[:5],
        )  # fmt: skip
        return *grads, None, None, None


def _differentiable_grads(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    x, lora_A, lora_B, magnitude, bias, weight, norm, *_ = _saved(ctx)
    inputs = [x, lora_A, lora_B, magnitude, bias]
    wanted = [t for t, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
    assert x is not None and weight is not None and lora_A is not None and lora_B is not None
    y = _plain(x, weight, lora_A, lora_B, magnitude, norm, bias, ctx.scale)
    grads = iter(
        torch.autograd.grad(y, [t for t in wanted if t is not None], dy, create_graph=True)
    )
    return [next(grads) if need else None for need in ctx.needs_input_grad[:5]]


def _check(x: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> None:
    n, k = weight.shape
    r = lora_A.shape[0]
    if x.shape[-1] != k or lora_A.shape[1] != k or tuple(lora_B.shape) != (n, r):
        raise ValueError(
            f"dora_linear got x {tuple(x.shape)}, weight {n}x{k}, A {tuple(lora_A.shape)} and "
            f"B {tuple(lora_B.shape)}: x must end in {k}, A be [R, {k}] and B [{n}, R]."
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"dora_linear got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, or "
            "run under autocast."
        )


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What a linear layer would compute in: autocast's dtype if it is on, else the weight's."""
    if x.dtype != torch.float64 and _autocast(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


def _autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def dora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    *,
    scale: float,
    magnitude: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """y = g (x W^T + s (x A^T) B^T) + b, with gradients for x, A, B, magnitude and bias.

    Args:
        x: [..., K], any number of leading dimensions, possibly none or empty.
        weight: [N, K], frozen: it gets no gradient. Under autocast x and weight are cast.
        lora_A, lora_B: [R, K] and [N, R], any float dtype; gradients come in theirs.
        scale: s, a plain number.
        magnitude, norm: [N] fp32 (fp64 for fp64), both or neither; neither means LoRA. The norm
            comes from `dora_norm` and is a constant for autograd.
        bias: [N], or None.

    Returns:
        [..., N] in the compute dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or one of magnitude and norm is missing.
    """
    if (magnitude is None) != (norm is None):
        raise ValueError(
            "dora_linear got only one of magnitude and norm: pass both for DoRA, none for LoRA."
        )
    if _autocast(x.device.type):
        dtype = compute_dtype(x, weight)
        x, weight = x.to(dtype), weight.to(dtype)
    if bias is not None:
        bias = bias.to(weight.dtype)
    _check(x, weight, lora_A, lora_B)
    lead = x.shape[:-1]
    y: Tensor = _DoraLinear.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]), lora_A, lora_B, magnitude, bias, weight, norm, scale
    )
    return y.view(*lead, weight.shape[0])

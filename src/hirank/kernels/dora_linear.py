"""One adapted linear, owned as a whole.

    y = g (x W^T + s (x A^T) B^T) + b        g = m / norm, see `dora_norm.dora_gain`

LoRA is the same without g. Written out, with v = x W^T + s (x A^T) B^T:

    forward     h  = x (s A)^T
                u  = x W^T + b, then += h B^T       added inside the GEMM
                y  = g u + (1 - g) b                one pass, see `gain_pass`
    backward    t  = g dy,  dm = colsum(dy v)/norm  one pass, see `gain_pass`
                tB = t (s B)
                dx = t W, then += tB A              added inside the GEMM
                dA = tB^T x,  dB = t^T h,  db = colsum(dy)

The scale rides on the casts of A and B, so no product needs a pass of its own. dm is read off the
output, which the layer above mostly keeps anyway: nothing out-sized is saved but y.

Shapes     x [M, K]; weight [N, K]; lora_A [R, K]; lora_B [N, R]; magnitude, norm, bias [N];
           h [M, R]; tB [M, R]; y [M, N].   M tokens, K in features, N out features, R rank.
Precision  x and weight share the compute dtype; A and B are cast to it; magnitude and norm are
           fp32 and so are g and the sums of dm. GEMMs round to the compute dtype, the gain pass
           widens and rounds once.
Saves      x and h, as LoRA does, and (for dm) the output y; the weights by reference.
Paper      DoRA, arXiv 2402.09353, eq. 5; section 4.3: the norm is a constant for autograd.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels._products import product
from hirank.kernels.dora_norm import dora_gain
from hirank.kernels.gain_pass import (
    gain_backward,
    gain_backward_ref,
    gain_forward_,
    gain_forward_ref_,
)

__all__ = ["BACKENDS", "DoraLinearGrads", "compute_dtype", "dora_linear"]
__all__ += ["dora_linear_bwd_ref", "dora_linear_fwd_ref"]

BACKENDS = ("auto", "triton", "torch")


class DoraLinearGrads(NamedTuple):
    """Gradients; None where none was asked for."""

    x: Tensor | None  # [M, K]
    lora_A: Tensor | None  # [R, K]
    lora_B: Tensor | None  # [N, R]
    magnitude: Tensor | None  # [N]
    bias: Tensor | None  # [N]


class GainPass(NamedTuple):
    """The elementwise pass of one backend: forward in place, backward."""

    forward_: Callable[..., Any]
    backward: Callable[..., Any]


REFERENCE = GainPass(gain_forward_ref_, gain_backward_ref)
FUSED = GainPass(gain_forward_, gain_backward)  # Triton on CUDA, the reference elsewhere


def _scaled(factor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * factor in `dtype`: one pass, one rounding."""
    if scale == 1:
        return factor.to(dtype)
    if factor.dtype == dtype or torch.compiler.is_compiling():
        return (factor * scale).to(dtype)
    return torch.mul(factor, scale, out=torch.empty_like(factor, dtype=dtype))


def dora_linear_fwd_ref(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    gain_pass: GainPass = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """y [M, N] and h = s x A^T [M, R]. Without magnitude: plain LoRA."""
    h = x @ _scaled(lora_A, scale, x.dtype).T
    u = F.linear(x, weight, bias)
    u.addmm_(h, lora_B.to(x.dtype).T)
    if magnitude is not None and norm is not None:
        gain_pass.forward_(u, magnitude, norm, bias)
    return u, h


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
    gain_pass: GainPass = REFERENCE,
) -> DoraLinearGrads:
    """Hand-written backward. `needs` says which of x, A, B, magnitude, bias want a gradient.

    `y` is the forward's output; None (it was overwritten) computes v again.
    """
    need_x, need_A, need_B, need_m, need_b = needs
    t, dm = dy, None
    if magnitude is not None and norm is not None:
        t, dm = gain_pass.backward(
            dy, y, magnitude, norm, bias, x, h, weight, lora_B, need_m
        )  # fmt: skip
    dx = dA = None
    if need_x or need_A:
        tB = t @ _scaled(lora_B, scale, t.dtype)  # [M, R]
        if need_x:
            dx = torch.mm(t, weight).addmm_(tB, lora_A.to(t.dtype))
        if need_A:
            dA = product(tB.T, x, lora_A.dtype)
    dB = product(t.T, h, lora_B.dtype) if need_B else None
    db = dy.sum(0) if need_b and bias is not None else None
    return DoraLinearGrads(dx, dA, dB, dm if need_m else None, db)


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
    except RuntimeError as error:
        *rest, last = ctx._raw_saved_tensors
        if not hasattr(last, "unpack"):  # torch < 2.13
            raise RuntimeError(
                "The output of an adapted layer, or a weight of its adapter, was modified by an "
                "inplace operation before the backward pass; use torch 2.13, or avoid that."
            ) from error
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
        gain_pass: GainPass,
    ) -> Tensor:
        y, h = dora_linear_fwd_ref(
            x, weight, lora_A, lora_B, magnitude, norm, bias, scale, gain_pass
        )
        wants_dm = magnitude is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(
            x, lora_A, lora_B, magnitude, bias, weight, norm, h, y if wants_dm else None
        )
        ctx.scale, ctx.gain_pass = scale, gain_pass
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, lora_A, lora_B, magnitude, bias, weight, norm, h, y = _saved(ctx)
        assert x is not None and lora_A is not None and lora_B is not None
        assert weight is not None and h is not None
        if torch.is_grad_enabled():  # double backward: rare, so by autograd on the plain formula
            return *_differentiable_grads(ctx, dys[0]), None, None, None, None
        grads = dora_linear_bwd_ref(
            dys[0], x, h, y, weight, lora_A, lora_B, magnitude, norm, bias, ctx.scale,
            needs=ctx.needs_input_grad[:5], gain_pass=ctx.gain_pass,
        )  # fmt: skip
        return *grads, None, None, None, None


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
    backend: str = "auto",
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
        backend: "torch" for the plain reference; "auto" and "triton" run the Triton kernels on
            CUDA tensors of half or single precision, and the reference elsewhere.

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
        x.reshape(-1, x.shape[-1]), lora_A, lora_B, magnitude, bias, weight, norm, scale,
        REFERENCE if backend == "torch" else FUSED,
    )  # fmt: skip
    return y.view(*lead, weight.shape[0])

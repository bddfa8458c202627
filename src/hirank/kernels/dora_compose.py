"""Join DoRA's frozen branch and low-rank branch when somebody else computed the frozen one.

    out = (g - 1) base + g s lora        g = m / norm, see `dora_norm.dora_gain`

Returns the part to add to an output that already holds `base` (dropout on the adapter only, a
second adapter on one layer, a base layer whose forward is not ours). Where the whole linear is
ours, `dora_linear` needs one pass less and cannot cancel.

Shapes     base, lora, out [M, N]; gain [N]; s a number.   M tokens, N out features.
Precision  base, lora, out share a dtype; half inputs widen to fp32, one rounding at the store.
           (g - 1) is taken in the gain's fp32: in bf16 it would vanish for |g - 1| < 2^-9.
Cost       forward moves 3 M N elements, backward 5 M N.
Paper      DoRA, arXiv 2402.09353, eq. 5; section 4.3: the norm is a constant for autograd.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["dora_compose", "dora_compose_bwd_ref", "dora_compose_ref"]


def dora_compose_ref(base: Tensor, lora: Tensor, gain: Tensor, scale: float) -> Tensor:
    """(g - 1) base + g s lora in the gain's precision, rounded once. [M, N]"""
    return ((gain - 1) * base + (gain * scale) * lora).to(base.dtype)


def dora_compose_bwd_ref(
    dout: Tensor, base: Tensor, lora: Tensor, gain: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of base [M, N], lora [M, N] and gain [N]."""
    dbase = ((gain - 1) * dout).to(base.dtype)
    dlora = ((gain * scale) * dout).to(lora.dtype)
    wide = gain.dtype
    dgain = (dout * torch.add(base.to(wide), lora.to(wide), alpha=scale)).sum(0)
    return dbase, dlora, dgain


class _DoraCompose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, lora: Tensor, gain: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(base, lora, gain)
        ctx.scale = scale
        return dora_compose_ref(base, lora, gain, scale)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        base, lora, gain = ctx.saved_tensors  # plain tensor algebra: differentiable again
        return *dora_compose_bwd_ref(douts[0], base, lora, gain, ctx.scale), None


def dora_compose(base: Tensor, lora: Tensor, gain: Tensor, *, scale: float) -> Tensor:
    """(g - 1) base + g s lora, with gradients for all three tensors.

    Args:
        base: [..., N] frozen output without bias, any float dtype.
        lora: [..., N] output of B(A(x)) before scaling, same shape and dtype.
        gain: [N], fp32 (fp64 with fp64 inputs).
        scale: s, a plain number.

    Returns:
        [..., N] in the dtype of `base`.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if base.shape != lora.shape or base.dtype != lora.dtype or gain.shape != base.shape[-1:]:
        raise ValueError(
            f"dora_compose got base {tuple(base.shape)} {base.dtype}, lora {tuple(lora.shape)} "
            f"{lora.dtype} and gain {tuple(gain.shape)}: base and lora must agree, and gain must "
            "have one entry per last dimension."
        )
    n = base.shape[-1]
    out: Tensor = _DoraCompose.apply(  # type: ignore[no-untyped-call]
        base.reshape(-1, n), lora.reshape(-1, n), gain, scale
    )
    return out.view(base.shape)

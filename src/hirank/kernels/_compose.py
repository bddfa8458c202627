"""What `dora_compose` and `plane_compose` have in common: everything but the layout.

gain        m / norm, loaded in a kernel
compose     registers a layout's two ops
Composed    the autograd around them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._ops import register_op
from hirank.kernels._triton import direct, interpreting, jit, tl
from hirank.kernels._tuning import tiles
from hirank.kernels.dora_norm import dora_gain

__all__ = [
    "Compose",
    "Composed",
    "backward_way",
    "by_formula",
    "check_alike",
    "compose",
    "fits",
    "forward_way",
]
__all__ += ["gain_here", "load_gain", "packed", "room"]

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@jit
def load_gain(magnitude, norm, o_n, m_n):
    b_norm = tl.load(norm + o_n, mask=m_n, other=1.0).to(tl.float32)
    b_m = tl.load(magnitude + o_n, mask=m_n, other=1.0).to(tl.float32)
    alive = b_norm > 0
    # div_rn: m / m must be exactly 1, or a fresh adapter would not be its base
    return tl.where(alive, tl.div_rn(b_m, tl.where(alive, b_norm, 1.0)), 1.0)


def fits(tensor: Tensor) -> bool:
    """Whether the kernels take it."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return tensor.dtype in floats and tiles(tensor.device).obstacle is None


def room(like: Tensor, needed: bool) -> Tensor:
    return torch.empty_like(like) if needed else like.new_empty(0)


def packed(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants some pointer, also for what it will not read."""
    return other if tensor is None else tensor.contiguous()


def check_alike(name: str, lora: Tensor, base: Tensor | None, y: Tensor | None) -> None:
    """Raises ValueError: a branch that differs from the low-rank one in shape or dtype."""
    for what, other in (("base", base), ("y", y)):
        if other is not None and (other.shape != lora.shape or other.dtype != lora.dtype):
            raise ValueError(
                f"{name} got lora {tuple(lora.shape)} {lora.dtype} and {what} "
                f"{tuple(other.shape)} {other.dtype}: y, base and lora must agree."
            )


class Compose(NamedTuple):
    """One layout's formulas, launchers and registered ops."""

    forward_ref: Forward
    backward_ref: Backward
    launch_forward: Forward
    launch_backward: Backward
    forward_op: Forward
    backward_op: Backward
    over: tuple[int, ...]
    """The dimensions that share a gain: sums for m and b go over them."""


def compose(
    name: str,
    forward_ref: Forward,
    backward_ref: Backward,
    launch_forward: Forward,
    launch_backward: Backward,
    over: tuple[int, ...],
) -> Compose:
    """Register `hirank::NAME_fwd` and `hirank::NAME_bwd`."""
    forward_op = register_op(
        f"{name}_fwd(Tensor? base, Tensor lora, Tensor magnitude, Tensor norm, Tensor? bias,"
        " Tensor? y, float scale) -> Tensor",
        reference=forward_ref,
        fused=launch_forward,
        fake=lambda base, lora, *more: torch.empty_like(lora),
    )
    backward_op = register_op(
        f"{name}_bwd(Tensor dout, Tensor? base, Tensor? lora, Tensor magnitude, Tensor norm,"
        " Tensor? bias, float scale, bool need_base, bool need_lora, bool need_m)"
        " -> (Tensor, Tensor, Tensor)",
        reference=backward_ref,
        fused=launch_backward,
        fake=_like_backward,
    )
    launchers = (launch_forward, launch_backward)
    return Compose(forward_ref, backward_ref, *launchers, forward_op, backward_op, over)


def _like_backward(dout: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, magnitude, _, _, _, need_base, need_lora, need_m = args
    return room(dout, need_base), room(dout, need_lora), room(magnitude, need_m)


def by_formula(tensor: Tensor, plain: bool) -> bool:
    """Whether the formula, as autograd sees it, is all there is to run: its parts are in C++."""
    wide = tensor.dtype in (torch.float32, torch.float64)  # else it would keep widened copies
    here = plain or (tensor.device.type == "cpu" and not interpreting())
    return wide and here


def gain_here(magnitude: Tensor, norm: Tensor) -> Tensor:
    """As `dora_gain`, in fewer steps where a look at the values costs nothing."""
    if norm.device.type == "cpu" and not torch.compiler.is_compiling() and bool((norm > 0).all()):
        return magnitude.to(norm.dtype) / norm
    return dora_gain(magnitude, norm)


def forward_way(how: Compose, tensor: Tensor, plain: bool) -> Forward:
    """What runs forward on such a tensor."""
    if plain:
        return how.forward_ref
    return how.launch_forward if direct(tensor) else how.forward_op


def backward_way(how: Compose, tensor: Tensor, plain: bool) -> Backward:
    """What runs backward on such a tensor. Gradients of gradients: by plain algebra."""
    if plain or torch.is_grad_enabled():
        return how.backward_ref
    return how.launch_backward if direct(tensor) else how.backward_op


class Composed(torch.autograd.Function):
    """`Composed.apply(base, lora, magnitude, norm, bias, y, scale, plain, how)`."""

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor | None,
        lora: Tensor,
        magnitude: Tensor,
        norm: Tensor,
        bias: Tensor | None,
        y: Tensor | None,
        scale: float,
        plain: bool,
        how: Compose,
    ) -> Any:
        reads = (base, lora) if ctx.needs_input_grad[2] else (None, None)
        ctx.save_for_backward(*reads, magnitude, norm, bias)
        ctx.scale, ctx.plain, ctx.how = scale, plain, how
        return forward_way(how, lora, plain)(base, lora, magnitude, norm, bias, y, scale)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:
        how: Compose = ctx.how
        base, lora, magnitude, norm, bias = ctx.saved_tensors
        need_base, need_lora, need_m, _, need_bias, need_y, *_ = ctx.needs_input_grad
        dout = douts[0].contiguous()
        dbase, dlora, dm = backward_way(how, dout, ctx.plain)(
            dout, base, lora, magnitude, norm, bias, ctx.scale, need_base, need_lora, need_m
        )
        db = None
        if need_bias:
            g = dora_gain(magnitude, norm)
            db = ((1 - g) * dout.sum(how.over, dtype=g.dtype)).to(bias.dtype)
        grads = (dbase if need_base else None, dlora if need_lora else None)
        return *grads, dm if need_m else None, None, db, dout if need_y else None, None, None, None

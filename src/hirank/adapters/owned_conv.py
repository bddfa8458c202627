"""A convolution with one adapter and no dropout, owned as a whole.

    y = g (W * x + s B * A * x - b) + b        as `adapters/conv` says, W * x with the bias b

One node for autograd, where the parts would be a dozen.

    forward     h = A * x,  u = W * x + b,  u <- u + s B h,  y = g (u - b) + b
    backward    t = g dy,  dm = sum(dy (u - b)) / norm,  th = s B^T t
                dx = W *^T t + A *^T th,  dA = th . x,  dB = s t h^T,  db = sum(dy)

Shapes     as in `adapters/conv`; u, t [I, N, ...]; h, th [I, R, ...].
Saves      x and h, and (for dm) u.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.adapters.stacked_conv import Moves, stackable, stacked_backward, stacked_forward
from hirank.kernels._compose import Compose, backward_way, forward_way
from hirank.kernels.dora_compose import DORA_COMPOSE
from hirank.kernels.dora_linear import Weights, activations, by_formula
from hirank.kernels.plane_compose import PLANE_COMPOSE

__all__ = ["Moves", "has_channels_last", "owned_conv", "planes", "rows", "to_images"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# The two ways in which channels can lie.


def has_channels_last(images: Tensor) -> bool:
    layout = _CHANNELS_LAST.get(images.dim())
    if layout is None or images.is_contiguous():
        return False
    return images.is_contiguous(memory_format=layout)


def planes(images: Tensor) -> Tensor:
    """[I, N, ...] to [I, N, S]; a view where channels come before positions."""
    return images.reshape(*images.shape[:2], -1) if images.numel() else images.flatten(2)


def rows(images: Tensor) -> Tensor:
    """[I, N, ...] to [I S, N]; a view where channels come last."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def to_images(found: Tensor, like: Tensor) -> Tensor:
    """[I S, N] back to the shape of `like`."""
    return found.view(like.shape[0], *like.shape[2:], found.shape[1]).movedim(-1, 1)


class _Call(NamedTuple):
    """What a call is besides its tensors."""

    moves: Moves
    scale: float
    plain: bool
    """backend="torch": by the formulas."""
    formula: Callable[..., Tensor]
    """The layer as autograd sees it, for gradients of gradients."""
    stacked: bool
    """Both kernels in one call."""


class _OwnedConv(torch.autograd.Function):
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
        call: _Call,
    ) -> Tensor:
        weights = Weights(lora_A, lora_B, magnitude, bias, weight, norm)
        needs = ctx.needs_input_grad
        saved: tuple[Tensor | None, ...]
        if call.stacked:
            y, *kept = stacked_forward(x, weights, call.moves, call.scale, needs)
            saved = x, *kept
        else:
            weights = _made_plain(weights, x.dtype)
            u, h = _branches(x, weights, call)
            y, saved = _stretched(u, weights, call.plain), (x, h, u if needs[3] else None)
        if True in needs:
            ctx.save_for_backward(*saved)
            ctx.weights, ctx.versions, ctx.call = weights, weights.versions(), call
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, h, u = activations(ctx)
        needs, weights, call = ctx.needs_input_grad[:5], ctx.weights, ctx.call
        if by_formula(dys[0]):  # rare
            found = _differentiable(weights, needs, call, x, dys[0])
        elif call.stacked:
            found = stacked_backward(dys[0], x, h, u, weights, call.moves, call.scale, needs)
        else:
            found = _gradients(weights, needs, call, x, h, u, dys[0])
        return *found, None, None, None


# without the look for functorch's wrappers that PyTorch takes at every argument of every call
_apply: Any = super(torch.autograd.Function, _OwnedConv).apply


def _made_plain(weights: Weights, dtype: torch.dtype) -> Weights:
    """With W in the compute dtype."""
    return weights._replace(weight=weights.weight.to(dtype))


def _branches(x: Tensor, weights: Weights, call: _Call) -> tuple[Tensor, Tensor]:
    """u = W * x + b + s B h and h = A * x."""
    moves, dtype = call.moves, x.dtype
    A, B = weights.lora_A.to(dtype), weights.lora_B.to(dtype)
    u = moves.forward(x, weights.weight, weights.bias, moves.groups)
    h = moves.forward(x, A, None, 1)
    return _add_(u, h, B, call), h


def _add_(u: Tensor, h: Tensor, B: Tensor, call: _Call) -> Tensor:
    """u <- u + s B h, inside one GEMM where there are no groups."""
    groups, scale = call.moves.groups, call.scale
    if groups > 1:
        ones, noughts = [1] * len(call.moves.stride), [0] * len(call.moves.stride)
        lora = torch.convolution(h, B, None, ones, noughts, ones, False, noughts, groups)
        return u.add_(lora, alpha=scale)
    if has_channels_last(u):
        rows(u).addmm_(rows(h), B.flatten(1).t(), alpha=scale)
        return u
    u = u.contiguous()
    planes(u).baddbmm_(B.flatten(1).expand(u.shape[0], *B.shape[:2]), planes(h), alpha=scale)
    return u


# The gain.


def _layout(images: Tensor) -> tuple[Callable[[Tensor], Tensor], Compose]:
    return (rows, DORA_COMPOSE) if has_channels_last(images) else (planes, PLANE_COMPOSE)


def _laid(found: Tensor, like: Tensor) -> Tensor:
    return to_images(found, like) if has_channels_last(like) else found.view(like.shape)


def _stretched(u: Tensor, weights: Weights, plain: bool) -> Tensor:
    """g (u - b) + b"""
    magnitude, norm, bias = weights.magnitude, weights.norm, weights.bias
    if magnitude is None or norm is None:
        return u
    flat, how = _layout(u)
    compose = forward_way(how, u, plain)
    found = _laid(compose(None, flat(u), magnitude.flatten(), norm, bias, None, 1.0), u)
    place = found.untyped_storage(), found.storage_offset(), found.shape, found.stride()
    return found.new_empty(0).set_(*place)  # no view: the next layer may write over it


def _through_gain(
    dy: Tensor, u: Tensor | None, weights: Weights, plain: bool
) -> tuple[Tensor, Tensor | None]:
    """t = g dy, and dm where u is given; dy itself without a magnitude."""
    magnitude, norm, bias = weights.magnitude, weights.norm, weights.bias
    if magnitude is None or norm is None:
        return dy, None
    flat, how = _layout(dy)
    _, t, dm = backward_way(how, dy, plain)(
        flat(dy), None, None if u is None else flat(u), magnitude.flatten(), norm, bias, 1.0,
        False, True, u is not None,
    )  # fmt: skip
    return _laid(t, dy), None if u is None else dm.view(magnitude.shape)


def _gradients(
    weights: Weights,
    needs: Sequence[bool],
    call: _Call,
    x: Tensor,
    h: Tensor,
    u: Tensor | None,
    dy: Tensor,
) -> list[Tensor | None]:
    """Of x, A, B, magnitude and bias."""
    need_x, need_A, need_B, need_m, need_b = needs
    dy = dy if has_channels_last(dy) else dy.contiguous()
    t, dm = _through_gain(dy, u if need_m else None, weights, call.plain)
    dx, dA, dB = _of_branches(weights, (need_x, need_A, need_B), call, x, h, t)
    db = dy.sum([0, *range(2, dy.dim())]) if need_b else None
    return [dx, dA, dB, dm, db]


def _of_branches(
    weights: Weights, needs: tuple[bool, bool, bool], call: _Call, x: Tensor, h: Tensor, t: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dA and dB from t, the gradient of u."""
    need_x, need_A, need_B = needs
    moves, dtype = call.moves, x.dtype
    A, B = weights.lora_A.to(dtype), weights.lora_B.to(dtype)
    th, dB = _through_B(t, h, B, call, need_x or need_A, need_B)
    dx = dA = None
    if need_x and th is not None:
        dx = moves.input_gradient(t, x, weights.weight, moves.groups)
        dx.add_(moves.input_gradient(th, x, A, 1))
    if need_A and th is not None:
        dA = moves.weight_gradient(th, x, A, 1)
    return (
        dx,
        None if dA is None else dA.to(weights.lora_A.dtype),
        None if dB is None else dB.to(weights.lora_B.dtype),
    )


def _through_B(
    t: Tensor, h: Tensor, B: Tensor, call: _Call, need_h: bool, need_B: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of h and B."""
    groups, scale = call.moves.groups, call.scale
    if groups > 1:
        once, nought = [1] * len(call.moves.stride), [0] * len(call.moves.stride)
        moves = Moves(once, nought, once, groups)
        return (
            moves.input_gradient(t, h, B, groups).mul_(scale) if need_h else None,
            moves.weight_gradient(t, h, B, groups).mul_(scale) if need_B else None,
        )
    if has_channels_last(t):
        return _through_rows(rows(t), rows(h), B, scale, need_h, need_B, h)
    return _through_planes(planes(t), planes(h), B, scale, need_h, need_B, h)


def _through_rows(
    t: Tensor, h: Tensor, B: Tensor, scale: float, need_h: bool, need_B: bool, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    th = dB = None
    factor = B.flatten(1)
    if need_h:
        found = torch.addmm(t.new_empty(()), t, factor, beta=0, alpha=scale)
        th = to_images(found, like)
    if need_B:
        dB = torch.addmm(t.new_empty(()), t.t(), h, beta=0, alpha=scale).view(B.shape)
    return th, dB


def _through_planes(
    t: Tensor, h: Tensor, B: Tensor, scale: float, need_h: bool, need_B: bool, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    th = dB = None
    if need_h:
        factor = B.flatten(1).t().expand(t.shape[0], B.shape[1], B.shape[0])
        found = torch.baddbmm(t.new_empty(()), factor, t, beta=0, alpha=scale)
        th = found.view(like.shape)
    if need_B:
        each = torch.baddbmm(t.new_empty(()), t, h.transpose(1, 2), beta=0, alpha=scale)
        dB = (each[0] if len(each) == 1 else each.sum(0)).view(B.shape)
    return th, dB


@torch.enable_grad()
def _differentiable(
    weights: Weights, needs: Sequence[bool], call: _Call, x: Tensor, dy: Tensor
) -> list[Tensor | None]:
    """Gradients of x, A, B, magnitude and bias that can be differentiated again."""
    A, B, magnitude, bias, weight, norm = weights
    inputs = [x, A, B, magnitude, bias]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    y = call.formula(x, A, B, magnitude, bias, weight, norm)
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(found) if need else None for need in needs]


def owned_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    *,
    scale: float,
    moves: Moves,
    plain: bool,
    formula: Callable[..., Tensor],
) -> Tensor:
    """y [I, N, ...] of x [I, C, ...], with gradients for x, A, B, magnitude and bias.

    Args:
        x, bias: in the compute dtype; weight in any.
        lora_A, lora_B, magnitude, norm: as in `adapters/conv`; both or neither of the last two.
        scale: s.
        moves: how the kernels move.
        plain: by the formulas, whatever kernels there are.
        formula: the same from (x, A, B, magnitude, bias, weight, norm), made of PyTorch's parts.
    """
    stacked = not plain and stackable(x, weight, lora_A, lora_B, moves.groups)
    call = _Call(moves, scale, plain, formula, stacked)
    wrapped = torch._C._are_functorch_transforms_active()
    apply: Any = _OwnedConv.apply if wrapped else _apply
    y: Tensor = apply(x, lora_A, lora_B, magnitude, bias, weight, norm, call)
    return y

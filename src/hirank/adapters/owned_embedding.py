"""An embedding with one adapter, as one node of autograd on a GPU.

    forward     h = A[:, ids]^T,  y = g (W[ids] + s h B^T)
    backward    th = dy (s g B),  dA = th added up by id,  raw = dy^T h
                dB = s g raw,  dm = (sum(dy W[ids]) + s sum(B raw)) / norm

The frozen rows are looked up by PyTorch, which notices an id that is out of range.

Shapes     as in `adapters/embedding`; ids [...]; h, th [M, R]; raw [D, R].
Saves      ids and h: W[ids] is looked up again for dm.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels._compose import fits
from hirank.kernels._products import product
from hirank.kernels._triton import direct, interpreting
from hirank.kernels.conv_stack import finish
from hirank.kernels.dora_linear import Weights, activations, by_formula
from hirank.kernels.dora_norm import dora_gain
from hirank.kernels.embedding_rows import (
    MOST_SCATTERED,
    gather,
    join_rows,
    row_sums,
    scatter,
    stretched,
)

__all__ = ["ownable", "owned_embedding"]


def ownable(ids: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
    """Whether the kernels take these as they lie."""
    return (
        (interpreting() or (ids.is_cuda and direct(weight)))
        and fits(weight)
        and ids.numel() > 0
        and lora_A.shape[0] > 0
        and weight.is_contiguous()
        and lora_A.is_contiguous()
        and lora_B.is_contiguous()
    )


class _OwnedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        magnitude: Tensor | None,
        weight: Tensor,
        norm: Tensor | None,
        scale: float,
        padding: int | None,
    ) -> Tensor:
        y = F.embedding(ids, weight)
        flat = ids.reshape(-1).contiguous()
        h = gather(lora_A, flat, weight.dtype)
        join_rows(y.view(-1, y.shape[-1]), h, lora_B, magnitude, norm, scale)
        if True in ctx.needs_input_grad:
            ctx.save_for_backward(flat, h, None)
            ctx.weights = Weights(lora_A, lora_B, magnitude, None, weight, norm)
            ctx.versions = ctx.weights.versions()
            ctx.scale, ctx.padding = scale, padding
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        ids, h, _ = activations(ctx)
        needs, weights = ctx.needs_input_grad[1:4], ctx.weights
        dy = dys[0].reshape(-1, dys[0].shape[-1])
        if by_formula(dys[0]):  # rare
            found = _differentiable(weights, needs, ctx.scale, ctx.padding, ids, dy)
        else:
            found = _gradients(weights, needs, ctx.scale, ctx.padding, ids, h, dy.contiguous())
        return None, *found, None, None, None, None


# without the look for functorch's wrappers that PyTorch takes at every argument of every call
_apply: Any = super(torch.autograd.Function, _OwnedEmbedding).apply


def _gradients(
    weights: Weights,
    needs: Sequence[bool],
    scale: float,
    padding: int | None,
    ids: Tensor,
    h: Tensor,
    dy: Tensor,
) -> list[Tensor | None]:
    """Of A, B and magnitude."""
    need_A, need_B, need_m = needs
    A, B, magnitude, _, weight, norm = weights
    dA = dB = dm = None
    if need_A:
        th = torch.mm(dy, stretched(B, magnitude, norm, scale, dy.dtype))
        dA = _by_id(th, ids, A, padding)
    if need_B or need_m:
        raw = product(dy.t(), h, torch.float32)
        part = row_sums(dy, weight, ids) if need_m else None
        dm, dB = finish(part, raw[None], B, magnitude, norm, scale)
    return [dA, dB if need_B else None, dm]


def _by_id(th: Tensor, ids: Tensor, lora_A: Tensor, padding: int | None) -> Tensor:
    """dA [R, V]"""
    if ids.shape[0] <= MOST_SCATTERED:
        return scatter(th, ids, lora_A, padding)
    found: Tensor = torch.ops.aten.embedding_dense_backward(
        th.to(lora_A.dtype), ids, lora_A.shape[1], -1 if padding is None else padding, False
    )
    return found.t()


@torch.enable_grad()
def _differentiable(
    weights: Weights,
    needs: Sequence[bool],
    scale: float,
    padding: int | None,
    ids: Tensor,
    dy: Tensor,
) -> list[Tensor | None]:
    """Gradients of A, B and magnitude that can be differentiated again."""
    A, B, magnitude, _, weight, norm = weights
    hidden = F.embedding(ids, A.T, padding).to(weight.dtype)
    y = F.embedding(ids, weight) + scale * hidden @ B.to(weight.dtype).T
    if magnitude is not None and norm is not None:
        y = dora_gain(magnitude, norm).to(weight.dtype) * y
    wanted = [t for t, need in zip((A, B, magnitude), needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(found) if need else None for need in needs]


def owned_embedding(
    ids: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    *,
    scale: float,
    padding: int | None,
) -> Tensor:
    """y [..., D] of ids [...] in the dtype of the table, with gradients for A, B and magnitude.

    Args:
        ids: integers.
        weight, lora_A, lora_B, magnitude, norm: as in `adapters/embedding`; both or neither of the
            last two. `ownable` must have agreed.
        scale: s.
        padding: the id whose column of A gets no gradient.
    """
    wrapped = torch._C._are_functorch_transforms_active()
    apply: Any = _OwnedEmbedding.apply if wrapped else _apply
    y: Tensor = apply(ids, lora_A, lora_B, magnitude, weight, norm, scale, padding)
    return y

"""An adapted linear over a quantised base, and the norm of its weight.

    y = g (base(x) + s (x A^T) B^T) + (1 - g) b      as `kernels/dora_linear`, base by `dequantise`

The weight exists as floats for moments only. Forward: once if the layer's own forward wants floats,
or if the norm has to be computed, and then for both; else not at all. Backward: once, for dx. The
base output is overwritten by the layer's, nothing out-sized is saved but y (for dm).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.nn import functional as F

from hirank.adapters.dequantise import Packed, weight_of
from hirank.adapters.quantised_norms import QuantisedNorms
from hirank.adapters.survey import version
from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_linear import (
    GainPass,
    Weights,
    activations,
    by_formula,
    differentiable_grads,
    dora_linear_bwd_ref,
    dora_linear_fwd_ref,
    gain_pass_for,
    join_,
    low_rank,
)

__all__ = ["QuantisedAdapter", "composed_quantised", "forward_parts", "owned_quantised"]


class QuantisedAdapter(NamedTuple):
    """One adapter of one layer, as it stands at this call."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    scale: float
    dropout: torch.nn.Module | None  # None: not in play
    norms: QuantisedNorms | None  # None with plain LoRA
    single_gemm: bool = False  # dropout without a second base GEMM

    def norm(self, packed: Packed) -> Tensor | None:
        """||W + s B A|| per row; None with plain LoRA."""
        if self.norms is None:
            return None
        return self.norms.norm(packed, self.lora_A, self.lora_B, self.scale)


_AS_IT_IS = nullcontext()
# asked now: no call need ask again
_AUTOCAST = {kind: is_autocast_available(kind) for kind in ("cuda", "cpu", "xpu")}


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type  # the meta device knows no autocast
    available = _AUTOCAST.get(kind)
    if available is None:
        available = is_autocast_available(kind)
    is_on = available and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else _AS_IT_IS


class _Base:
    """The weight for a backward pass: made again then, from what was stored in the forward pass."""

    __slots__ = ("_dtype", "_kind", "_layer", "_marks")

    def __init__(self, packed: Packed) -> None:
        self._layer, self._kind, self._dtype = packed.layer, packed.kind, packed.dtype
        self._marks = self._scales()

    def _scales(self) -> list[tuple[Tensor, int]]:
        """What is new when a weight is quantised anew. Not the weight: FSDP gathers it again."""
        _, *scales = self._kind.stored(self._layer)
        kept = [t for t in scales if type(t) is Tensor or not isinstance(t, torch.nn.Parameter)]
        return [(tensor, version(tensor)) for tensor in kept]

    def weight(self) -> Tensor:
        """[N, K] in the dtype in which the forward pass computed."""
        now = self._scales()
        if len(now) != len(self._marks) or not all(
            a is b and at == then for (a, at), (b, then) in zip(now, self._marks, strict=True)
        ):
            raise RuntimeError(
                "The quantised weight of an adapted layer was replaced or modified by an inplace "
                "operation between its forward and its backward pass: merge, unmerge or load "
                "after backward."
            )
        return weight_of(self._kind, self._layer, self._dtype)


class _OwnedQuantised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        magnitude: Tensor | None,
        bias: Tensor | None,
        packed: Packed,
        norm: Tensor | None,
        scale: float,
        gain_pass: GainPass,
    ) -> Tensor:
        y, h = forward_parts(x, lora_A, lora_B, magnitude, bias, packed, norm, scale, gain_pass)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x, h, y if needs[3] else None)
        nothing = x.new_empty(0)  # the weight is made again in the backward pass
        ctx.weights = Weights(lora_A, lora_B, magnitude, bias, nothing, norm)
        ctx.versions = ctx.weights.versions()
        ctx.base = _Base(packed)
        ctx.scale, ctx.gain_pass = scale, gain_pass
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, h, y = activations(ctx)
        with _without_autocast(x):
            grads = _backward(ctx, dys[0], x, h, y)
        return *grads, None, None, None, None


# without the look for functorch's wrappers that PyTorch takes at every argument of every call
_apply: Any = super(torch.autograd.Function, _OwnedQuantised).apply


def _backward(ctx: Any, dy: Tensor, x: Tensor, h: Tensor, y: Tensor | None) -> Sequence[Any]:
    needs = ctx.needs_input_grad[:5]
    weights: Weights = ctx.weights._replace(weight=ctx.base.weight())
    if by_formula(dy):
        return differentiable_grads(weights, needs, ctx.scale, x, dy)
    dx, *grads = dora_linear_bwd_ref(
        dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), h,
        None if y is None else y.reshape(-1, y.shape[-1]), weights.weight, weights.lora_A,
        weights.lora_B, weights.magnitude, weights.norm, weights.bias, ctx.scale,
        needs=needs, gain_pass=ctx.gain_pass,
    )  # fmt: skip
    return None if dx is None else dx.view(x.shape), *grads


def forward_parts(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    packed: Packed,
    norm: Tensor | None,
    scale: float,
    gain_pass: GainPass,
) -> tuple[Tensor, Tensor]:
    """y [..., N] in the compute dtype and h [M, R] of a layer with one adapter, no gradient."""
    if not packed.multiplies_stored(x):
        operands = x, packed.weight(), lora_A, lora_B, magnitude, norm, bias, scale, gain_pass
        return dora_linear_fwd_ref(*operands)
    u = packed.output(x)
    A, B = lora_A.to(x.dtype), lora_B.to(x.dtype)
    h, B = low_rank(x.reshape(-1, x.shape[-1]), A, B, scale)
    return join_(u, h, B, magnitude, norm, bias, gain_pass), h


def owned_quantised(
    x: Tensor, packed: Packed, adapter: QuantisedAdapter, backend: str = "auto"
) -> Tensor:
    """The layer with one adapter: x [..., K] to [..., N] in the dtype of the layer's own output."""
    A, B, magnitude, scale, *_ = adapter
    norm, bias = adapter.norm(packed), packed.bias
    with _without_autocast(x):
        x = x.to(packed.dtype)
        bias = None if bias is None else bias.to(packed.dtype)
        gain_pass = gain_pass_for(backend, x, B.shape[0])
        operands = x, A, B, magnitude, bias, packed, norm, scale, gain_pass
        if torch.is_grad_enabled():
            wrapped = torch._C._are_functorch_transforms_active()
            apply: Any = _OwnedQuantised.apply if wrapped else _apply
            y: Tensor = apply(*operands)
        else:
            y = forward_parts(*operands)[0]
        return y.to(packed.out_dtype)


class _Frozen(torch.autograd.Function):
    """The base layer alone, with the gradient of x that its floats give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
        y = packed.output(x)
        ctx.base = _Base(packed)
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        need_x, need_bias, _ = ctx.needs_input_grad
        with _without_autocast(dys[0]):
            dx = dys[0] @ ctx.base.weight() if need_x else None
        return dx, dys[0].sum(0) if need_bias else None, None


def composed_quantised(
    x: Tensor, packed: Packed, adapters: Sequence[QuantisedAdapter], backend: str = "auto"
) -> Tensor:
    """The layer with any number of adapters, with or without dropout: [..., K] to [..., N].

    The clean input and what dropout left of it go through the base in one call, so that the weight
    is made once for all of them, in the forward and in the backward pass.
    """
    norms = [adapter.norm(packed) for adapter in adapters]
    with _without_autocast(x):
        bias = None if packed.bias is None else packed.bias.to(packed.dtype)
        rows = x.reshape(-1, x.shape[-1]).to(packed.dtype)
        inputs = [_dropped(rows, adapter) for adapter in adapters]
        again = [d for d, a in zip(inputs, adapters, strict=True) if _twice(a)]
        frozen: Tensor = _Frozen.apply(torch.cat([rows, *again]), bias, packed)  # type: ignore[no-untyped-call]
        y, *others = torch.split(frozen, rows.shape[0]) if again else (frozen,)
        for dropped, adapter, norm in zip(inputs, adapters, norms, strict=True):
            base = others.pop(0) if _twice(adapter) else None
            y = _add_adapter(y, dropped, base, bias, adapter, norm, backend)
        return y.view(*x.shape[:-1], y.shape[-1]).to(packed.out_dtype)


def _dropped(rows: Tensor, adapter: QuantisedAdapter) -> Tensor:
    if adapter.dropout is None:
        return rows
    found: Tensor = adapter.dropout(rows)
    return found


def _twice(adapter: QuantisedAdapter) -> bool:
    return not (adapter.magnitude is None or adapter.dropout is None or adapter.single_gemm)


def _add_adapter(
    y: Tensor,
    x: Tensor,
    base: Tensor | None,
    bias: Tensor | None,
    adapter: QuantisedAdapter,
    norm: Tensor | None,
    backend: str,
) -> Tensor:
    """`base`: the frozen output with bias for a dropped input, where that is apart from y."""
    A, B, magnitude, scale, *_ = adapter
    hidden = F.linear(x, A.to(x.dtype))  # [M, R]
    if base is not None and magnitude is not None and norm is not None:
        lora = F.linear(hidden, B.to(x.dtype))
        return dora_compose(
            base, lora, magnitude, norm, scale=scale, bias=bias, y=y, backend=backend
        )
    joined = torch.addmm(y, hidden, B.to(x.dtype).T, alpha=scale)
    if magnitude is None or norm is None:
        return joined
    return dora_compose(None, joined, magnitude, norm, scale=1, bias=bias, backend=backend)

"""Several adapters, or dropout, over a quantised base in one graph: what needs its layer is an op.

    frozen_quantised            the base layer alone
    frozen_quantised_backward   its gradient of x
    quantised_norm              the norm of one adapter; a copy, as the compiler may write into it

All else is traced, so that the compiler draws the dropout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.quantised import QuantisedAdapter, _add_adapter, _dropped, _twice
from hirank.adapters.traced_op import no_autocast, scaled_by
from hirank.adapters.traced_quantised import norm_now, packed_now
from hirank.kernels._ops import register_op

__all__ = ["traced_composed"]


def _run(rows: Tensor, handle: Tensor, bias: Tensor | None, n: int, training: bool) -> Tensor:
    """rows [M, K] in the compute dtype to [M, N]; `bias` is there for its gradient."""
    with torch.no_grad(), no_autocast(rows):
        return packed_now(handle, rows, training).output(rows)


def _like(rows: Tensor, handle: Tensor, bias: Tensor | None, n: int, training: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], n)


def _run_backward(dy: Tensor, handle: Tensor, k: int) -> Tensor:
    with torch.no_grad(), no_autocast(dy):
        return dy @ packed_now(handle, dy, True).weight()


def _like_backward(dy: Tensor, handle: Tensor, k: int) -> Tensor:
    return dy.new_empty(dy.shape[0], k)


_frozen = register_op(
    "frozen_quantised(Tensor rows, Tensor handle, Tensor? bias, int n, bool training) -> Tensor",
    reference=_run,
    fused=_run,
    fake=_like,
)
_frozen_backward = register_op(
    "frozen_quantised_backward(Tensor dy, Tensor handle, int k) -> Tensor",
    reference=_run_backward,
    fused=_run_backward,
    fake=_like_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, handle, *_ = inputs
    ctx.width = rows.shape[1]
    ctx.save_for_backward(handle)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    need_rows, _, need_bias, *_ = ctx.needs_input_grad
    dx = _frozen_backward(dy, ctx.saved_tensors[0], ctx.width) if need_rows else None
    return dx, None, dy.sum(0) if need_bias else None, None, None


torch.library.register_autograd("hirank::frozen_quantised", _backward, setup_context=_save)


def _run_norm(
    handle: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    live: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    training: bool,
) -> Tensor:
    packed = packed_now(handle, lora_A.new_empty(0, lora_A.shape[1], dtype=dtype), training)
    now = scale if live is None else live.item()
    return norm_now(handle, packed, lora_A, lora_B, now, training).clone()


def _like_norm(
    handle: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    live: Tensor | None,
    scale: float,
    dtype: Any,
    training: bool,
) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return lora_B.new_empty(lora_B.shape[0], dtype=wide)


_norm = register_op(
    "quantised_norm(Tensor handle, Tensor lora_A, Tensor lora_B, Tensor? live, float scale,"
    " ScalarType dtype, bool training) -> Tensor",
    reference=_run_norm,
    fused=_run_norm,
    fake=_like_norm,
)
torch.library.register_autograd("hirank::quantised_norm", lambda ctx, dnorm: (None,) * 7)


def traced_composed(
    handle: Tensor,
    x: Tensor,
    adapters: Sequence[QuantisedAdapter],
    lives: Sequence[Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
    backend: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """As `composed_quantised`: x [..., K] to [..., N] in `out_dtype`, computed in `dtype`.

    `lives`: the scale of each adapter where it is no constant of the graph, as in `traced_linear`.
    """
    n = adapters[0].lora_B.shape[0]
    with torch.autocast(x.device.type, enabled=False):
        narrow = None if bias is None else bias.to(dtype)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        inputs = [_dropped(rows, adapter) for adapter in adapters]
        again = [d for d, a in zip(inputs, adapters, strict=True) if _twice(a)]
        everything = torch.cat([rows, *again]) if again else rows
        frozen = _frozen(everything, handle, narrow, n, torch.is_grad_enabled())
        others = list(torch.split(frozen, rows.shape[0])) if again else [frozen]
        y = others.pop(0)
        for dropped, adapter, live in zip(inputs, adapters, lives, strict=True):
            base = others.pop(0) if _twice(adapter) else None
            norm = _norm_of(handle, adapter, live, dtype)
            y = _add_adapter(y, dropped, base, narrow, _scaled(adapter, live), norm, backend)
        return y.view(*x.shape[:-1], n).to(out_dtype or x.dtype)


def _norm_of(
    handle: Tensor, adapter: QuantisedAdapter, live: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    A, B, magnitude, scale, *_ = adapter
    if magnitude is None:
        return None
    training = torch.is_grad_enabled()
    found: Tensor = _norm(handle, A.detach(), B.detach(), live, scale, dtype, training)
    return found


def _scaled(adapter: QuantisedAdapter, live: Tensor | None) -> QuantisedAdapter:
    if live is None:
        return adapter
    return adapter._replace(lora_B=scaled_by(adapter.lora_B, live), scale=1.0)

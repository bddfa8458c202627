"""The layers as `torch.compile` sees them: one opaque op for a whole layer.

Nothing about steps, caches or addresses enters a graph. An op is given the weights, looks for the
cache that watches them when it runs, and so follows every change as uncompiled code does. Nor does
a graph know one layer from another: blocks that are alike share it.

    adapted_linear            the layer with one adapter; saves what `dora_linear` saves
    adapted_linear_backward   its gradients
    adapter_norm              the norm alone, for layers joined by `dora_compose`. A copy, as the
                              compiler may write into what an op returned
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.gain import norm_of
from hirank.kernels._backend import FUSED, REFERENCE, GainPass
from hirank.kernels._ops import register_op
from hirank.kernels._tuning import pays
from hirank.kernels.dora_linear import (
    dora_linear_bwd_ref,
    dora_linear_fwd_ref,
    owned_linear,
)

__all__ = ["TracedNorms", "traced_linear"]


def _run(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float,
    training: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """y [..., N], and h [M, R] in training; x is in the compute dtype, the weights as they lie."""
    norm = None if magnitude is None else norm_of(weight, lora_A, lora_B, scale, x.dtype)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    operands = x, weight, lora_A, lora_B, magnitude, norm, bias, scale
    with torch.no_grad():
        if not training:
            return owned_linear(*operands, backend), x.new_empty(0)
        return dora_linear_fwd_ref(*operands, _pass(backend, x, weight))


def _pass(backend: str, x: Tensor, weight: Tensor) -> GainPass:
    """As `dora_linear` chooses it in training; an op runs without gradients."""
    elements = x.numel() // max(x.shape[-1], 1) * weight.shape[0]
    fused = pays(elements, x.device, True) if backend == "auto" else backend == "triton"
    return FUSED if fused else REFERENCE


def _like(x: Tensor, weight: Tensor, lora_A: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    y, training = x.new_empty(*x.shape[:-1], weight.shape[0]), rest[-2]
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return y, x.new_empty(rows, lora_A.shape[0]) if training else x.new_empty(0)


def _run_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, A, B, magnitude and bias; empty where none is needed."""
    norm = None if magnitude is None else norm_of(weight, lora_A, lora_B, scale, x.dtype)
    weight, narrow = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    with torch.no_grad():
        grads = dora_linear_bwd_ref(
            dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), h,
            None if y is None else y.reshape(-1, y.shape[-1]), weight, lora_A, lora_B, magnitude,
            norm, narrow, scale, needs, _pass(backend, x, weight),
        )  # fmt: skip
    dx = x.new_empty(0) if grads.x is None else grads.x.view(x.shape)
    dA, dB, dm = (x.new_empty(0) if grad is None else grad for grad in grads[1:4])
    db = x.new_empty(0) if grads.bias is None or bias is None else grads.bias.to(bias.dtype)
    return dx, dA, dB, dm, db


def _like_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    inputs = (x, lora_A, lora_B, magnitude, bias)
    return tuple(
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _run_norm(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    return norm_of(weight, lora_A, lora_B, scale, dtype).clone()


def _like_norm(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: Any) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.new_empty(weight.shape[0], dtype=wide)


_linear = register_op(
    "adapted_linear(Tensor x, Tensor weight, Tensor lora_A, Tensor lora_B, Tensor? magnitude,"
    " Tensor? bias, float scale, bool training, str backend) -> (Tensor, Tensor)",
    reference=_run,
    fused=_run,
    fake=_like,
)
_linear_backward = register_op(
    "adapted_linear_backward(Tensor dy, Tensor x, Tensor h, Tensor? y, Tensor weight,"
    " Tensor lora_A, Tensor lora_B, Tensor? magnitude, Tensor? bias, float scale, bool[] needs,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_run_backward,
    fused=_run_backward,
    fake=_like_backward,
)
_norm = register_op(
    "adapter_norm(Tensor weight, Tensor lora_A, Tensor lora_B, float scale, ScalarType dtype)"
    " -> Tensor",
    reference=_run_norm,
    fused=_run_norm,
    fake=_like_norm,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, lora_A, lora_B, magnitude, bias, ctx.scale, _, ctx.backend = inputs
    y, h = output
    ctx.mark_non_differentiable(h)
    saved = (x, h, y if ctx.needs_input_grad[4] else None, weight, lora_A, lora_B, magnitude, bias)
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, h, y, weight, lora_A, lora_B, magnitude, bias = ctx.saved_tensors
    given = (x, lora_A, lora_B, magnitude, bias)
    places = (0, 2, 3, 4, 5)
    needs = [bool(ctx.needs_input_grad[i]) for i in places]
    found = _linear_backward(
        dy, x, h, y, weight, lora_A, lora_B, magnitude, bias, ctx.scale, needs, ctx.backend
    )
    dx, dA, dB, dm, db = (
        grad if need and t is not None else None
        for grad, need, t in zip(found, needs, given, strict=True)
    )
    return dx, None, dA, dB, dm, db, None, None, None


torch.library.register_autograd("hirank::adapted_linear", _backward, setup_context=_save)
torch.library.register_autograd("hirank::adapter_norm", lambda ctx, dnorm: (None,) * 5)


# asked now: torch 2.11 cannot trace the question
_AUTOCAST = [kind for kind in ("cuda", "cpu", "xpu") if torch.amp.is_autocast_available(kind)]


class TracedNorms:
    """Stands in for a `NormCache` while a layer is traced."""

    def norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """As `NormCache.norm`."""
        found: Tensor = _norm(weight.detach(), lora_A.detach(), lora_B.detach(), scale, dtype)
        return found


def traced_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    """`dora_linear` as one op, its norm found by the weights. x [..., K] to [..., N]

    Raises:
        ValueError: the last dimension of x is not K, or the dtypes differ outside autocast.
    """
    kind = x.device.type
    autocast = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    dtype = weight.dtype
    if autocast and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"got x {tuple(x.shape)}: it must end in {weight.shape[1]}.")
    if x.dtype != dtype and not autocast:
        raise ValueError(
            f"got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, or run under "
            "autocast."
        )
    training = torch.is_grad_enabled()
    x = x.to(dtype)
    y: Tensor = _linear(x, weight, lora_A, lora_B, magnitude, bias, scale, training, backend)[0]
    return y

"""The layers as `torch.compile` sees them: one opaque op for a whole layer.

Nothing about steps, caches or addresses enters a graph. An op is given the weights, looks for the
cache that watches them when it runs, and so follows every change as uncompiled code does. Nor does
a graph know one layer from another: blocks that are alike share it.

    adapted_linear   the layer with one adapter, see `adapters/traced_op`
    adapter_norm     the norm alone, for layers joined by `dora_compose`. A copy, as the compiler
                     may write into what an op returned
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.gain import norm_of
from hirank.adapters.layers import Adapter
from hirank.adapters.traced_op import Operands, called, register_layer, scaled_by
from hirank.kernels._ops import register_op
from hirank.kernels.dora_linear import (
    dora_linear_bwd_ref,
    dora_linear_fwd_ref,
    owned_linear,
)

__all__ = ["TracedNorms", "autocast_dtype", "traced_linear", "with_live_scale"]


def _norm(given: Operands) -> Tensor | None:
    x, weight, A, B, magnitude, _, scale, _ = given
    return None if magnitude is None else norm_of(weight, A, B, scale, x.dtype)


def _run(given: Operands, training: bool) -> tuple[Tensor, Tensor]:
    """The weight comes as it lies, as the norm is found by its address."""
    x, weight, A, B, magnitude, bias, scale, backend = given
    operands = x, weight.to(x.dtype), A, B, magnitude, _norm(given), bias, scale
    if not training:
        return owned_linear(*operands, backend), x
    return dora_linear_fwd_ref(*operands, given.gain_pass(training))


def _run_backward(
    given: Operands, dy: Tensor, h: Tensor, y: Tensor | None, needs: Sequence[bool]
) -> Sequence[Any]:
    x, weight, A, B, magnitude, bias, scale, _ = given
    operands = weight.to(x.dtype), A, B, magnitude, _norm(given), bias, scale
    return dora_linear_bwd_ref(dy, x, h, y, *operands, needs, given.gain_pass(True))


_linear = register_layer("adapted_linear", _run, _run_backward)


def _run_norm(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    live: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    now = scale if live is None else live.item()
    return norm_of(weight, lora_A, lora_B, now, dtype).clone()


def _like_norm(weight: Tensor, *rest: Any) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.new_empty(weight.shape[0], dtype=wide)


_norm_alone = register_op(
    "adapter_norm(Tensor weight, Tensor lora_A, Tensor lora_B, Tensor? live, float scale,"
    " ScalarType dtype) -> Tensor",
    reference=_run_norm,
    fused=_run_norm,
    fake=_like_norm,
)
torch.library.register_autograd("hirank::adapter_norm", lambda ctx, dnorm: (None,) * 6)


class TracedNorms:
    """Stands in for a `NormCache` while a layer is traced.

    With a scale that is no constant, `lora_B` as it lies: what `norm` is given has it in it.
    """

    def __init__(self, lora_B: Tensor | None = None, live: Tensor | None = None) -> None:
        self._lora_B, self._live = lora_B, live

    def norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """As `NormCache.norm`."""
        B = (lora_B if self._lora_B is None else self._lora_B).detach()
        found: Tensor = _norm_alone(weight.detach(), lora_A.detach(), B, self._live, scale, dtype)
        return found


def with_live_scale(adapter: Adapter, live: Tensor) -> Adapter:
    """The adapter with a scale of 1, its own, which is no constant of the graph, taken into B."""
    norms = None if adapter.norms is None else TracedNorms(adapter.lora_B, live)
    return adapter._replace(lora_B=scaled_by(adapter.lora_B, live), scale=1.0, norms=norms)


# asked now: torch 2.11 cannot trace the question
_AUTOCAST = [kind for kind in ("cuda", "cpu", "xpu") if torch.amp.is_autocast_available(kind)]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of x; None where it is off."""
    kind = x.device.type
    on = kind in _AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def traced_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    backend: str,
) -> Tensor:
    """`dora_linear` as one op, its norm found by the weights. x [..., K] to [..., N]

    `scale` is a constant of the graph, or a 0-d fp64 tensor on the CPU, which is none.

    Raises:
        ValueError: the last dimension of x is not K, or the dtypes differ outside autocast.
    """
    wanted, dtype = autocast_dtype(x), weight.dtype
    if wanted is not None and x.dtype != torch.float64:
        dtype = wanted
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"got x {tuple(x.shape)}: it must end in {weight.shape[1]}.")
    if x.dtype != dtype and wanted is None:
        raise ValueError(
            f"got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, or run under "
            "autocast."
        )
    bias = None if bias is None else bias.to(dtype)
    tensors = x.to(dtype), weight, lora_A, lora_B, magnitude, bias
    return called(_linear, tensors, scale, backend)

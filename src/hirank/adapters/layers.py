"""What an adapted linear layer computes, apart from any framework's bookkeeping.

Two ways, the same meaning:

    owned       one adapter, no dropout in play: `dora_linear` computes the whole layer
    composed    dropout or several adapters: the base layer runs, every adapter adds to it in turn

Adapters stack as in PEFT (0.21 and newer):

    y_k = g_k (y_{k-1} + s_k B_k A_k x)        g_k from the base weight alone

and dropout touches the adapter's branch only, the frozen output keeps the clean input:

    y = W x + (g - 1) W d(x) + g s B A d(x)    (original DoRA; costs a second base GEMM)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.adapters.gain import NormCache
from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_linear import compute_dtype, dora_linear
from hirank.kernels.dora_norm import dora_gain

__all__ = ["Adapter", "composed_forward", "owned_forward"]


class Adapter(NamedTuple):
    """One adapter of one layer, as it stands at this call."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    scale: float
    dropout: nn.Module | None  # None: not in play
    norms: NormCache | None  # None with plain LoRA


def _norm(adapter: Adapter, weight: Tensor, dtype: torch.dtype) -> Tensor:
    assert adapter.norms is not None
    return adapter.norms.norm(weight, adapter.lora_A, adapter.lora_B, adapter.scale, dtype)


def owned_forward(x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter) -> Tensor:
    """The layer with one adapter: x [..., K] to [..., N] in the dtype a plain linear would give."""
    norm = None
    if adapter.magnitude is not None:
        norm = _norm(adapter, weight, compute_dtype(x, weight))
    return dora_linear(
        x,
        weight,
        adapter.lora_A,
        adapter.lora_B,
        scale=adapter.scale,
        magnitude=adapter.magnitude,
        norm=norm,
        bias=bias,
    )


def composed_forward(
    x: Tensor,
    base: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Adapter],
) -> Tensor:
    """The layer with any number of adapters, with or without dropout. [..., K] to [..., N]"""
    y = base(x)
    for adapter in adapters:
        y = _add_adapter(y, x, weight, bias, adapter)
    return y


def _add_adapter(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter
) -> Tensor:
    dtype = y.dtype
    dropped = x if adapter.dropout is None else adapter.dropout(x)
    hidden = F.linear(dropped.to(dtype), adapter.lora_A.to(dtype))
    lora = F.linear(hidden, adapter.lora_B.to(dtype))
    if adapter.magnitude is None:
        return torch.add(y, lora, alpha=adapter.scale)
    if adapter.dropout is not None:
        frozen = F.linear(dropped.to(dtype), weight.to(dtype))
    else:
        frozen = y if bias is None else y - bias.to(dtype)
    gain = dora_gain(adapter.magnitude, _norm(adapter, weight, dtype))
    return y + dora_compose(frozen, lora, gain, scale=adapter.scale)

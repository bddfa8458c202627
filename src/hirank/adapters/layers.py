"""What an adapted linear layer computes, apart from any framework's bookkeeping.

Two ways, the same meaning:

    owned       one adapter, no dropout in play: `dora_linear` computes the whole layer
    composed    dropout or several adapters: the base layer runs, every adapter adds to it in turn

Adapters stack as in PEFT (0.21 and newer):

    y_k = g_k (y_{k-1} + s_k B_k A_k x)        g_k from the base weight alone

and dropout d touches the adapter's branch only, the frozen output keeps the clean input. There are
two ways to mean that with DoRA, and both have the output without dropout as their mean:

    y = W x + (g - 1) W d(x) + g s B A d(x)    as PEFT does; costs a second base GEMM
    y = g (W x + s B A d(x))                   `single_gemm`: as LoRA does, then stretched
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_linear import compute_dtype, fitted, owned_linear

__all__ = ["Adapter", "Norms", "composed_forward", "owned_forward"]


class Norms(Protocol):
    """Where the row norm comes from: a `NormCache`, or what stands in for one."""

    def norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """||W + s B A|| per row, [N] fp32, for A and B as cast to `dtype`."""


class Adapter(NamedTuple):
    """One adapter of one layer, as it stands at this call."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    scale: float
    dropout: nn.Module | None  # None: not in play
    norms: Norms | None  # None with plain LoRA
    single_gemm: bool = False  # dropout without a second base GEMM


def _norm(adapter: Adapter, weight: Tensor, dtype: torch.dtype) -> Tensor:
    assert adapter.norms is not None
    return adapter.norms.norm(weight, adapter.lora_A, adapter.lora_B, adapter.scale, dtype)


def owned_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter, backend: str = "auto"
) -> Tensor:
    """The layer with one adapter: x [..., K] to [..., N] in the dtype a plain linear would give.

    The hot path: the adapter is known to fit the weight, so that only x is looked at.
    """
    dtype = compute_dtype(x, weight)
    A, B, magnitude, scale = adapter[:4]
    norms: Any = adapter.norms  # a `NormCache`: this way is for layers as they are, not for a trace
    norm, casts = (None, None) if norms is None else norms.at_hand(weight, A, B, scale, dtype)
    if x.dtype != dtype or weight.dtype != dtype or x.shape[-1] != weight.shape[1]:
        x, weight = fitted(x, weight, A, B)
    return owned_linear(x, weight, A, B, magnitude, norm, bias, scale, backend, casts)


def composed_forward(
    x: Tensor,
    base: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Adapter],
    backend: str = "auto",
) -> Tensor:
    """The layer with any number of adapters, with or without dropout. [..., K] to [..., N]

    Args:
        x: [..., K], any number of leading dimensions.
        base: the frozen layer, [M, K] to a new [M, N] that nobody else holds: it is overwritten.
        weight, bias: those of `base`, [N, K] and [N] or None.
        adapters: in the order in which they stack.
        backend: as in `dora_compose`.
    """
    y = base(x.reshape(-1, x.shape[-1]))
    for adapter in adapters:
        y = _add_adapter(y, x, weight, bias, adapter, backend)
    return y.view(*x.shape[:-1], y.shape[-1])


def _add_adapter(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, adapter: Adapter, backend: str
) -> Tensor:
    A, B, magnitude, scale, dropout, _, single_gemm = adapter
    dtype = y.dtype
    dropped = (x if dropout is None else dropout(x)).reshape(-1, x.shape[-1]).to(dtype)  # [M, K]
    hidden = F.linear(dropped, A.to(dtype))  # [M, R]
    if magnitude is not None and dropout is not None and not single_gemm:
        frozen, lora = F.linear(dropped, weight.to(dtype)), F.linear(hidden, B.to(dtype))
        norm = _norm(adapter, weight, dtype)
        return dora_compose(frozen, lora, magnitude, norm, scale=scale, y=y, backend=backend)
    joined = y.addmm_(hidden, B.to(dtype).T, alpha=scale)  # added inside the GEMM
    if magnitude is None:
        return joined
    bias, norm = None if bias is None else bias.to(dtype), _norm(adapter, weight, dtype)
    return dora_compose(None, joined, magnitude, norm, scale=1, bias=bias, backend=backend)

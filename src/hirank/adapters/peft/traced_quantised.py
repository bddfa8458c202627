"""A compiled call of a layer over a quantised base, as ops that a graph can hold.

What is looked at here becomes a guard. So nothing is asked that the first call changes, as that of
bitsandbytes' 8 bits moves its row scales: the op asks for it when it runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.adapters.dequantise import Kind
from hirank.adapters.four_bits import sharded
from hirank.adapters.peft.operands import dropout_of
from hirank.adapters.peft.quantised_route import (
    adapter_obstacle,
    hooked,
    known_kind,
    quantised_present,
)
from hirank.adapters.peft.traced_route import Unscaled, is_on
from hirank.adapters.quantised import QuantisedAdapter
from hirank.adapters.traced import autocast_dtype
from hirank.adapters.traced_composed import traced_composed
from hirank.adapters.traced_handles import live_scale, reads_scales
from hirank.adapters.traced_quantised import traced_quantised

__all__ = ["in_one_graph"]


class _Sight(NamedTuple):
    """What a graph may know of one kind of base."""

    fits: Callable[[Any, Kind], bool]
    """Whether the op serves this very layer, as far as it never changes."""
    holder: Callable[[Any], Tensor]
    """A tensor on the device of the weight."""
    dtypes: Callable[[Any, Tensor], tuple[torch.dtype | None, torch.dtype | None]]
    """As `Kind.dtypes`; None where that is only known once the layer was called."""


def _fits_8bit(base: Any, kind: Kind) -> bool:
    shape = base.out_features, base.in_features
    whole = not sharded(base.weight) and tuple(base.weight.shape) == shape
    return whole and base.weight.dtype == torch.int8 and not base.state.has_fp16_weights


def _dtypes_hqq(base: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    dtype = autocast_dtype(x) or base.compute_dtype
    return dtype, dtype


def _unobstructed(base: Any, kind: Kind) -> bool:
    return kind.obstacle(base) is None


_SIGHTS = {
    "Linear4bit": _Sight(
        _unobstructed, lambda base: base.weight, lambda base, x: (base.compute_dtype, x.dtype)
    ),
    "Linear8bitLt": _Sight(
        _fits_8bit, lambda base: base.weight, lambda base, x: (x.dtype, x.dtype)
    ),
    "HQQLinear": _Sight(_unobstructed, lambda base: base.W_q, _dtypes_hqq),
    "a torchao weight": _Sight(
        _unobstructed, lambda base: base.weight, lambda base, x: (x.dtype, x.dtype)
    ),
}


def in_one_graph(layer: Any, x: Tensor) -> Tensor | None:
    """The call as ops; None: it is of a kind without them, or of none that hirank computes."""
    kind, base, names = known_kind(layer), layer.base_layer, quantised_present(layer)
    sight, reads = _SIGHTS.get(kind.name), reads_scales(layer, x.is_cuda)
    if sight is None or not is_on(layer) or not any(name in layer.lora_variant for name in names):
        return None
    dtype, out_dtype = sight.dtypes(base, x)
    if dtype is None or hooked(base) or not sight.fits(base, kind):
        return None
    device = sight.holder(base).device
    if any(_obstacle(layer, name, device, reads) is not None for name in names):
        return None
    backend = layer._hirank_options.backend
    if len(names) > 1 or dropout_of(layer, names[0]) is not None:
        reads = reads and dtype != torch.float16  # where s B might overflow
        adapters = [_adapter(layer, name, reads) for name in names]
        lives = [live_scale(layer, name) if reads else None for name in names]
        return traced_composed(
            layer._hirank_handle, x, adapters, lives, base.bias, dtype, backend, out_dtype
        )
    A, B, magnitude, scale, *_ = _adapter(layer, names[0], reads)
    now = live_scale(layer, names[0]) if reads else scale
    operands = layer._hirank_handle, x, A, B, magnitude, base.bias, now
    return traced_quantised(*operands, dtype, backend, out_dtype)


def _obstacle(layer: Any, name: str, device: torch.device, reads: bool) -> str | None:
    return adapter_obstacle(Unscaled(layer, name) if reads else layer, name, device)


def _adapter(layer: Any, name: str, reads: bool) -> QuantisedAdapter:
    """`reads`: with a scale of 1, and no look at its own."""
    dora = name in layer.lora_variant
    return QuantisedAdapter(
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.lora_magnitude_vector[name].weight if dora else None,
        1.0 if reads else layer.scaling[name],
        dropout_of(layer, name),
        None,
        layer._hirank_options.single_gemm,
    )

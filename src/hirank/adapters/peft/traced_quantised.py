"""A compiled call of a layer over a quantised base, as one op that a graph can hold.

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
from hirank.adapters.peft.quantised_route import adapter_obstacle, hooked, known_kind
from hirank.adapters.peft.traced_route import Unscaled, is_on
from hirank.adapters.traced import autocast_dtype
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
    """The call as one op; None: it is of a kind without one, so that it has to leave the graph."""
    kind, base = known_kind(layer), layer.base_layer
    sight, name = _SIGHTS.get(kind.name), _only(layer)
    if sight is None or name is None or layer._hirank_handle is None:
        return None
    dtype, out_dtype = sight.dtypes(base, x)
    if dtype is None or hooked(base) or not sight.fits(base, kind):
        return None
    reads = reads_scales(layer, x.is_cuda)
    looked = Unscaled(layer, name) if reads else layer
    if adapter_obstacle(looked, name, sight.holder(base).device) is not None:
        return None
    scale = live_scale(layer, name) if reads else layer.scaling[name]
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    return traced_quantised(
        layer._hirank_handle, x, A, B, layer.lora_magnitude_vector[name].weight, base.bias, scale,
        dtype, layer._hirank_options.backend, out_dtype,
    )  # fmt: skip


def _only(layer: Any) -> str | None:
    """The adapter of this call, if it is one with DoRA and without dropout."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if not is_on(layer) or len(names) != 1 or names[0] not in layer.lora_variant:
        return None
    return names[0] if dropout_of(layer, names[0]) is None else None

"""Merging into a quantised base, which is PEFT's work, and the way back, which is exact.

PEFT makes the weight into floats, adds the adapter and quantises again; to unmerge, it takes the
adapter off and quantises a third time. Here the stored weight is kept meanwhile and put back to the
bit, so a merged layer takes it twice.

Before PEFT reads it, a weight that bitsandbytes laid out anew for a CPU is laid back: PEFT would
read it in the wrong order.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from hirank.adapters.four_bits import is_packed, unpacked_4bit

__all__ = ["Stored", "keep", "lay_back", "put_back", "renew_bias"]


class Stored(NamedTuple):
    """All that PEFT's merge may replace or write to."""

    base: nn.Module  # HQQ's is replaced as a whole
    weight: nn.Parameter | None
    bias: Tensor | None  # its data
    attributes: dict[str, Any]  # those that bitsandbytes keeps with its weights
    state: dict[str, Any]  # the moved parts of an 8-bit weight


def keep(layer: Any) -> Stored:
    """The base of a LoRA layer as it is, by reference."""
    base = layer.base_layer
    weight, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    weight = weight if isinstance(weight, nn.Parameter) else None  # HQQ's property makes floats
    attributes = {} if weight is None or not _by_bitsandbytes(base) else dict(vars(weight))
    state = dict(vars(base.state)) if hasattr(base, "state") else {}
    return Stored(base, weight, None if bias is None else bias.data, attributes, state)


def put_back(layer: Any, stored: Stored) -> None:
    """Undo whatever was merged since `keep`."""
    base: Any = stored.base
    layer.base_layer = base
    if stored.weight is not None:
        if stored.attributes:
            vars(stored.weight).clear()
            vars(stored.weight).update(stored.attributes)
        if "quant_state" in stored.attributes:
            base.quant_state = stored.attributes["quant_state"]
        base.weight = stored.weight
    if stored.state:
        vars(base.state).update(stored.state)
    if stored.bias is not None:
        base.bias.data = stored.bias
    for name in layer.merged_adapters:  # kept by PEFT to unmerge with
        layer._caches.pop(f"{name}-weight_norm", None)
    layer.merged_adapters.clear()


def lay_back(base: Any) -> None:
    """A 4-bit weight in the order in which it was quantised."""
    if _by_bitsandbytes(base) and hasattr(base, "quant_state") and is_packed(base):
        base.weight.data, base.weight.quant_state = unpacked_4bit(base)
        base.quant_state = base.weight.quant_state


def renew_bias(layer: Any, stored: Stored) -> None:
    """HQQ's new layer has lost it."""
    base = layer.base_layer
    if base is not stored.base and getattr(base, "bias", None) is None:
        base.bias = getattr(stored.base, "bias", None)


def _by_bitsandbytes(base: nn.Module) -> bool:
    return type(base).__module__.startswith("bitsandbytes.")

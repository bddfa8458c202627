"""Which way a call goes that is being compiled: as `route`, and no value of a scale is looked at.

A value that is looked at becomes a guard, and a new one compiles anew.
"""

from typing import Any

from hirank.adapters.peft.operands import dropout_of, present
from hirank.adapters.peft.route import adapter_obstacle, base_obstacle

__all__ = ["Unscaled", "is_on", "traced_tier"]


class Unscaled:
    """One adapter of a linear as those look at it who ask what stands in its way."""

    def __init__(self, layer: Any, name: str) -> None:
        self.base_layer = layer.base_layer
        self.lora_A, self.lora_B, self.lora_bias = layer.lora_A, layer.lora_B, layer.lora_bias
        self.lora_dropout, self.lora_variant = layer.lora_dropout, layer.lora_variant
        self.lora_magnitude_vector = layer.lora_magnitude_vector
        self.scaling = {name: 1.0}


def is_on(layer: Any) -> bool:
    """Whether a layer adds to its base at all."""
    return not layer.disable_adapters and not layer.merged


def traced_tier(layer: Any) -> str:
    """The tier of the next plain call of a linear: owned, composed or peft."""
    names = present(layer)
    if not is_on(layer) or not names or base_obstacle(layer) is not None:
        return "peft"
    if any(adapter_obstacle(Unscaled(layer, name), name) is not None for name in names):
        return "peft"
    dropped = any(dropout_of(layer, name) is not None for name in names)
    return "composed" if dropped or len(names) > 1 else "owned"

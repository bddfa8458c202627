"""Which way a call goes that is being compiled: as `route`, and no value of a scale is looked at.

A value that is looked at becomes a guard, and a new one compiles anew. That a scale is a tensor (as
PEFT's hot-swap makes it) goes unnoticed here; its value is read all the same.
"""

from typing import Any

from hirank.adapters.peft.operands import dropout_of, present
from hirank.adapters.peft.route import adapter_obstacle, base_obstacle

__all__ = ["traced_tier"]


class _Unscaled:
    """One adapter of a linear as `adapter_obstacle` looks at it."""

    def __init__(self, layer: Any, name: str) -> None:
        self.base_layer = layer.base_layer
        self.lora_A, self.lora_B, self.lora_bias = layer.lora_A, layer.lora_B, layer.lora_bias
        self.lora_dropout, self.lora_variant = layer.lora_dropout, layer.lora_variant
        self.lora_magnitude_vector = layer.lora_magnitude_vector
        self.scaling = {name: 1.0}


def traced_tier(layer: Any) -> str:
    """The tier of the next plain call of a linear: owned, composed or peft."""
    names = present(layer)
    if layer.disable_adapters or layer.merged or not names or base_obstacle(layer) is not None:
        return "peft"
    if any(adapter_obstacle(_Unscaled(layer, name), name) is not None for name in names):
        return "peft"
    dropped = any(dropout_of(layer, name) is not None for name in names)
    return "composed" if dropped or len(names) > 1 else "owned"

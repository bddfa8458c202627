"""What single trainers do to PEFT's layers that would keep hirank from computing them."""

from typing import Any

from torch import nn

__all__ = ["unwrap"]

# ms-swift hangs this over the forward of lora_A and lora_B. It moves the input to the weight's
# device, which changes nothing where the whole layer lies on one device.
_KEEP_DEVICE = ("swift.tuners.peft", "keep_device_forward")


def unwrap(layer: Any) -> None:
    """Take wrappers off lora_A and lora_B of a LoRA layer that change nothing there."""
    base = layer.get_base_layer()
    device = getattr(getattr(base, "weight", None), "device", None)
    for part in [*layer.lora_A.values(), *layer.lora_B.values()]:
        if _wrapper(part) == _KEEP_DEVICE and part.weight.device == device:
            del part.forward


def _wrapper(part: nn.Module) -> tuple[str, str] | None:
    function = getattr(part.__dict__.get("forward"), "__func__", None)
    return None if function is None else (function.__module__, function.__name__)

"""Which way a layer's next plain call goes: owned, composed or PEFT's own, and why."""

from typing import Any

import torch
from peft.tuners.lora import variants as peft_variants
from torch import Tensor, nn

from hirank.adapters.explain import Route

__all__ = ["Known", "adapter_obstacle", "base_obstacle", "plain_tensor", "present", "route"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def present(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # offloading replaces the bound method
    )


def plain_tensor(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is nn.Parameter or kind is Tensor) and not hasattr(tensor, "ds_id")


def base_obstacle(layer: Any) -> str | None:
    base = layer.base_layer
    if type(base) is not nn.Linear:
        return f"the base layer is {type(base).__name__}, not nn.Linear"
    if _hooked(base):
        return "the base layer has hooks"
    if not plain_tensor(base.weight) or base.weight.dtype not in _FLOATS:
        return "the base weight is sharded or quantised"
    if base.weight.requires_grad:
        return "the base weight is trainable"
    return None


def adapter_obstacle(layer: Any, name: str) -> str | None:
    variant = layer.lora_variant.get(name)
    if variant is not None and type(variant) is not peft_variants.DoraLinearVariant:
        return f"adapter {name!r} is of kind {type(variant).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own (lora_bias)"
    if isinstance(layer.scaling[name], Tensor):
        return f"the scaling of adapter {name!r} is a tensor"
    A, B = layer.lora_A[name], layer.lora_B[name]
    modules = [A, B, *([layer.lora_magnitude_vector[name]] if variant is not None else [])]
    if type(A) is not nn.Linear or type(B) is not nn.Linear or any(map(_hooked, modules)):
        return f"lora_A or lora_B of adapter {name!r} is not a plain module without hooks"
    if not all(plain_tensor(module.weight) for module in modules):
        return f"adapter {name!r} is sharded"
    if any(module.weight.device != layer.base_layer.weight.device for module in modules):
        return f"adapter {name!r} and the base weight are on different devices"
    return None


class Known:
    """The route of a layer and what it rests on, so that the next call need not ask again."""

    __slots__ = ("active", "base", "modules", "names", "scales", "tier", "training")

    def __init__(self, layer: Any) -> None:
        self.tier = route(layer).tier
        self.names = present(layer)
        self.active = layer.active_adapters[:]
        self.training = layer.training
        self.base = layer.base_layer
        self.scales = [layer.scaling[name] for name in self.names]
        self.modules = [self.base, *self._parts(layer)]

    def _parts(self, layer: Any) -> list[nn.Module]:
        own = layer._modules
        lists = [own["lora_A"], own["lora_B"], own["lora_magnitude_vector"], own["lora_dropout"]]
        return [found[name] for name in self.names for found in lists if name in found._modules]

    def holds(self, layer: Any) -> bool:
        """Whether nothing has changed that could change the route."""
        return (
            self.tier != "peft"
            and layer.training == self.training
            and layer.active_adapters == self.active
            and not layer._disable_adapters
            and not layer.merged_adapters
            and [layer._modules["base_layer"], *self._parts(layer)] == self.modules
            and [layer.scaling[name] for name in self.names] == self.scales
            and not any(map(_changed, self.modules))
            and not self.base.weight.requires_grad
        )


def _changed(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return _hooked(module) or (weight is not None and not plain_tensor(weight))


def route(layer: Any) -> Route:
    """The way this layer's next plain call takes."""
    if layer.disable_adapters:
        return Route("peft", "adapters are disabled: base layer only")
    if layer.merged:
        return Route("peft", "adapters are merged: base layer only")
    names = present(layer)
    if not names:
        return Route("peft", "no active adapter: base layer only")
    for obstacle in (base_obstacle(layer), *(adapter_obstacle(layer, name) for name in names)):
        if obstacle:
            return Route("peft", obstacle)
    if len(names) > 1:
        return Route("composed", f"{len(names)} active adapters")
    if layer.training and not isinstance(layer.lora_dropout[names[0]], nn.Identity):
        return Route("composed", "dropout in training")
    return Route("owned", "one adapter, whole linear")

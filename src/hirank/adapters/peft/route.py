"""Which way a layer's next plain call goes: owned, composed or PEFT's own, and why."""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import variants as peft_variants
from torch import Tensor, nn

from hirank.adapters.explain import Route

__all__ = ["Known", "adapter_obstacle", "base_obstacle", "plain_tensor", "present", "route"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_dropout")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def present(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _hooked(module: nn.Module) -> bool:
    # offloading replaces the bound method
    return "forward" in module.__dict__ or any(getattr(module, kind) for kind in _HOOKS)


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
    """The route of a layer and what it rests on, so that the next call need not ask again.

    `holds` runs at every call of every layer, so it compares identities and asks little else.
    """

    __slots__ = (
        "_active", "_hooks", "_modules", "_scales", "_training", "_weights",
        "adapters", "backend", "base", "bias", "tier", "weight",
    )  # fmt: skip

    def __init__(self, layer: Any, adapters: Callable[[Any, list[str]], list[Any]]) -> None:
        names = present(layer)
        self.tier = route(layer).tier
        self.base = layer.base_layer
        self.weight, self.bias = self.base._parameters.get("weight"), None
        self._active = list(layer.active_adapters)
        self._training = layer.training
        self.backend = layer._hirank_options.backend
        self.adapters = []
        if self.tier == "peft":
            return
        self.bias = self.base.bias
        lists = [layer._modules[kind] for kind in _PARTS]
        places = [(layer._modules, "base_layer")]
        places += [(found._modules, name) for name in names for found in lists if name in found]
        self._modules = [(place, name, place[name]) for place, name in places]
        modules = [module for *_, module in self._modules]
        self._weights = [
            (module._parameters, name, weight)
            for module in modules
            for name, weight in module._parameters.items()
        ]
        self._hooks = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._scales = [(layer.scaling, name, layer.scaling[name]) for name in names]
        self.adapters = adapters(layer, names)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copied or pickled layer asks for itself

    def holds(self, layer: Any) -> bool:
        """Whether nothing has changed that could change the route, or a tensor it works with."""
        own = layer.__dict__
        if (
            self.tier == "peft"
            or own["training"] is not self._training
            or own["_disable_adapters"]
            or own["merged_adapters"]
            or any(self._hooks)
            or layer.active_adapters != self._active
        ):
            return False
        for places in (self._modules, self._weights):
            for place, name, known in places:
                if place.get(name) is not known:
                    return False
        for scales, name, scale in self._scales:
            if scales.get(name) != scale:
                return False
        return not (
            self.weight.requires_grad
            or hasattr(self.weight, "ds_id")
            or any("forward" in module.__dict__ for *_, module in self._modules)
        )


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
    dropped = [name for name in names if not isinstance(layer.lora_dropout[name], nn.Identity)]
    dropout = "dropout in training" if layer.training and dropped else ""
    if len(names) > 1:
        several = f"{len(names)} active adapters"
        return Route("composed", f"{several}, {dropout}" if dropout else several)
    if dropout:
        return Route("composed", dropout)
    return Route("owned", "one adapter, whole linear")

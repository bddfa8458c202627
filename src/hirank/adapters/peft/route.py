"""Which way a layer's next plain call goes: owned, composed or PEFT's own, and why."""

from collections.abc import Callable
from itertools import repeat
from operator import contains, is_
from typing import Any

import torch
from peft.tuners.lora import variants as peft_variants
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hirank.adapters.explain import Route
from hirank.adapters.peft.operands import (
    convolves,
    dropout_of,
    embeds,
    factors,
    present,
    turned,
)

__all__ = ["Known", "adapter_obstacle", "base_obstacle", "foreign_base", "plain_tensor", "route"]
__all__ += ["tensor_parallel"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PARTS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_dropout")
_TABLES = ("lora_embedding_A", "lora_embedding_B")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooked(module: nn.Module) -> bool:
    # offloading replaces the bound method
    return "forward" in module.__dict__ or any(getattr(module, kind) for kind in _HOOKS)


def plain_tensor(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is nn.Parameter or kind is Tensor) and not hasattr(tensor, "ds_id")


def base_obstacle(layer: Any) -> str | None:
    base = layer.base_layer
    foreign = foreign_base(layer)
    if foreign:
        return foreign
    if _hooked(base):
        return "the base layer has hooks"
    if tensor_parallel(base):
        return "the base layer is tensor-parallel"
    if not plain_tensor(base.weight) or base.weight.dtype not in _FLOATS:
        return "the base weight is sharded or quantised"
    if base.weight.requires_grad:
        return "the base weight is trainable"
    return None


def tensor_parallel(base: Any) -> bool:
    """Whether PEFT or Transformers has split this layer over processes."""
    return getattr(base, "_hf_tp_plan", None) is not None


def foreign_base(layer: Any) -> str | None:
    """Why the base layer is of no kind that hirank computes."""
    base = layer.base_layer
    if embeds(layer):
        return _foreign_embedding(layer, base)
    if convolves(layer):
        kinds: tuple[type, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        wanted = "nn.Conv1d, nn.Conv2d or nn.Conv3d"
    else:
        kinds, wanted = (nn.Linear, Conv1D), "nn.Linear"
    return None if type(base) in kinds else f"the base layer is {type(base).__name__}, not {wanted}"


def _foreign_embedding(layer: Any, base: Any) -> str | None:
    if not isinstance(base, nn.Embedding):
        return f"the base layer is {type(base).__name__}, not nn.Embedding"
    if base.max_norm is not None:
        return "the embedding has max_norm: each lookup rewrites weights"
    if base.sparse:
        return "the embedding asks for sparse gradients"
    if getattr(layer, "tp_layer", None) is not None:
        return "the embedding is tensor-parallel"
    return None


_VARIANTS = (
    peft_variants.DoraLinearVariant,
    peft_variants.DoraEmbeddingVariant,
    peft_variants.DoraConv1dVariant,
    peft_variants.DoraConv2dVariant,
    peft_variants.DoraConv3dVariant,
)


def adapter_obstacle(layer: Any, name: str) -> str | None:
    variant = layer.lora_variant.get(name)
    if variant is not None and type(variant) not in _VARIANTS:
        return f"adapter {name!r} is of kind {type(variant).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own (lora_bias)"
    if isinstance(layer.scaling[name], Tensor):
        return f"the scaling of adapter {name!r} is a tensor"
    weights: tuple[Tensor, ...] = factors(layer, name)
    modules = [] if embeds(layer) else [layer.lora_A[name], layer.lora_B[name]]
    kind = type(layer.base_layer) if convolves(layer) else nn.Linear
    if any(type(module) is not kind for module in modules) or any(map(_hooked, modules)):
        return f"lora_A or lora_B of adapter {name!r} is not a plain module without hooks"
    if not embeds(layer) and _hooked(layer.lora_dropout[name]):
        return f"the dropout of adapter {name!r} has hooks"
    if variant is not None:
        holder = layer.lora_magnitude_vector[name]
        if _hooked(holder):
            return f"the magnitude of adapter {name!r} has hooks"
        weights = (*weights, holder.weight)
    if not all(map(plain_tensor, weights)):
        return f"adapter {name!r} is sharded"
    if any(weight.device != layer.base_layer.weight.device for weight in weights):
        return f"adapter {name!r} and the base weight are on different devices"
    return None


def _place(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module holds a tensor: what is generated or gathered need not be a parameter."""
    found: dict[str, Any] = module._parameters
    for place in (module._buffers, module.__dict__):
        if name in place:
            found = place
    return found


class Known:
    """The route of a layer and what it rests on, so that the next call need not ask again.

    `holds` runs at every call of every layer, so it compares identities and asks little else, by
    loops that C runs.
    """

    __slots__ = (
        "_active", "_dropouts", "_held", "_hooks", "_keys", "_places", "_scales", "_spaces",
        "_training", "adapters", "backend", "base", "bias", "tier", "turned", "weight",
    )  # fmt: skip

    def __init__(
        self,
        layer: Any,
        adapters: Callable[[Any, list[str]], list[Any]],
        found: Route | None = None,
    ) -> None:
        """`found`: the route, where it was asked for another way than by `route`."""
        names = present(layer)
        self.tier = (route(layer) if found is None else found).tier
        self.base = layer.base_layer
        self.turned = turned(self.base)
        self.weight: Any = _place(self.base, "weight").get("weight")
        self.bias = None
        self._active = list(layer.active_adapters)
        self._training = layer.training
        self.backend = layer._hirank_options.backend
        self.adapters = []
        if self.tier == "peft":
            return
        self.bias = getattr(self.base, "bias", None)  # an embedding has none
        lists = [layer._modules[kind] for kind in _PARTS]
        places = [(layer._modules, kind) for kind in ("base_layer", *_PARTS, *_TABLES)]
        places += [(found._modules, name) for name in names for found in lists if name in found]
        modules = [place[name] for place, name in places]
        places += [
            (place, name)
            for module in modules
            for name in {"weight": None, "bias": None, **module._parameters}
            for place in [_place(module, name)]
            if name in place
        ]
        tables = [layer._modules[kind]._parameters for kind in _TABLES]
        places += [(held, name) for held in tables for name in names if name in held]
        self._places, self._keys = [place for place, _ in places], [name for _, name in places]
        self._held = [place[name] for place, name in places]
        self._spaces = [module.__dict__ for module in modules]
        dropouts = [layer.lora_dropout[name] for name in names]
        self._dropouts = [(d, d.training) for d in dropouts if not isinstance(d, nn.Identity)]
        self._hooks = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._scales = [(name, layer.scaling[name]) for name in names]
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
        for module, training in self._dropouts:
            if module.training is not training:
                return False
        if not all(map(is_, map(dict.get, self._places, self._keys), self._held)):
            return False
        scaling = own["scaling"]  # PEFT puts another dictionary there
        for name, scale in self._scales:
            found = scaling.get(name)
            if type(found) is not type(scale) or found != scale:
                return False
        weight = self.weight  # some quantised bases have none of that name
        return not (
            (weight is not None and (weight.requires_grad or hasattr(weight, "ds_id")))
            or any(map(contains, self._spaces, repeat("forward")))
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
    if embeds(layer):
        return Route("composed", _count(names) + ", beside the base layer's lookup")
    dropped = any(dropout_of(layer, name) is not None for name in names)
    dropout = ("dropout in training" if layer.training else "dropout") if dropped else ""
    if len(names) > 1:
        return Route("composed", f"{_count(names)}, {dropout}" if dropout else _count(names))
    if dropout:
        return Route("composed", dropout)
    return Route("owned", "one adapter, whole " + ("convolution" if convolves(layer) else "linear"))


def _count(names: list[str]) -> str:
    return "one adapter" if len(names) == 1 else f"{len(names)} active adapters"

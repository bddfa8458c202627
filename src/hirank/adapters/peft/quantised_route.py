"""Which way a layer over a quantised base goes, what is wrong with it, and how to say so."""

from typing import Any

import torch
from peft.tuners.lora import variants as peft_variants
from torch import Tensor, nn

from hirank.adapters.dequantise import Kind, kind_of
from hirank.adapters.explain import Route
from hirank.adapters.peft.check import fault_of_transform
from hirank.adapters.peft.operands import dropout_of
from hirank.errors import HirankError
from hirank.kernels._backend import check_backend
from hirank.kernels._tuning import tier

__all__ = ["adapter_obstacle", "check_quantised", "describe_quantised", "device_of"]
__all__ += [
    "fault_of_quantised",
    "hooked",
    "known_kind",
    "obstacle_of",
    "quantised_present",
    "quantised_route",
]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def quantised_present(layer: Any) -> list[str]:
    """The active adapters that the layer has."""
    return [name for name in layer.active_adapters if name in layer.lora_A]


def known_kind(layer: Any) -> Kind:
    """What is known about the base of a converted layer."""
    kind = kind_of(layer.base_layer)
    assert kind is not None  # it was converted for that
    return kind


def device_of(layer: Any) -> torch.device:
    """Where the base weight lies, whatever the tensors that hold it are called."""
    return known_kind(layer).stored(layer.base_layer)[0].device


def quantised_route(layer: Any) -> Route:
    """The way this layer's next plain call takes."""
    if layer.disable_adapters:
        return Route("peft", "adapters are disabled: base layer only")
    if layer.merged:
        return Route("peft", "adapters are merged: base layer only")
    names = quantised_present(layer)
    if not names:
        return Route("peft", "no active adapter: base layer only")
    obstacle = obstacle_of(layer, names)
    if obstacle:
        return Route("peft", obstacle)
    dropped = any(dropout_of(layer, name) is not None for name in names)
    dropout = ("dropout in training" if layer.training else "dropout") if dropped else ""
    if len(names) > 1:
        several = f"{len(names)} active adapters"
        return Route("composed", f"{several}, {dropout}" if dropout else several)
    return Route("composed", dropout) if dropout else Route("owned", "one adapter")


def obstacle_of(layer: Any, names: list[str]) -> str | None:
    """Why these adapters are left to PEFT; None: they are not."""
    reason = _base_obstacle(layer)
    if reason is None:
        device = device_of(layer)
        for name in names:
            reason = reason or adapter_obstacle(layer, name, device)
    return reason


def hooked(module: nn.Module) -> bool:
    """Whether anything beside its forward runs at its call."""
    # offloading replaces the bound method
    return "forward" in module.__dict__ or any(getattr(module, kind) for kind in _HOOKS)


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (nn.Parameter, Tensor) and not hasattr(tensor, "ds_id")


def _base_obstacle(layer: Any) -> str | None:
    base = layer.base_layer
    kind = kind_of(base)
    if kind is None:
        return f"the base layer is {type(base).__name__}, which hirank does not know"
    return "the base layer has hooks" if hooked(base) else kind.obstacle(base)


def adapter_obstacle(layer: Any, name: str, device: torch.device) -> str | None:
    """Why one adapter is left to PEFT, whatever the base; `device`: that of the base weight."""
    variant = layer.lora_variant.get(name)
    if variant is not None and type(variant) is not peft_variants.DoraLinearVariant:
        return f"adapter {name!r} is of kind {type(variant).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own (lora_bias)"
    if isinstance(layer.scaling[name], Tensor):
        return f"the scaling of adapter {name!r} is a tensor"
    A, B = layer.lora_A[name], layer.lora_B[name]
    modules = [A, B, *([layer.lora_magnitude_vector[name]] if variant is not None else [])]
    if type(A) is not nn.Linear or type(B) is not nn.Linear or any(map(hooked, modules)):
        return f"lora_A or lora_B of adapter {name!r} is not a plain module without hooks"
    if hooked(layer.lora_dropout[name]):
        return f"the dropout of adapter {name!r} has hooks"
    if not all(_plain(module.weight) for module in modules):
        return f"adapter {name!r} is sharded"
    if any(module.weight.device != device for module in modules):
        return f"adapter {name!r} and the base weight are on different devices"
    return None


def describe_quantised(layer: Any) -> Route:
    """As `quantised_route`, in the words of `explain`."""
    found = quantised_route(layer)
    if found.tier == "peft":
        return found
    kind = known_kind(layer)
    what = f"{found.reason} over {kind.name}, dequantised once a pass"
    if layer._hirank_options.backend == "torch":
        speed, why = "eager", "backend='torch'"
    else:
        speed, why = tier(_MANY, device_of(layer), layer.training)
    return Route(speed if found.tier == "owned" else "composed", f"{what}: {why}")


_MANY = 2**62  # elements, more than any crossover


@torch.no_grad()
def check_quantised(where: str, layer: Any, backend: str) -> None:
    """Raises HirankError: an adapter does not fit or is not finite, or Triton cannot run here."""
    device = device_of(layer)
    try:
        check_backend("auto" if device.type == "meta" else backend, device)
    except ValueError as error:
        raise HirankError(f"{where}: {error}") from None
    n, k = layer.out_features, layer.in_features
    for name in layer.lora_A:
        A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
        parts = {"lora_A": A, "lora_B": B}
        if name in layer.lora_magnitude_vector:
            parts["lora_magnitude_vector"] = layer.lora_magnitude_vector[name].weight
        shapes = [tuple(t.shape) for t in parts.values()]
        if shapes != [(A.shape[0], k), (n, A.shape[0]), (n,)][: len(shapes)]:
            raise HirankError(
                f"{where} is {n}x{k} and adapter {name!r} has parts of shapes {shapes}: A must be "
                f"[R, {k}], B [{n}, R] and the magnitude [{n}]."
            )
        for part, weight in parts.items():
            if not weight.is_meta and not torch.isfinite(weight).all():
                raise HirankError(
                    f"{where} has NaN or infinity in {part} of adapter {name!r}: load a checkpoint "
                    "from before the training diverged."
                )


def fault_of_quantised(layer: Any, x: Any) -> HirankError | None:
    """Why a call with `x` failed, if it is the input."""
    if not isinstance(x, Tensor):
        return None
    name, device = layer._hirank_options.name, device_of(layer)
    transformed = fault_of_transform(name)
    if transformed is not None:
        return transformed
    places = sorted({str(t.device) for t in known_kind(layer).stored(layer.base_layer)})
    if len(places) > 1:
        return HirankError(
            f"{name} has its quantised weight on {' and '.join(places)} at once, as a move of the "
            f"model leaves a {type(layer.base_layer).__name__}: load the base model where it is to "
            "run."
        )
    if x.device != device:
        return HirankError(
            f"{name} got x on {x.device} and has its weight on {device}: move one of them."
        )
    if x.dim() == 0 or x.shape[-1] != layer.in_features:
        return HirankError(
            f"{name} got x of shape {list(x.shape)}: the last dimension must be "
            f"{layer.in_features}."
        )
    return None

"""Converting a PEFT model in place, undoing it, and saying which way each layer goes."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from peft.tuners.lora import layer as peft_lora
from peft.utils import get_peft_model_state_dict
from torch import nn

from hirank.adapters.explain import Explanation, Route, Row
from hirank.adapters.gain import base_norm
from hirank.adapters.peft.layer import FastLinear, magnitude_of, norms_of
from hirank.adapters.peft.route import adapter_obstacle, route
from hirank.errors import HirankError

__all__ = ["accelerate", "convert", "explain", "restore", "unmatched_keys"]

Model = TypeVar("Model", bound=nn.Module)


def _fresh_magnitude(layer: Any, name: str) -> None:
    """m of an untrained adapter is the fp32 norm itself, so that g = 1 exactly; m stays fp32.

    PEFT rounds m to the base dtype: on a bf16 base a new adapter then changes the output by up to
    0.4 % a row before the first step. Untrained: B is zero and m is the
    norm up to that rounding, every entry a number of the base dtype.
    """
    magnitude, weight = magnitude_of(layer, name), layer.base_layer.weight
    if magnitude is None or weight.is_meta or magnitude.is_meta:
        return
    if magnitude.dtype in (torch.bfloat16, torch.float16):
        magnitude.data = magnitude.data.float()
    if layer.lora_B[name].weight.any():
        return
    if not torch.equal(magnitude, magnitude.to(weight.dtype).to(magnitude.dtype)):
        return
    norm = base_norm(weight)
    slack = max(torch.finfo(weight.dtype).eps, 1e-6)
    if torch.allclose(magnitude.detach().to(norm), norm, rtol=slack, atol=1e-12):
        magnitude.data = norm.to(device=magnitude.device)


def convert(layer: Any, *, just_made: bool = False) -> None:
    """Convert one layer if it is of a known kind; `just_made` by `patch`, m is right already."""
    known = type(layer) is peft_lora.Linear and type(layer.base_layer) is nn.Linear
    if known:
        layer.__class__ = FastLinear
        layer._hirank_norms, layer._hirank_base, layer._hirank_known = {}, None, None
    elif type(layer) is not FastLinear:
        return
    for norms in layer._hirank_norms.values():
        norms.clear()
    for name in layer.lora_variant:
        norms_of(layer, name)  # known from the start, so that a first pass refreshes all at once
        if not just_made and not layer.merged and adapter_obstacle(layer, name) is None:
            _fresh_magnitude(layer, name)


def accelerate(model: Model) -> Model:
    """Convert the LoRA and DoRA layers of a PEFT model to hirank's, in place.

    Layers it does not know stay PEFT's (`explain` tells which and why). Calling it again is a
    no-op for converted layers, except that every cached norm is forgotten; call it again after
    adding adapters to layers that had none.

    Untrained DoRA adapters get m from the fp32 norm, so that the model starts as exactly its base.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` returned, on any device, the
            meta device included (nothing is computed there).

    Returns:
        The same model.

    Raises:
        HirankError: the model holds no LoRA layer.
    """
    layers = dict(_lora_layers(model))
    if not layers:
        raise HirankError(
            f"accelerate got a {type(model).__name__} without LoRA layers: wrap it with "
            "peft.get_peft_model first."
        )
    for layer in layers.values():
        convert(layer)
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`: the layers are PEFT's own again, in place, merged ones stay merged."""
    for _, layer in _lora_layers(model):
        converted = type(layer) is FastLinear
        if converted:
            merged = list(layer.merged_adapters) if layer._hirank_base is not None else []
            if merged:
                layer.unmerge()
            layer.__class__ = peft_lora.Linear
            del layer._hirank_norms, layer._hirank_base, layer._hirank_known
            if merged:
                layer.merge(adapter_names=merged)
    return model


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, peft_lora.LoraLayer):
            yield name, module


def _kind(layer: Any) -> str:
    for name in layer.active_adapters:
        variant = layer.lora_variant.get(name)
        if variant is not None:
            text = type(variant).__name__
            return "dora" if text.startswith("Dora") else text
    return "lora"


def _explained(layer: Any) -> Route:
    if isinstance(layer, FastLinear):
        return route(layer)
    if type(layer) is peft_lora.Linear and type(layer.base_layer) is nn.Linear:
        return Route("peft", "not converted: call hirank.accelerate(model)")
    what = f"{type(layer).__name__} over {type(layer.get_base_layer()).__name__}"
    return Route("peft", f"{what} is not converted")


def explain(model: nn.Module) -> Explanation:
    """Which way each adapted layer of `model` takes as it stands now, and why."""
    return Explanation(
        tuple(Row(name, _kind(layer), *_explained(layer)) for name, layer in _lora_layers(model))
    )


def unmatched_keys(model: nn.Module, name: str, saved: Iterable[str]) -> list[str]:
    """Keys of an adapter file that the model has no place for, and places the file leaves empty."""
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    places, keys = set(state), set(saved)
    return sorted((places - keys) | {key for key in keys - places if "lora_" in key})

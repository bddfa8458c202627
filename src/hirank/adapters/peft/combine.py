"""Combining adapters: what `add_weighted_adapter` means for DoRA.

DoRA splits a weight into direction and magnitude, and each is combined on its own:

    s B A = sum_i w_i s_i B_i A_i        m = ||W|| + sum_i w_i (m_i - ||W||)

So one adapter at weight 1 is itself, at weight 0 it is the base, and between them the weight is a
strength. PEFT combines the directions alone and starts m anew; and it stretches what an rsLoRA
adapter gives by sqrt(r).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora

from hirank.adapters.peft.converted import Converted, fresh_norm
from hirank.adapters.peft.quantised import QuantisedLayer, base_norm_of
from hirank.errors import HirankError

__all__ = ["combine"]

_EXACT = ("cat", "svd")


def combine(
    model: Any,
    adapters: Sequence[str],
    weights: Sequence[float],
    name: str,
    stock: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Make adapter `name` of `adapters` by PEFT's own method, then mend what it leaves wrong.

    Raises:
        HirankError: DoRA and LoRA mixed; DoRA combined by a method that is no weighted sum; DoRA on
            a layer that is not converted; a number of weights that is not that of the adapters.
    """
    if name in model.peft_config:
        stock(*args, **kwargs)
        return
    known = [adapter for adapter in adapters if adapter in model.peft_config]
    dora = [bool(model.peft_config[adapter].use_dora) for adapter in known]
    if any(dora):
        _check(model, adapters, weights, all(dora), args[0] if args else _method(kwargs))
    stock(*args, **kwargs)
    model.peft_config[name].use_rslora = False
    for layer in model.modules():
        if isinstance(layer, peft_lora.LoraLayer) and name in layer.scaling:
            layer.use_rslora[name] = False
            layer.scaling[name] = layer.lora_alpha[name] / layer.r[name]
            if name in layer.lora_magnitude_vector:
                _combine_magnitudes(layer, adapters, weights, name)


def _method(kwargs: dict[str, Any]) -> str:
    found: str = kwargs.get("combination_type", "svd")
    return found


def _check(
    model: Any, adapters: Sequence[str], weights: Sequence[float], pure: bool, method: str
) -> None:
    if len(adapters) != len(weights):
        raise HirankError(
            f"add_weighted_adapter got {len(adapters)} adapters and {len(weights)} weights: give "
            "one weight for each adapter."
        )
    if not pure:
        raise HirankError(
            f"add_weighted_adapter got LoRA and DoRA adapters in {list(adapters)}: combine "
            "adapters of one kind."
        )
    if len(adapters) > 1 and method not in _EXACT:
        raise HirankError(
            f"add_weighted_adapter got combination_type {method!r} for DoRA adapters, whose "
            "magnitudes belong to a weighted sum: use 'cat' or 'svd'."
        )
    for where, layer in model.named_modules():
        ours = isinstance(layer, (Converted, QuantisedLayer))
        if isinstance(layer, peft_lora.LoraLayer) and not ours:
            if any(adapter in layer.lora_magnitude_vector for adapter in adapters):
                raise HirankError(
                    f"add_weighted_adapter got DoRA adapters on {where}, a "
                    f"{type(layer).__name__} that hirank has not converted: call "
                    "hirank.accelerate first, or keep the adapters apart and activate both."
                )


@torch.no_grad()
def _combine_magnitudes(
    layer: Any, adapters: Sequence[str], weights: Sequence[float], name: str
) -> None:
    holder = layer.lora_magnitude_vector[name].weight
    quantised = isinstance(layer, QuantisedLayer)
    norm = base_norm_of(layer, name) if quantised else fresh_norm(layer, name)
    norm = norm.to(holder.device).view_as(holder)
    made = norm.clone()
    for adapter, weight in zip(adapters, weights, strict=True):
        if adapter in layer.lora_magnitude_vector:
            made += weight * (layer.lora_magnitude_vector[adapter].weight.to(norm) - norm)
    holder.data = made

"""Saying which way each layer of a model goes as it stands, and why."""

from typing import Any

import torch
from torch import nn

from hirank.adapters.explain import Explanation, Route, Row
from hirank.adapters.peft.convert import CONVERTED, convertible, lora_layers
from hirank.adapters.peft.converted import Converted
from hirank.adapters.peft.operands import as_matrix, convolves, dropout_of, embeds, present
from hirank.adapters.peft.quantised import QuantisedLayer, fast_class
from hirank.adapters.peft.quantised_route import describe_quantised
from hirank.adapters.peft.route import foreign_base, route
from hirank.kernels._tuning import tier, tiles

__all__ = ["explain"]


def explain(model: nn.Module) -> Explanation:
    """Which way each adapted layer of `model` takes as it stands now, and why.

    In train mode it speaks of a training step, in eval mode of inference.
    """
    rows = (Row(name, _kind(layer), *_explained(layer)) for name, layer in lora_layers(model))
    return Explanation(tuple(rows))


def _kind(layer: Any) -> str:
    for name in layer.active_adapters:
        variant = layer.lora_variant.get(name)
        if variant is not None:
            text = type(variant).__name__
            return "dora" if text.startswith("Dora") else text
    return "lora"


def _explained(layer: Any) -> Route:
    if isinstance(layer, QuantisedLayer):
        return describe_quantised(layer)
    if isinstance(layer, Converted):
        found = route(layer)
        if found.tier == "owned":
            return _owned(layer, found.reason)
        return _composed(layer, found.reason) if found.tier == "composed" else found
    if convertible(layer) or fast_class(layer) is not None:
        return Route("peft", "not converted: call hirank.accelerate(model)")
    if type(layer) in CONVERTED:
        return Route("peft", foreign_base(layer) or "")
    what = f"{type(layer).__name__} over {type(layer.get_base_layer()).__name__}"
    return Route("peft", f"{what} is not converted")


def _owned(layer: Any, what: str) -> Route:
    found, reason = _tier(layer)
    return Route(found, f"{what}: {reason}")


def _tier(layer: Any) -> tuple[str, str]:
    """("fused training", "fused inference" or "eager", why)."""
    weight, backend = layer.base_layer.weight, layer._hirank_options.backend
    if backend == "torch":
        return "eager", "backend='torch'"
    if weight.dtype == torch.float64:
        return "eager", "float64"
    device = weight.device
    if backend == "triton" and tiles(device).obstacle is None:
        return ("fused training" if layer.training else "fused inference"), "backend='triton'"
    found, reason = tier(_MANY, device, layer.training)
    least = tiles(device).min_training if layer.training else tiles(device).min_inference
    if found != "eager" and least and not convolves(layer) and not embeds(layer):
        rows = -(-least // as_matrix(layer, weight).shape[0])
        reason += f"; eager below {rows} tokens ({tiles(device).crossover_source})"
    return found, reason


_MANY = 2**62  # elements, more than any crossover


def _composed(layer: Any, reason: str) -> Route:
    found, why = _tier(layer)
    if _drops(layer) and any(name in layer.lora_variant for name in present(layer)):
        gemms = "one base GEMM" if layer._hirank_options.single_gemm else "a second base GEMM"
        reason += f" with {gemms}"
    if found == "eager":
        reason += f"; eager: {why}"
    return Route("composed", reason)


def _drops(layer: Any) -> bool:
    return any(dropout_of(layer, name) is not None for name in present(layer))

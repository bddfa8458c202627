"""Converting a PEFT model in place, and undoing it."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from peft.tuners.lora import layer as peft_lora
from peft.utils import get_peft_model_state_dict
from torch import nn

from hirank.adapters.groups import Family
from hirank.adapters.peft.check import check_adapters, check_backend_of, check_whole
from hirank.adapters.peft.conv import FastConv1d, FastConv2d, FastConv3d
from hirank.adapters.peft.converted import Converted, fresh_norm, norms_of
from hirank.adapters.peft.embedding import FastEmbedding
from hirank.adapters.peft.layer import FastLinear
from hirank.adapters.peft.model import convert_models, restore_models
from hirank.adapters.peft.operands import factors, present
from hirank.adapters.peft.options import Options, options
from hirank.adapters.peft.quantised import QuantisedLayer, convert_quantised, restore_quantised
from hirank.adapters.peft.quantised_route import quantised_present
from hirank.adapters.peft.route import adapter_obstacle, foreign_base
from hirank.adapters.traced_handles import handle_for
from hirank.errors import HirankError

__all__ = ["accelerate", "convert", "lora_layers", "restore", "unmatched_keys"]
__all__ += ["CONVERTED", "convertible", "fresh_norm"]

_log = logging.getLogger("hirank.adapters")
Model = TypeVar("Model", bound=nn.Module)

CONVERTED: dict[type, type[Converted]] = {
    peft_lora.Linear: FastLinear,
    peft_lora.Embedding: FastEmbedding,
    peft_lora.Conv1d: FastConv1d,
    peft_lora.Conv2d: FastConv2d,
    peft_lora.Conv3d: FastConv3d,
}
"""PEFT's classes, and what each becomes."""


def convertible(layer: Any) -> bool:
    """Whether a layer of PEFT's own is of a kind that can be converted."""
    return type(layer) in CONVERTED and foreign_base(layer) is None


def _fresh_magnitude(where: str, layer: Any, name: str) -> None:
    """m of an untrained adapter is the fp32 norm itself, so that g = 1 exactly; m stays fp32.

    PEFT rounds m to the base dtype: on a bf16 base a new adapter then changes the output by up to
    0.4 % a row before the first step. Untrained: B (of an embedding: A) is zero and m is the
    norm up to that rounding, every entry a number of the base dtype.
    """
    if name not in layer.lora_magnitude_vector:
        return
    magnitude, weight = layer.lora_magnitude_vector[name].weight, layer.base_layer.weight
    if weight.is_meta or magnitude.is_meta:
        return
    if magnitude.dtype in (torch.bfloat16, torch.float16):
        magnitude.data = magnitude.data.float()
    if all(factor.any() for factor in factors(layer, name)):
        return
    if not torch.equal(magnitude, magnitude.to(weight.dtype).to(magnitude.dtype)):
        return
    norm = fresh_norm(layer, name).view_as(magnitude)
    if not torch.isfinite(norm).all():
        raise HirankError(
            f"{where} has NaN or infinity in its base weight: load the base model again."
        )
    slack = max(torch.finfo(weight.dtype).eps, 1e-6)
    if torch.allclose(magnitude.detach().to(norm), norm, rtol=slack, atol=1e-12):
        magnitude.data = norm.to(device=magnitude.device)


def convert(
    layer: Any,
    name: str,
    wanted: Options,
    family: Family,
    *,
    just_made: bool = False,
    again: bool = True,
) -> None:
    """Convert one layer if it is of a known kind.

    Args:
        layer: any LoRA layer of PEFT's.
        name: what to call it.
        wanted: how it is to compute.
        family: the norms of all layers of its model.
        just_made: by `patch`; m is right already.
        again: whether `wanted` replaces what an already converted layer has.
    """
    check_whole(name, layer)
    if convert_quantised(layer, name, wanted, family, just_made=just_made, again=again):
        return
    known = convertible(layer)
    if known:
        layer.__class__ = CONVERTED[type(layer)]
        layer._hirank_norms, layer._hirank_base, layer._hirank_family = {}, None, family
        layer._hirank_handle = handle_for(layer)
    elif not isinstance(layer, Converted):
        return
    if known or again:
        layer._hirank_options = wanted._replace(name=name)
    layer._hirank_known = None
    for norms in layer._hirank_norms.values():
        norms.clear()
    for adapter in layer.lora_variant:
        norms_of(layer, adapter)  # known from the start: a first pass refreshes all at once
        if not just_made and not layer.merged and adapter_obstacle(layer, adapter) is None:
            _fresh_magnitude(name, layer, adapter)


def accelerate(model: Model, *, backend: str = "auto", dropout: str = "peft") -> Model:
    """Convert the LoRA and DoRA layers of a PEFT model to hirank's, in place.

    Layers it does not know stay PEFT's (`explain` tells which and why). Calling it again forgets
    every cached norm and sets the options anew, and changes nothing else in layers that are
    converted; call it again after adding adapters to layers that had none.

    Untrained DoRA adapters get m from the fp32 norm, so that the model starts as exactly its base.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` returned, on any device, the
            meta device included (nothing is computed there).
        backend: how a layer joins its branches: "triton" by Triton kernels, "torch" by plain
            PyTorch, "auto" by whichever pays for its size on its device. The row norms of DoRA
            have one way for each device, which is not chosen here.
        dropout: what LoRA dropout means for DoRA in training. "peft": the frozen branch sees the
            dropped input too, which costs a second base GEMM. "single-gemm": the adapter alone
            does, as with LoRA. The output without dropout is the mean of both.

    Returns:
        The same model.

    Raises:
        HirankError: the model holds no LoRA layer; an option has no such value; "triton" where it
            cannot run; an adapter whose shapes do not fit, or weights with NaN or infinity.
    """
    wanted = options(backend, dropout)
    layers = dict(lora_layers(model))
    if not layers:
        raise HirankError(
            f"accelerate got a {type(model).__name__} without LoRA layers: wrap it with "
            "peft.get_peft_model first."
        )
    for name, layer in layers.items():
        if isinstance(layer, Converted) or convertible(layer):
            check_backend_of(name, layer, backend)
            check_adapters(name, layer)
    families = [layer._hirank_family for layer in layers.values() if isinstance(layer, Converted)]
    family = families[0] if families else Family()
    for name, layer in layers.items():
        convert(layer, name, wanted, family)
    convert_models(model)
    for name, layer in layers.items():
        reason = left_to_peft(layer)
        if reason is not None:
            _log.info("%s is left to PEFT: %s", name, reason)
    return model


def left_to_peft(layer: Any) -> str | None:
    """Why hirank does not compute a layer with its active adapters, in any mode; None: it does."""
    if isinstance(layer, Converted | QuantisedLayer):
        reason: str | None = layer._hirank_obstacle(_present(layer))
        return reason
    foreign = foreign_base(layer) if type(layer) in CONVERTED else None
    return foreign or f"it is a {type(layer).__name__}, of no kind that hirank converts"


def _present(layer: Any) -> list[str]:
    return quantised_present(layer) if isinstance(layer, QuantisedLayer) else present(layer)


def restore(model: Model) -> Model:
    """Undo `accelerate`: the layers are PEFT's own again, in place, merged ones stay merged."""
    for _, layer in lora_layers(model):
        kind = next((stock for stock, fast in CONVERTED.items() if type(layer) is fast), None)
        if not restore_quantised(layer) and kind is not None:
            merged = list(layer.merged_adapters) if layer._hirank_base is not None else []
            if merged:
                layer.unmerge()
            layer.__class__ = kind
            for key in [key for key in vars(layer) if key.startswith("_hirank_")]:
                delattr(layer, key)
            if merged:
                layer.merge(adapter_names=merged)
    restore_models(model)
    return model


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every LoRA layer of a model by name, converted or not."""
    for name, module in model.named_modules():
        if isinstance(module, peft_lora.LoraLayer):
            yield name, module


def unmatched_keys(model: nn.Module, name: str, saved: Iterable[str]) -> list[str]:
    """Keys of an adapter file that the model has no place for, and places the file leaves empty."""
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    places, keys = set(state), set(saved)
    return sorted((places - keys) | {key for key in keys - places if "lora_" in key})

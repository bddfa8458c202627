"""The adapted layers of a model: the one file of the doctor that knows PEFT's attributes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = [
    "Adapted",
    "Saved",
    "adapted_layers",
    "dora_caching",
    "is_adapter_weight",
    "is_quantised",
    "own_weight",
    "plain_name",
    "saved_modules",
    "settings_by_adapter",
    "targeted",
    "unwrapped",
]

_WRAPPERS = re.compile(r"(?<![^.])(base_layer|original_module|modules_to_save\.[^.]+)(\.|$)")


@dataclass(frozen=True)
class Adapted:
    """One adapter on one layer."""

    name: str
    """The layer's name in the base model."""
    adapter: str
    layer: Any
    parts: dict[str, Tensor]
    """lora_A [R, columns], lora_B [rows, R], and lora_magnitude_vector [rows] where it is DoRA."""

    @property
    def parameter(self) -> str | None:
        """The full name of the one parameter that is adapted: target_parameters."""
        own = getattr(self.layer, "parameter_name", None)
        return f"{self.name}.{own}" if own else None

    @property
    def rank(self) -> int:
        return int(self.layer.r[self.adapter])

    @property
    def rows(self) -> int:
        return self.parts["lora_B"].numel() // max(1, self.rank)

    @property
    def columns(self) -> int:
        return self.parts["lora_A"].numel() // max(1, self.rank)

    @property
    def scale(self) -> float:
        return float(self.layer.scaling[self.adapter])

    @property
    def alpha(self) -> float:
        return float(self.layer.lora_alpha[self.adapter])

    @property
    def whole(self) -> bool:
        """Whether its weights have their full shape here: ZeRO-3 leaves empty ones."""
        return all(part.numel() > 0 for part in self.parts.values())

    @property
    def offloaded(self) -> bool:
        """Whether accelerate brings the weights when the layer is called."""
        return any(hasattr(module, "_hf_hook") for module in self.layer.modules())

    @property
    def active(self) -> bool:
        return self.adapter in self.layer.active_adapters

    @property
    def merged(self) -> bool:
        return self.adapter in self.layer.merged_adapters

    @property
    def dora(self) -> bool:
        return "lora_magnitude_vector" in self.parts

    @property
    def trained(self) -> bool:
        return any(part.requires_grad for part in self.parts.values())

    @property
    def dropout(self) -> tuple[float, bool]:
        """(share of the inputs dropped, whether the dropout is in train mode)."""
        module = self.layer.lora_dropout[self.adapter] if self.layer.lora_dropout else None
        return float(getattr(module, "p", 0.0)), bool(getattr(module, "training", False))

    @property
    def base(self) -> Any:
        return self.layer.get_base_layer()

    @property
    def ours(self) -> bool:
        """Whether hirank computes the layer, rather than PEFT."""
        from hirank.adapters.peft.converted import Converted
        from hirank.adapters.peft.quantised import QuantisedLayer

        return isinstance(self.layer, Converted | QuantisedLayer)

    @property
    def single_gemm(self) -> bool:
        return self.ours and bool(self.layer._hirank_options.single_gemm)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile's wrapper."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DataParallel | DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """A module's name as the base model has it."""
    name = name.removeprefix("base_model.model.")
    return _WRAPPERS.sub("", name).rstrip(".")


def adapted_layers(model: nn.Module) -> Iterator[Adapted]:
    """Every LoRA adapter on every layer, in the order of the model."""
    from peft.tuners.adalora.layer import AdaLoraLayer
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or isinstance(module, AdaLoraLayer):
            continue
        for adapter in module.r:
            parts = dict(_parts(module, adapter))
            if {"lora_A", "lora_B"} <= set(parts):
                yield Adapted(plain_name(name), adapter, module, parts)


def _parts(layer: Any, adapter: str) -> Iterator[tuple[str, Tensor]]:
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        held = getattr(layer, part, None)
        if held is not None and adapter in held:
            yield part, held[adapter].weight
    for part in ("lora_A", "lora_B"):
        embedding = getattr(layer, part.replace("lora_", "lora_embedding_"), None)
        if embedding is not None and adapter in embedding:
            yield part, embedding[adapter]


def settings_by_adapter(model: nn.Module) -> dict[str, Any]:
    """The LoraConfig of every LoRA adapter of the model."""
    found = getattr(model, "peft_config", None) or {}
    return {name: config for name, config in found.items() if config.peft_type == "LORA"}


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter belongs to an adapter, or is saved with it, by its name in the model."""
    own = ("lora_", "modules_to_save", "trainable_tokens_")
    return any(part.startswith(own) for part in name.split("."))


def is_quantised(base: Any) -> bool:
    """Whether a base layer holds packed or scaled weights rather than floating-point ones."""
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor):
        return True  # GPTQ and its like: qweight
    packed = "torchao" in type(weight.data).__module__
    return packed or not weight.is_floating_point() or hasattr(weight, "quant_state")


@dataclass(frozen=True)
class Saved:
    """A module that is trained whole beside the adapter: modules_to_save."""

    name: str
    module: Any

    def inside(self) -> Iterator[str]:
        """The base model's names of the module and all that is in it."""
        for name, _ in self.module.original_module.named_modules():
            yield f"{self.name}.{plain_name(name)}".rstrip(".")


def saved_modules(model: nn.Module) -> Iterator[Saved]:
    """Every module of modules_to_save."""
    from peft.utils.other import ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield Saved(plain_name(name), module)


def targeted(name: str, patterns: Any) -> bool:
    """Whether PEFT's target_modules name a module: a regex, or endings."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    endings: Iterable[str] = patterns or ()
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def own_weight(module: Any) -> Tensor | None:
    """The base weight of an embedding or head, whatever is wrapped around it."""
    for wrapper in ("original_module", "base_layer") * 2:  # whichever comes first
        module = getattr(module, wrapper, module)
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def dora_caching() -> bool:
    """Whether PEFT's DoraCaching is switched on."""
    from peft.tuners.lora import dora

    return bool(getattr(dora, "ENABLE_DORA_CACHING", False))

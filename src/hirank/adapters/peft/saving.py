"""Saving that loses nothing: looked at before a byte is written, then whole or not at all.

Refused, each in one sentence, is what would load without a word and compute something else:
A, B or a magnitude that is missing or not finite, settings whose rank or alpha are not those the
layers have. Files are written beside their places and moved there when all are complete.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora
from peft.utils import PeftType, get_peft_model_state_dict
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from hirank.adapters.peft.route import plain_tensor
from hirank.errors import HirankError

__all__ = ["rank_and_alpha", "save_checked"]

Save = Callable[..., None]


def save_checked(
    model: Any, save: Save, folder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """`save(folder, *args, **kwargs)`, PEFT's method, if nothing would be lost.

    Raises:
        HirankError: an adapter that could not be loaded as it is.
    """
    if not kwargs.get("is_main_process", True) or args[3:4] == (False,):
        save(folder, *args, **kwargs)
        return
    names = kwargs.get("selected_adapters", args[1] if len(args) > 1 else None)
    for name in model.peft_config if names is None else names:
        if name in model.peft_config:  # else PEFT says so
            _check(model, name, kwargs.get("state_dict"))
    if os.path.isfile(folder):
        save(folder, *args, **kwargs)  # PEFT says so
        return
    _whole(Path(folder), lambda place: save(place, *args, **kwargs))


def _whole(folder: Path, write: Callable[[str], None]) -> None:
    """Let `write` fill a folder inside `folder`, and move what is in it once all is there."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        card = folder / "README.md"
        if card.is_file():
            shutil.copy2(card, place)  # PEFT writes into a card that exists
        write(str(place))
        for file in sorted(found for found in place.rglob("*") if found.is_file()):
            target = folder / file.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def _check(model: Any, name: str, given: dict[str, Any] | None) -> None:
    config = model.peft_config[name]
    layers = [(where, layer) for where, layer in _layers(model) if _has(layer, name)]
    if config.peft_type != PeftType.LORA or _is_sharded(model, name, layers):
        return
    for where, layer in layers:
        _check_settings(where, layer, name, config)
    own = _state(model, name, None)
    state = own if given is None else _state(model, name, given)
    lost = sorted(own.keys() - state.keys())
    if lost:
        raise HirankError(
            f"save_pretrained got a state_dict without {lost[0]} of adapter {name!r} ({len(lost)} "
            "weights are missing): give it all weights, or leave state_dict out."
        )
    for key in own:
        _check_value(key, name, state[key])


def _is_sharded(model: nn.Module, name: str, layers: list[tuple[str, Any]]) -> bool:
    """Whether only the processes together hold the weights."""
    if any("fsdp" in type(module).__name__.lower() for module in model.modules()):
        return True
    held = [_own(layer, name) for _, layer in layers]
    return not all(
        plain_tensor(part) and part.numel() and (part.dim() > 1 or part is not parts[0])
        for parts in held
        for part in parts
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for where, module in model.named_modules():
        if isinstance(module, peft_lora.LoraLayer):
            yield where, module


def _has(layer: Any, name: str) -> bool:
    return name in layer.lora_A or name in layer.lora_embedding_A


def _own(layer: Any, name: str) -> list[Tensor]:
    """A, and whatever else of an adapter a layer has."""
    kinds = (layer.lora_embedding_A, layer.lora_A, layer.lora_embedding_B, layer.lora_B)
    held = [kind[name] for kind in kinds if name in kind]
    if name in layer.lora_magnitude_vector:
        held.append(layer.lora_magnitude_vector[name])
    return [part if isinstance(part, Tensor) else part.weight for part in held]


def _state(model: Any, name: str, given: dict[str, Any] | None) -> dict[str, Tensor]:
    found = get_peft_model_state_dict(
        model, state_dict=given, adapter_name=name, save_embedding_layers=False
    )
    return {key: value for key, value in found.items() if "lora_" in key}


def rank_and_alpha(config: Any, where: str) -> tuple[int, float]:
    """What the settings of an adapter say for the layer at `where`."""
    key = where.removeprefix("base_model.model.")
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, key), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, key), config.lora_alpha)
    return rank, alpha


def _check_settings(where: str, layer: Any, name: str, config: Any) -> None:
    if isinstance(layer, peft_lora.ParamWrapper):
        return  # one rank for each expert
    rank, alpha = rank_and_alpha(config, where)
    held = _own(layer, name)[0].shape[0]
    if held != rank:
        raise HirankError(
            f"{where} has rank {held} in adapter {name!r}, whose settings say {rank}: set r or "
            "rank_pattern in model.peft_config, or the files would not load."
        )
    if layer.lora_alpha[name] != alpha or bool(layer.use_rslora[name]) != bool(config.use_rslora):
        raise HirankError(
            f"{where} has lora_alpha {layer.lora_alpha[name]} (use_rslora "
            f"{bool(layer.use_rslora[name])}) in adapter {name!r}, whose settings say {alpha} "
            f"({bool(config.use_rslora)}): set them in model.peft_config, or it would load with "
            "another strength."
        )
    if (name in layer.lora_magnitude_vector) != bool(config.use_dora):
        has = "a" if name in layer.lora_magnitude_vector else "no"
        raise HirankError(
            f"{where} has {has} lora_magnitude_vector in adapter {name!r}, whose settings say "
            f"use_dora {bool(config.use_dora)}: set it in model.peft_config, or the magnitude "
            "would be lost."
        )


def _check_value(key: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not plain_tensor(value) or value.is_meta:
        return
    if not torch.isfinite(value).all():
        raise HirankError(
            f"{key} of adapter {name!r} holds NaN or infinity: save a state from before the "
            "training diverged."
        )
    if "lora_magnitude_vector" in key and value.dtype in (torch.bfloat16, torch.float16):
        warnings.warn(
            f"{key} of adapter {name!r} is saved in {value.dtype}, which rounds the magnitude by "
            "up to 0.4 %: keep it in float32.",
            stacklevel=6,
        )

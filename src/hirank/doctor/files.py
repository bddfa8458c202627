"""Traps in an adapter folder, and between a folder and the model that continues from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap
from hirank.errors import HirankError

__all__ = [
    "alpha_missing",
    "dora_flag_disagrees",
    "file_weights_empty",
    "file_weights_not_finite",
    "file_weights_untrained",
    "resumed_from_scratch",
    "settings_differ_from_file",
]

WEIGHTS_FILE = "adapter_model.safetensors"


def _read(folder: Path | None) -> Iterator[tuple[str, Tensor]]:
    """(key, weight) of an adapter file, one at a time."""
    if folder is None:
        return
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                yield key, file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise HirankError(
            f"{path} cannot be read as safetensors ({error}); take it from the run again."
        ) from None


def _keys_where(subject: Subject, meets: Callable[[Tensor], bool]) -> list[str]:
    return [key for key, weight in _read(subject.adapter_dir) if meets(weight)]


@trap(
    "error",
    "adapter_config.json does not say alpha or rank, so the adapter's strength is a guess",
    fix="Add lora_alpha and r with the values it was trained with.",
    source="surogate#173, mlx-vlm#841, ai-toolkit#157, diffusers#14409",
)
def alpha_missing(subject: Subject) -> str | None:
    """PEFT fills in its defaults, alpha 8 and r 8."""
    if subject.adapter_dir is None or not subject.file_settings:
        return None
    bad = [key for key in ("lora_alpha", "r") if not _number(subject.file_settings.get(key))]
    return f"{' and '.join(bad)} in {subject.adapter_dir / 'adapter_config.json'}" if bad else None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@trap(
    "error",
    "Settings and weights of the adapter file disagree on DoRA",
    fix="Set use_dora to what it was trained with, or export it again with its magnitudes.",
    source="mlx-examples#919, outlines#1082, Megatron-Bridge#6031",
)
def dora_flag_disagrees(subject: Subject) -> str | None:
    """PEFT drops the magnitudes, or makes new ones, without a word."""
    if not subject.file_settings:
        return None
    said = bool(subject.file_settings.get("use_dora"))
    keys = [key for key, _ in _read(subject.adapter_dir)]
    count = sum("lora_magnitude_vector" in key for key in keys)
    if said == (count > 0):
        return None
    return f"use_dora is {said}, and {count} of {len(keys)} weights are magnitudes"


@trap(
    "error",
    "The adapter file holds empty weights",
    fix="Gather the weights before saving: stage3_gather_16bit_weights_on_model_save in ZeRO-3.",
    source="peft#2500, peft#2892, trl#4416",
)
def file_weights_empty(subject: Subject) -> str | None:
    """ZeRO-3 leaves an empty tensor where a weight is sharded."""
    if subject.adapter_dir is None:
        return None
    keys = list(_read(subject.adapter_dir))
    empty = [key for key, weight in keys if weight.numel() == 0]
    if not keys:
        return f"{WEIGHTS_FILE} holds no weight at all"
    return f"{len(empty)} of {len(keys)} weights: {several(empty)}" if empty else None


@trap(
    "error",
    "The adapter file holds NaN or infinity",
    fix="Take a checkpoint from before the training diverged.",
    source="peft#2049",
)
def file_weights_not_finite(subject: Subject) -> str | None:
    """The run diverged before it was saved."""
    bad = _keys_where(subject, lambda weight: not bool(torch.isfinite(weight).all()))
    return f"{len(bad)} weights: {several(bad)}" if bad else None


@trap(
    "warning",
    "The adapter file is untrained: every B is zero",
    fix="Save after training, and from the process that holds the trained weights.",
    source="peft#1402",
)
def file_weights_untrained(subject: Subject) -> str | None:
    """B starts at zero; where it is zero still, the adapter adds nothing."""
    zero, count = 0, 0
    for key, weight in _read(subject.adapter_dir):
        if ".lora_B." in f".{key}." or ".lora_embedding_B." in f".{key}.":
            count += 1
            zero += not bool(weight.any())
    return f"{zero} of {count} lora_B weights are zero" if count and zero == count else None


# The model that continues from it.


@trap(
    "error",
    "The model was to continue from an adapter, but holds other weights",
    fix="Load it: PeftModel.from_pretrained(base, FOLDER, is_trainable=True).",
    source="lerobot#3459, sentence-transformers#3701, diffusers#12689, transformers#29607",
)
def resumed_from_scratch(subject: Subject) -> str | None:
    """Wrapping the base anew gives a fresh A and a B of zero; training goes on from nothing."""
    places = _places(subject)
    if places is None:
        return None
    told = []
    keys, differ = 0, []
    for key, saved in _read(subject.adapter_dir):
        keys += 1
        here = places.get(key)
        if here is None or not _equal(saved, here):
            differ.append(key)
    if not differ:
        return None
    absent = sum(key not in places for key in differ)
    told = [f"{len(differ)} of {keys} saved weights are not in the model: {several(differ, 2)}"]
    told += [f"{absent} of them have no place there"] * bool(absent)
    told += ["every lora_B of the model is zero"] * _fresh(places)
    return "; ".join(told)


def _places(subject: Subject) -> dict[str, Tensor] | None:
    """Where the file's weights belong in the model; None without both, or without values."""
    if subject.model is None or not subject.adapted or subject.adapter_dir is None:
        return None
    if any(p.is_meta for p in subject.parameters.values()):
        return None
    if not all(entry.whole for entry in subject.adapted):
        return None
    from peft.utils import get_peft_model_state_dict

    name = subject.adapted[0].adapter if not subject.active else subject.active[0].adapter
    found: dict[str, Tensor] = get_peft_model_state_dict(
        subject.model, adapter_name=name, save_embedding_layers=False
    )
    return found


def _equal(saved: Tensor, here: Tensor) -> bool:
    """Whether the model holds a saved weight, perhaps in another precision."""
    return saved.shape == here.shape and torch.equal(saved.to(here), here)


def _fresh(places: dict[str, Tensor]) -> bool:
    factors = [weight for key, weight in places.items() if "lora_B" in key]
    return bool(factors) and not any(bool(weight.any()) for weight in factors)


@trap(
    "error",
    "The model's adapter has other settings than the folder it continues from",
    fix="Load settings and weights together, with PeftModel.from_pretrained.",
    source="peft#2733, mlx-vlm#986, mflux#449, TensorRT-LLM#1668",
)
def settings_differ_from_file(subject: Subject) -> str | None:
    """Rank, alpha and rsLoRA make the scale; with another scale the same weights mean another."""
    if not subject.adapter_settings or not subject.file_settings:
        return None
    name = subject.active[0].adapter if subject.active else next(iter(subject.adapter_settings))
    config = subject.adapter_settings.get(name)
    differ = [
        f"{key} is {getattr(config, key)!r}, in the folder {value!r}"
        for key, value in _meaningful(subject.file_settings)
        if (getattr(config, key, None) or None) != (value or None)
    ]
    return "; ".join(differ) if differ else None


def _meaningful(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    yield from ((key, settings[key]) for key in keys if key in settings)

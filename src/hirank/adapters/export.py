"""Adapter files on disk, in PEFT's format: checked before they are believed.

A folder holds `adapter_config.json` and `adapter_model.safetensors`. PEFT fills what is missing
in the settings with defaults, so a lost alpha or a lost `use_dora` loads without a word and
computes something else. Here it is an error.
"""

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from hirank.errors import HirankError

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "check_adapter", "load_adapter", "read_settings"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# What PEFT raises over settings it cannot use.
_PEFT_REFUSES = (
    OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, re.error,
)  # fmt: skip


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the adapter in `folder`. Raises HirankError if they cannot be read."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        what = f"has no {CONFIG_FILE}" if folder.is_dir() else "is no folder"
        raise HirankError(f"{folder} {what}: give the folder of an adapter in PEFT's format.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise HirankError(f"{path} cannot be read as JSON; take it from the run again.") from None
    if not isinstance(settings, dict):
        raise HirankError(f"{path} holds no settings; take it from the run again.")
    return settings


def check_adapter(folder: Path) -> dict[str, Any]:
    """The settings of a LoRA or DoRA adapter whose files say all that the forward needs.

    Raises HirankError: rank or alpha are missing (the scale would be a guess), or settings and
    weights disagree on whether there are magnitudes.
    """
    settings = read_settings(folder)
    if not isinstance(settings.get("peft_type"), str):
        raise HirankError(f"{folder / CONFIG_FILE} has no peft_type; take it from the run again.")
    if settings["peft_type"] != "LORA":
        return settings
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        if settings.get(key) is None:
            raise HirankError(
                f"{folder / CONFIG_FILE} has no {key}, without which the adapter's strength is "
                "unknown; add the value it was trained with."
            )
        if not isinstance(settings[key], kinds) or isinstance(settings[key], bool):
            raise HirankError(
                f"{folder / CONFIG_FILE} has {key}: {settings[key]!r}, which is no number; "
                "write the value it was trained with."
            )
    magnitudes = any("lora_magnitude_vector" in key for key in _keys(folder / WEIGHTS_FILE))
    if magnitudes and not settings.get("use_dora"):
        raise HirankError(
            f"{folder / WEIGHTS_FILE} holds lora_magnitude_vector weights but use_dora is not "
            "true in the settings; set it, or the trained magnitudes would be dropped."
        )
    if settings.get("use_dora") and not magnitudes:
        raise HirankError(
            f"{folder / CONFIG_FILE} says use_dora but the weights hold no "
            "lora_magnitude_vector; export the adapter again, with its magnitudes."
        )
    return settings


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as weights:
            return list(weights.keys())
    except (OSError, SafetensorError) as error:
        raise HirankError(
            f"{path} cannot be read as safetensors ({error}); take it from the run again."
        ) from None


def load_adapter(
    model: nn.Module, folder: Path, *, name: str = "default", trainable: bool = False
) -> nn.Module:
    """The base model with the adapter from `folder` on it, its layers converted.

    Args:
        model: a Transformers model or any module PEFT can wrap.
        folder: an adapter in PEFT's format.
        name: what to call the adapter in the model.
        trainable: whether its weights want gradients.

    Raises:
        HirankError: the files are incomplete (see `check_adapter`) or do not fit the model.
    """
    from peft import PeftModel

    from hirank.adapters.peft import accelerate, unmatched_keys

    settings = check_adapter(folder)
    try:
        wrapped: nn.Module = PeftModel.from_pretrained(
            model,
            str(folder),
            adapter_name=name,
            is_trainable=trainable,
        )
    except _PEFT_REFUSES as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        raise HirankError(f"The adapter {folder} does not fit its base model: {reason}.") from error
    if settings["peft_type"] != "LORA":
        return wrapped
    strangers = unmatched_keys(wrapped, name, _keys(folder / WEIGHTS_FILE))
    if strangers:
        raise HirankError(
            f"The adapter {folder} does not fit its settings or its base model: "
            f"{len(strangers)} weights are on one side only, {strangers[0]} first; take the "
            "folder from the run again."
        )
    return accelerate(wrapped)

"""`hirank doctor TARGET`: open a training configuration or an adapter folder, and examine it.

Models are built from their shapes alone, on the meta device: no weights are read or made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.doctor.examine import examine
from hirank.doctor.finding import Report
from hirank.doctor.settings import settings_of
from hirank.doctor.subject import Subject
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.train.config import TrainConfig

__all__ = ["open_and_examine"]

ADAPTER_FILE = "adapter_config.json"


def open_and_examine(
    target: Path,
    *,
    base: str | None = None,
    overrides: Iterable[str] = (),
    world_size: int = 1,
) -> Report:
    """The report on a configuration file or an adapter folder.

    Args:
        target: a YAML file that `hirank train` reads, or a folder with adapter_config.json.
        base: the adapter's base model, a folder or a Hub name. Default: the one it names, if
            that is a folder here; without one only the adapter's files are examined.
        overrides: `a.b=c` settings laid over the configuration.
        world_size: how many processes will train together.

    Raises:
        HirankError: it is neither, or cannot be read; the configuration is wrong.
    """
    if target.is_dir():
        return examine(_adapter(_adapter_folder(target), base, world_size))
    if base is not None:
        raise HirankError(f"--base goes with an adapter folder; {target} names its own model.")
    return examine(_configuration(target, overrides, world_size))


def _adapter_folder(target: Path) -> Path:
    """The folder itself, or the adapter in the folder of a run."""
    for folder in (target, target / "adapter"):
        if (folder / ADAPTER_FILE).is_file():
            return folder
    raise HirankError(
        f"{target} holds no {ADAPTER_FILE}: give an adapter folder or the YAML file of a training."
    )


# A training to come.


def _configuration(path: Path, overrides: Iterable[str], world_size: int) -> Subject:
    from hirank.train.config import load_config, resolved

    config = resolved(load_config(path, overrides))
    model = _shapes(config)
    return Subject(
        wrapped=model,
        settings=settings_of(config),
        batch=_one_row(model),
        world_size=world_size,
        samples=_samples(config),
    )


def _shapes(config: TrainConfig) -> Any:
    """The model that would be trained, without values."""
    from hirank.train.methods import check, lora_config
    from hirank.train.model import load_architecture, meta_model

    architecture = load_architecture(config.model)
    bare = meta_model(config.model, architecture)
    if not config.method.method.adapter:
        return bare
    try:
        return _wrapped(bare, lora_config(config.method), ours=config.method.accelerate)
    except ValueError as error:
        check(meta_model(config.model, architecture), config.method)  # says it better
        raise HirankError(f"PEFT refuses the settings under method: {error}") from error


def _wrapped(bare: Any, settings: Any, *, ours: bool) -> Any:
    import warnings

    from peft import get_peft_model

    from hirank.adapters.peft import accelerate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT warns of is found by name
        model = get_peft_model(bare, settings)
        return accelerate(model) if ours else model


SAMPLES = 16


def _samples(config: TrainConfig) -> dict[str, Any]:
    """Some base weights as they will be trained: those of full training in half precision."""
    import torch
    from safetensors import safe_open

    from hirank.train.model import locate

    source = locate(config.model.name)
    wanted = not config.method.method.adapter and config.model.dtype == "bfloat16"
    if not (wanted and source.local) or source.gguf:
        return {}
    found: dict[str, Any] = {}
    for file in sorted(Path(source.name).glob("*.safetensors"))[:1]:
        with safe_open(file, framework="pt") as weights:
            for key in list(weights.keys())[:: max(1, len(weights.keys()) // SAMPLES)]:
                found[key] = weights.get_tensor(key).to(torch.bfloat16)
    return found


def _one_row(model: Any) -> dict[str, Any] | None:
    """A batch of shapes alone, to see which layers run."""
    import torch

    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    return {"input_ids": torch.zeros(1, 4, dtype=torch.long, device="meta")}


# An adapter that is there.


def _adapter(folder: Path, base: str | None, world_size: int) -> Subject:
    model = _shapes_under(folder, base)
    return Subject(wrapped=model, adapter_dir=folder, world_size=world_size)


def _shapes_under(folder: Path, base: str | None) -> Any:
    """The base model with an adapter of the folder's settings, without values; None without one."""
    from hirank.adapters.export import read_settings

    settings = read_settings(folder)
    named = settings.get("base_model_name_or_path")
    if base is None and isinstance(named, str) and Path(named).is_dir():
        base = named
    if base is None or settings.get("peft_type") != "LORA":
        return None
    from peft import LoraConfig

    from hirank.train.model import ModelConfig, load_architecture, meta_model

    config = ModelConfig(name=base)
    bare = meta_model(config, load_architecture(config))
    try:
        adapter = LoraConfig.from_pretrained(str(folder))
        adapter.inference_mode = False
        return _wrapped(bare, adapter, ours=True)
    except (ValueError, TypeError) as error:
        raise HirankError(f"The adapter {folder} does not fit {base}: {error}") from error

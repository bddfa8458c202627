"""The run that this one goes on from, and whether its first steps had another size.

parent    run.parent; else the run whose folder the base model lies in, or none
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hirank.adapters.export import CONFIG_FILE, check_adapter
from hirank.audit.scaling import Setting, advise
from hirank.errors import HirankError
from hirank.train.method import METHODS

if TYPE_CHECKING:
    from hirank.train.config import TrainConfig

__all__ = ["FACTOR", "setting_of", "step_notice"]

FACTOR = 2.0
"""Steps that differ by no more than this are told nothing about."""


def step_notice(config: TrainConfig) -> str | None:
    """What to say where a (resolved) configuration steps unlike its parent run; None: nothing.

    Raises HirankError if run.parent is neither a run nor an adapter.
    """
    found = _parent(config)
    after = setting_of(config.model_dump(mode="json"))
    if found is None or after is None:
        return None
    folder, before = found
    advice = advise(before if before.lr else replace(before, lr=after.lr), after, power=1)
    if 1 / FACTOR <= advice.ratio <= FACTOR:
        return None
    alpha = f" or method.alpha to {advice.alpha:.4g}" if advice.alpha is not None else ""
    return (
        f"The first steps are {advice.ratio:.3g} times as large as those of {folder} "
        f"({advice.before} at {advice.before.lr:g} there, {after} at {after.lr:g} here): to keep "
        f"them, set optim.lr to {advice.lr:.4g}{alpha}."
    )


def setting_of(config: dict[str, Any]) -> Setting | None:
    """What decides the first step of a run with these resolved settings; None: no adapter."""
    method, optim = (part if isinstance(part, dict) else {} for part in _parts(config))
    known = METHODS.get(str(method.get("name")))
    rank, alpha, lr = method.get("r"), method.get("alpha"), optim.get("lr")
    if known is None or not known.adapter or not (rank and alpha and lr):
        return None
    return Setting(
        rank=rank,
        alpha=alpha,
        rslora=known.lora.get("use_rslora", False),
        dora=known.lora.get("use_dora", False),
        lr=lr,
    )


def _parts(config: dict[str, Any]) -> tuple[Any, Any]:
    return config.get("method"), config.get("optim")


def _parent(config: TrainConfig) -> tuple[Path, Setting] | None:
    """The parent's folder and settings; a learning rate of 0 is one that nobody wrote down."""
    named = config.run.parent
    folder = _run_around(Path(config.model.name) if named is None else named)
    if folder is not None:
        before = setting_of(_settings(folder))
        return None if before is None else (folder, before)
    if named is None:
        return None
    if not (named / CONFIG_FILE).is_file():
        raise HirankError(
            f"run.parent is {named}, which is neither a run nor an adapter: name the folder of one."
        )
    settings = check_adapter(named)
    return (named, _of_adapter(settings)) if settings["peft_type"] == "LORA" else None


def _run_around(folder: Path) -> Path | None:
    """The run that a folder is, or is a part of, such as its adapter; a Hub name is no folder."""
    around = [folder, *folder.absolute().parents[:2]] if os.path.isdir(folder) else []
    files = ("config.yaml", "log.jsonl")
    return next((at for at in around if all((at / file).is_file() for file in files)), None)


def _settings(run: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise HirankError(
            f"{run / 'config.yaml'} cannot be read: restore the file of the run."
        ) from error
    return read if isinstance(read, dict) else {}


def _of_adapter(settings: dict[str, Any]) -> Setting:
    return Setting(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
        lr=0.0,
    )

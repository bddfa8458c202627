"""What the configuration of a trainer says, as far as the doctor asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Settings", "settings_of"]


@dataclass(frozen=True)
class Settings:
    """None: not told."""

    trainer: bool = False
    """A trainer was configured: it calls model.train(), and makes the optimizer, by itself."""
    lr: float | None = None
    """Peak learning rate."""
    fp16: bool = False
    """Training under fp16 autocast with a gradient scaler."""
    deepspeed: bool = False
    """Master weights are kept elsewhere."""
    max_length: int | None = None
    """Longest row in tokens."""
    find_unused_parameters: bool | None = None
    world_size: int = 1


def settings_of(config: Any) -> Settings:
    """From a `hirank train` configuration, Transformers' or TRL's arguments, or a dict of those."""
    if config is None:
        return Settings()
    if hasattr(config, "optim") and hasattr(config, "method"):
        return _ours(config)
    return _theirs(config if isinstance(config, Mapping) else _Attributes(config))


class _Attributes:
    """An object's attributes, asked for like the keys of a dict."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.thing, name, default)


def _ours(config: Any) -> Settings:
    return Settings(
        trainer=True,
        lr=config.optim.lr or config.method.method.learning_rate,
        max_length=config.data.max_length,
    )


def _theirs(config: Mapping[str, Any] | _Attributes) -> Settings:
    return Settings(
        trainer=True,
        lr=config.get("learning_rate"),
        fp16=bool(config.get("fp16")),
        deepspeed=bool(config.get("deepspeed")),
        max_length=config.get("max_length"),
        find_unused_parameters=config.get("ddp_find_unused_parameters"),
        world_size=config.get("world_size") or 1,
    )

"""What the doctor examines: all that was handed to it, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.adapters.export import read_settings
from hirank.doctor import layers
from hirank.doctor.layers import Adapted
from hirank.doctor.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """A model and what surrounds it; None where it was not given."""

    wrapped: nn.Module | None = None
    """The model as given, perhaps inside DistributedDataParallel."""
    optimizer: Optimizer | None = None
    settings: Settings = field(default_factory=Settings)
    adapter_dir: Path | None = None
    """The adapter folder that is examined, or that the model continues from."""
    batch: Mapping[str, Any] | None = None
    """One batch as the model gets it: input_ids [B, T], attention_mask, labels."""
    tokenizer: Any = None
    scaler: Any = None
    """The GradScaler of the training loop."""
    world_size: int = 1
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights that will be trained, in the precision they will have, where the model has none."""

    @cached_property
    def model(self) -> nn.Module | None:
        """The model itself."""
        return None if self.wrapped is None else layers.unwrapped(self.wrapped)

    @cached_property
    def adapted(self) -> list[Adapted]:
        """Every adapter on every layer."""
        return [] if self.model is None else list(layers.adapted_layers(self.model))

    @cached_property
    def active(self) -> list[Adapted]:
        """Those that take part in the forward."""
        return [entry for entry in self.adapted if entry.active]

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter of the model once, by name."""
        return {} if self.model is None else dict(self.model.named_parameters())

    @cached_property
    def trainable(self) -> dict[str, Tensor]:
        """Those that require gradients."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @cached_property
    def adapter_settings(self) -> dict[str, Any]:
        """The LoraConfig of every adapter."""
        return {} if self.model is None else layers.settings_by_adapter(self.model)

    @cached_property
    def file_settings(self) -> dict[str, Any]:
        """adapter_config.json of the folder, {} without a folder or for another kind of adapter."""
        found = {} if self.adapter_dir is None else read_settings(self.adapter_dir)
        return found if found.get("peft_type", "LORA") == "LORA" else {}

    @cached_property
    def ran(self) -> set[str] | None:
        """Names of the adapted layers that the batch runs through; None if that is not known."""
        from hirank.doctor.probe import layers_that_ran

        if self.model is None or self.batch is None or not self.adapted:
            return None
        return layers_that_ran(self.model, self.batch, self.adapted)

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return max(self.world_size, self.settings.world_size)

    def looked_at(self) -> tuple[str, ...]:
        """What there is to examine, in words."""
        there = {
            "model": self.wrapped is not None,
            f"{len(self.adapted)} adapted layers": bool(self.adapted),
            "optimizer": self.optimizer is not None,
            "configuration": self.settings.trainer,
            "adapter folder": self.adapter_dir is not None,
            "batch": self.batch is not None,
        }
        return tuple(what for what, given in there.items() if given)

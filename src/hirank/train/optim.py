"""How the weights are moved, and how TRL is told so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from hirank.train.strict import Strict

if TYPE_CHECKING:
    from hirank.train.config import TrainConfig

__all__ = ["OptimConfig", "interval", "planned_steps", "trainer_settings"]


class OptimConfig(Strict):
    """How the weights are moved."""

    lr: PositiveFloat | None = None
    """Peak learning rate. Default: 2e-4 for adapters; for all weights 1e-5, and 4e-5 for galore,
    qgalore and fira, whose scale makes 1e-5 of it."""

    epochs: PositiveFloat = 1.0
    """Passes over the data."""

    max_steps: PositiveInt | None = None
    """Optimizer steps, whatever the number of epochs."""

    batch_size: PositiveInt = 8
    """Rows in one forward pass."""

    grad_accum: PositiveInt = 1
    """Forward passes in one optimizer step."""

    scheduler: Literal["cosine", "linear", "constant", "constant_with_warmup"] = "cosine"
    """How the learning rate goes on after the warmup."""

    warmup: NonNegativeFloat = 0.03
    """Steps until the learning rate is at its peak; below 1 a share of the run."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""

    clip: NonNegativeFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down. 0 = no limit."""

    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of initialisation, data order and dropout."""


def planned_steps(optim: OptimConfig, rows: int) -> int:
    """Optimizer steps of a whole run over `rows` rows."""
    if optim.max_steps is not None:
        return optim.max_steps
    per_epoch = math.ceil(math.ceil(rows / optim.batch_size) / optim.grad_accum)
    return math.ceil(optim.epochs * per_epoch)


def trainer_settings(config: TrainConfig, *, steps: int, gpu: bool) -> dict[str, Any]:
    """The part of TRL's arguments that follows from a (resolved) configuration."""
    optim, run = config.optim, config.run
    return {
        "num_train_epochs": optim.epochs,
        "max_steps": steps if optim.max_steps is not None else -1,
        "per_device_train_batch_size": optim.batch_size,
        "per_device_eval_batch_size": config.eval.batch_size,
        "gradient_accumulation_steps": optim.grad_accum,
        "gradient_checkpointing": optim.checkpointing,
        "learning_rate": optim.lr,
        "lr_scheduler_type": optim.scheduler,
        "warmup_steps": optim.warmup,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "max_grad_norm": optim.clip,
        "seed": optim.seed,
        "data_seed": optim.seed,
        "bf16": gpu,
        "use_cpu": not gpu,
        "logging_steps": run.log_every,
        "save_strategy": "steps",
        "save_steps": interval(run.save_every, steps),
    }


def interval(setting: float, steps: int) -> int:
    """Steps from one time to the next; below 1 `setting` is a share of the run, 0 means never."""
    if setting == 0:
        return steps + 1
    return max(1, round(setting if setting >= 1 else setting * steps))

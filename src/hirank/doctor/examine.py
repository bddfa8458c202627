"""`diagnose`: look for every trap in what is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.doctor.finding import Report
from hirank.doctor.settings import settings_of
from hirank.doctor.subject import Subject
from hirank.errors import HirankError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["diagnose", "examine"]


def diagnose(
    model: nn.Module | None = None,
    *,
    optimizer: Optimizer | None = None,
    config: Any = None,
    adapter_dir: str | Path | None = None,
    batch: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    scaler: Any = None,
    world_size: int = 1,
) -> Report:
    """Traps that a training setup is about to fall into. Call it right before the first step.

    The more it is given, the more it sees; it changes nothing. Only `batch` costs a forward.

    Args:
        model: a PEFT model, converted or not, perhaps inside DistributedDataParallel.
        optimizer: the optimizer of a training loop of your own.
        config: a `hirank train` configuration, Transformers' TrainingArguments or TRL's
            SFTConfig, or a dict of their fields.
        adapter_dir: an adapter folder in PEFT's format that the model is to continue from, or
            to be examined on its own.
        batch: one batch as the model gets it: input_ids [B, T], attention_mask, labels.
        tokenizer: whose padding and end tokens the batch was made with.
        scaler: the GradScaler of the training loop.
        world_size: how many processes train together.

    Returns:
        A report, true if anything was found: `str(report)`, `report.findings`.

    Raises:
        HirankError: nothing was given, the adapter folder cannot be read, or `model` is no module.
    """
    from torch import nn

    if model is not None and not isinstance(model, nn.Module):
        raise HirankError(f"diagnose got a {type(model).__name__}: give it a torch.nn.Module.")
    if model is None and adapter_dir is None:
        raise HirankError("diagnose got neither a model nor an adapter folder: give it one.")
    return examine(
        Subject(
            wrapped=model,
            optimizer=optimizer,
            settings=settings_of(config),
            adapter_dir=None if adapter_dir is None else Path(adapter_dir),
            batch=batch,
            tokenizer=tokenizer,
            scaler=scaler,
            world_size=world_size,
        )
    )


def examine(subject: Subject) -> Report:
    """Look for every trap of the registry; errors come first."""
    from hirank.doctor.registry import TRAPS

    found = [finding for trap in TRAPS if (finding := trap.examine(subject)) is not None]
    found.sort(key=lambda finding: finding.level != "error")
    return Report(tuple(found), subject.looked_at())

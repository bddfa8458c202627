"""One forward of a batch, to see which adapted layers run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hirank.doctor.layers import Adapted

__all__ = ["layers_that_ran"]


def layers_that_ran(
    model: nn.Module, batch: Mapping[str, Any], adapted: Sequence[Adapted]
) -> set[str] | None:
    """Names of the adapted layers that a forward of the batch calls.

    Random state is left as it was. On the meta device a forward costs nothing; None for a model
    that cannot run there.
    """
    ran: set[str] = set()
    hooks = [
        entry.layer.register_forward_pre_hook(lambda *_, name=entry.name: ran.add(name))
        for entry in adapted
    ]
    devices = {p.device for p in model.parameters()}
    try:
        _forward(model, batch, [device for device in devices if device.type == "cuda"])
    except RuntimeError:
        if {device.type for device in devices} != {"meta"}:
            raise
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return ran | {entry.name for entry in adapted if _inside(entry.name, ran)}


def _forward(model: nn.Module, batch: Mapping[str, Any], gpus: list[torch.device]) -> None:
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(gpus):
        warnings.simplefilter("ignore")  # a checkpoint without gradients says so
        model(**batch)


def _inside(name: str, ran: set[str]) -> bool:
    """Attention's own output projection is used by the layer around it, without a call."""
    return any(name.startswith(f"{outer}.") for outer in ran)

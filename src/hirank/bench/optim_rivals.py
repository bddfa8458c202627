"""The optimisers of others, each imported only where it is asked for."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from hirank.errors import HirankError
from hirank.optim.groups import model_groups
from hirank.optim.hyper import Hyper

__all__ = ["PerLayer", "adamw_8bit", "galore_torch", "galore_torch_8bit"]


def galore_torch(
    model: nn.Module, *, rank: int, gap: int, scale: float, lr: float
) -> torch.optim.Optimizer:
    """galore-torch's GaLoreAdamW on the parameters that ours would project, with AdamW's eps."""
    groups = _galore_groups(model, rank, gap, scale)
    made: torch.optim.Optimizer = _galore_package().GaLoreAdamW(
        groups, lr=lr, eps=1e-8, weight_decay=0.0, no_deprecation_warning=True
    )
    return made


def galore_torch_8bit(
    model: nn.Module, *, rank: int, gap: int, scale: float, lr: float
) -> PerLayer:
    """galore-torch's 8-bit optimiser, one a parameter, stepped in backward as its script does.

    It hands its settings to bitsandbytes by position. From 0.50 on two of them land on max_unorm
    and skip_zeros, and nothing would ever move; they are put right here.
    """
    if not torch.cuda.is_available():
        raise HirankError("galore-torch's 8-bit optimiser needs a GPU.")
    cls = _galore_package().GaLoreAdamW8bit
    made: dict[Tensor, Any] = {}
    for group in _galore_groups(model, rank, gap, scale):
        for p in group["params"]:
            made[p] = cls([{**group, "params": [p]}], lr=lr, weight_decay=0.0)
            made[p].args.max_unorm, made[p].args.skip_zeros = 0.0, False
    return PerLayer(made)


def adamw_8bit(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with block-wise 8-bit moments."""
    cls = _package("bitsandbytes.optim", "bitsandbytes").AdamW8bit
    made: torch.optim.Optimizer = cls(list(model.parameters()), lr=lr, weight_decay=0.0)
    return made


class PerLayer:
    """One optimiser a parameter, each stepping as soon as its gradient is there."""

    def __init__(self, made: dict[Tensor, torch.optim.Optimizer]) -> None:
        self.made = made
        parameters: list[Any] = list(made)
        step = weakref.WeakMethod(self._step)  # a hook that keeps us would keep the model, too
        for p in parameters:
            p.register_post_accumulate_grad_hook(lambda p: call(p) if (call := step()) else None)

    def _step(self, p: Tensor) -> None:
        self.made[p].step()
        self.made[p].zero_grad()

    def step(self) -> None:
        """Everything has been stepped in backward."""

    def zero_grad(self) -> None:
        """There are no gradients."""

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Of all parameters."""
        return {p: state for one in self.made.values() for p, state in one.state.items()}


def _galore_groups(model: nn.Module, rank: int, gap: int, scale: float) -> list[dict[str, Any]]:
    more = {"rank": rank, "update_proj_gap": gap, "scale": scale, "proj_type": "std"}
    return [
        {"params": [p for _, p in group["params"]], **(more if group["rank"] else {})}
        for group in model_groups(model, Hyper(rank=rank))
    ]


def _galore_package() -> Any:
    return _package("galore_torch", "galore-torch bitsandbytes")


def _package(module: str, names: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HirankError(f"{module} cannot be imported ({error}): pip install {names}.") from error

"""An optimizer's step trains the adapters that are active, and no other.

An adapter that was switched off may still hold a gradient: of micro-batches before the switch, or
of zeros, with which AdamW goes on decaying its weights. So for the length of a step, of whatever
optimizer, such gradients are taken aside. They are put back after it, because a switch may be
short: trainers run a reference adapter between two micro-batches.
"""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["forget_steps", "watch_steps"]

_layers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_aside: "weakref.WeakKeyDictionary[Any, list[tuple[Tensor, Tensor]]]" = weakref.WeakKeyDictionary()


def watch_steps(layer: nn.Module) -> None:
    """From now on, steps leave this layer's inactive adapters alone."""
    _layers.add(layer)


def forget_steps(layer: nn.Module) -> None:
    """Undo `watch_steps`."""
    _layers.discard(layer)


def _before(optimizer: Any, *_: Any) -> None:
    _after(optimizer)  # of a step that failed
    still = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if not p.requires_grad and p.grad is not None
    ]
    if not still:
        return
    inactive = {id(p): name for layer in list(_layers) for name, p in _inactive(layer)}
    found = [p for p in still if id(p) in inactive]
    if any(p.grad.any() for p in found):
        names = sorted({inactive[id(p)] for p in found})
        warnings.warn(
            f"An optimizer was to step adapters that are not active ({', '.join(names)}): they "
            "keep their gradients, and train when they are active at a step.",
            stacklevel=3,
        )
    _aside[optimizer] = [(p, p.grad) for p in found]
    for p in found:
        p.grad = None


def _after(optimizer: Any, *_: Any) -> None:
    for p, grad in _aside.pop(optimizer, []):
        p.grad = grad


def _inactive(layer: Any) -> Iterator[tuple[str, Tensor]]:
    for kind in layer.adapter_layer_names:
        held = getattr(layer, kind)
        for name, part in held.items():
            if name not in layer.active_adapters:
                parts = [part] if isinstance(part, Tensor) else part.parameters()
                yield from ((name, p) for p in parts)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)

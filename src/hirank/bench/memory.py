"""Bytes: what a forward keeps for its backward, and what an arm holds on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["cache_bytes", "saved_bytes", "size", "state_bytes"]


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Held:
    """What a graph keeps in place of a tensor, so that one can see when the graph lets go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that saved itself would never be freed


def saved_bytes(forward: Callable[[], Tensor], owned: Iterable[Tensor]) -> int:
    """Bytes that autograd still keeps after `forward()`, without what `owned` keeps anyway.

    A storage counts once and whole, even if a view of it is what was saved. A graph that was
    dropped on the way (a norm that is detached) keeps nothing.
    """
    ours = {tensor.untyped_storage().data_ptr() for tensor in owned}
    seen: list[weakref.ref[_Held]] = []

    def pack(tensor: Tensor) -> _Held:
        held = _Held(tensor)
        seen.append(weakref.ref(held))
        return held

    with saved_tensors_hooks(pack, lambda held: held.tensor):
        result = forward()
    alive = [held.tensor for ref in seen if (held := ref()) is not None]
    del result
    return size(one for one in alive if one.untyped_storage().data_ptr() not in ours)


def cache_bytes(model: nn.Module) -> int:
    """Bytes of the norms that hirank's layers keep beside the model.

    They also remember whose norms these are; the weights themselves do not count.
    """
    owned = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    return size(
        tensor
        for module in model.modules()
        for tensor in _tensors_in(getattr(module, "_hirank_norms", None))
        if tensor.untyped_storage().data_ptr() not in owned
    )


def _tensors_in(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif is_dataclass(thing):
        thing = [getattr(thing, one.name) for one in fields(thing)]
    if not isinstance(thing, list | tuple):
        return []
    return [tensor for part in thing for tensor in _tensors_in(part)]


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Bytes of an optimizer's state for `parameters`."""
    return size(
        value
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.device == parameter.device
    )

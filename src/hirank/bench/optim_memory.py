"""Bytes of a training step: what the weights and the state hold, and the peak while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hirank.bench.memory import size
from hirank.optim.weights import Int8Weight

__all__ = ["LivePeak", "Peak", "peak_of", "state_bytes", "weight_bytes"]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights as they are stored, int8 ones by their codes."""
    parts: list[Tensor] = []
    for p in model.parameters():
        parts += [p.codes, p.scale, p.low] if isinstance(p, Int8Weight) else [p.detach()]
    return size(parts)


def state_bytes(state: dict[Any, dict[str, Any]]) -> int:
    """Bytes of the tensors in an optimiser's state, galore-torch's bases included; step counters
    that are tensors are no state."""
    found = (value for entry in state.values() for value in _tensors(entry.values()))
    return size(value for value in found if value.dim())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        value = getattr(value, "ortho_matrix", value)
        if isinstance(value, Tensor):
            yield value


class LivePeak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations made and that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`, then looks at what it made; an int8 weight's own operations come here."""
        if any(issubclass(kind, Int8Weight) for kind in types):
            return NotImplemented
        before = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if _is_plain(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if _is_plain(tensor) and tensor.untyped_storage().data_ptr() not in before:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, count: int) -> None:
        self.now -= count


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Int8Weight)


class Peak:
    """The peak of a block, known at its end."""

    bytes = 0


@contextmanager
def peak_of(device: torch.device, held: int) -> Iterator[Peak]:
    """The allocator's peak on a GPU; on a CPU `held`, and the peak of what the block makes."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.bytes = torch.cuda.max_memory_allocated(device)
        return
    with LivePeak() as live:
        yield found
    found.bytes = held + live.peak

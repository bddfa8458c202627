"""Batches in which every sample has an adapter of its own.

    y[i] = g_a (x[i] W^T + s_a (x[i] A_a^T) B_a^T) + b        a = the adapter of sample i

Samples of one adapter run together, wherever they stand in the batch, and come back in place. g_a
is the gain of that adapter; a sample without one gets the frozen layer's output.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["BASE", "by_adapter", "mixed_forward"]

BASE = "__base__"
"""What stands for no adapter."""

Run = Callable[[Tensor | None, str | None], Tensor]
"""Computes the samples at these places [S], or all of them, with one adapter, or with none."""


def by_adapter(names: Sequence[str], held: Sequence[str]) -> dict[str | None, list[int]]:
    """The samples of each adapter; None: of those that name no adapter in `held`."""
    found: dict[str | None, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name if name in held else None, []).append(place)
    return found


def mixed_forward(
    names: Sequence[str], held: Sequence[str], device: torch.device, run: Run
) -> Tensor:
    """The outputs of a batch, [S, ...].

    Args:
        names: the adapter of each sample; an unknown one, `BASE` say, means none.
        held: the adapters that the layer has.
        device: where the batch lies.
        run: the layer.
    """
    parts = by_adapter(names, held)
    if len(parts) == 1:
        return run(None, next(iter(parts)))
    out: Tensor | None = None
    for name, places in parts.items():
        rows = torch.tensor(places, device=device)
        y = run(rows, name)
        if out is None:
            out = y.new_empty(len(names), *y.shape[1:])
        out = out.index_copy_(0, rows, y)
    assert out is not None  # no samples make one part
    return out

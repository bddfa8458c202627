"""What an adapted embedding computes: rows of the base table, each adapter's rows added in turn.

    y_k = g_k (y_{k-1} + s_k e A_k[:, ids]^T B_k^T)        g_k = m_k / ||W^T + s_k B_k A_k||

One gain for each of the D embedding dimensions, so the norm runs over the vocabulary (PEFT's axis).
e is what some models multiply their embeddings with after the lookup; the base output holds it
already. There is no dropout: an adapter's branch begins with a lookup.

Shapes     ids [...]; W [V, D]; A [R, V]; B [D, R]; m, g [D]; y [..., D].
           V entries of the vocabulary, D dimensions, R rank.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.adapters.layers import Adapter
from hirank.kernels.dora_compose import dora_compose

__all__ = ["Table", "embedding_forward"]


class Table(NamedTuple):
    """The frozen table and what its lookup does besides."""

    lookup: Callable[[Tensor], Tensor]  # [...] to a new [..., D], e included
    weight: Tensor  # [V, D]
    padding_idx: int | None  # gets no gradient
    scale_grad_by_freq: bool
    stretch: Tensor | None  # e, one element


def embedding_forward(
    ids: Tensor, table: Table, adapters: Sequence[Adapter], backend: str = "auto"
) -> Tensor:
    """The layer with any number of adapters: ids [...] to [..., D] in the dtype of the lookup.

    Args:
        ids: integers, any shape.
        table: the frozen part.
        adapters: in the order in which they stack; A [R, V], B [D, R]. Dropout is not looked at.
        backend: as in `dora_compose`.
    """
    found = table.lookup(ids)
    y = found.reshape(-1, found.shape[-1])
    with _without_autocast(y.device.type):  # a lookup is not cast, nor is what it meets
        for adapter in adapters:
            y = _add_adapter(y, ids.reshape(-1), table, adapter, backend)
    return y.view(found.shape)


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _add_adapter(y: Tensor, ids: Tensor, table: Table, adapter: Adapter, backend: str) -> Tensor:
    A, B, magnitude, scale, _, norms, *_ = adapter
    hidden = F.embedding(
        ids, A.T, table.padding_idx, scale_grad_by_freq=table.scale_grad_by_freq
    )  # [M, R]
    if table.stretch is not None:
        hidden = hidden * table.stretch.to(table.weight.dtype).to(hidden.dtype)
    # added inside the GEMM; out of place, or a gradient would be copied on its way back
    joined = torch.addmm(y, hidden.to(y.dtype), B.to(y.dtype).T, alpha=scale)
    if magnitude is None or norms is None:
        return joined
    norm = norms.norm(table.weight.T, A, B, scale, y.dtype)
    return dora_compose(None, joined, magnitude, norm, scale=1, backend=backend)

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
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.adapters.layers import Adapter
from hirank.adapters.owned_embedding import ownable, owned_embedding
from hirank.adapters.viewed_norms import ViewedNormCache
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
    if len(adapters) == 1 and _owns(ids, table, adapters[0], backend):
        return _owned(ids, table, adapters[0])
    found = table.lookup(ids)
    y = found.reshape(-1, found.shape[-1])
    with _without_autocast(y.device.type):  # a lookup is not cast, nor is what it meets
        for adapter in adapters:
            y = _add_adapter(y, ids.reshape(-1), table, adapter, backend)
    return y.view(found.shape)


def _owns(ids: Tensor, table: Table, adapter: Adapter, backend: str) -> bool:
    """Whether one node of autograd is to stand for the whole layer."""
    return (
        not torch.compiler.is_compiling()
        and backend != "torch"
        and type(table.lookup) is nn.Embedding
        and table.stretch is None
        and not table.scale_grad_by_freq
        and ownable(ids, table.weight, adapter.lora_A, adapter.lora_B)
    )


def _owned(ids: Tensor, table: Table, adapter: Adapter) -> Tensor:
    A, B, magnitude, scale, *_ = adapter
    norm = _norm(table.weight, adapter, table.weight.dtype)
    with _without_autocast(table.weight.device.type):
        return owned_embedding(
            ids, table.weight, A, B, magnitude, norm, scale=scale, padding=table.padding_idx
        )


def _norm(weight: Tensor, adapter: Adapter, dtype: torch.dtype) -> Tensor | None:
    """||W^T + s B A|| for each dimension; None with plain LoRA."""
    A, B, magnitude, scale, _, norms, *_ = adapter
    if magnitude is None or norms is None:
        return None
    if isinstance(norms, ViewedNormCache):
        return norms.norm(*norms.views(weight, A, B), scale, dtype)
    return norms.norm(weight.T, A, B, scale, dtype)


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _add_adapter(y: Tensor, ids: Tensor, table: Table, adapter: Adapter, backend: str) -> Tensor:
    A, B, magnitude, scale, *_ = adapter
    hidden = F.embedding(
        ids, A.T, table.padding_idx, scale_grad_by_freq=table.scale_grad_by_freq
    )  # [M, R]
    if table.stretch is not None:
        hidden = hidden * table.stretch.to(table.weight.dtype).to(hidden.dtype)
    # added inside the GEMM; out of place, or a gradient would be copied on its way back
    joined = torch.addmm(y, hidden.to(y.dtype), B.to(y.dtype).T, alpha=scale)
    norm = _norm(table.weight, adapter, y.dtype)
    if magnitude is None or norm is None:
        return joined
    return dora_compose(None, joined, magnitude, norm, scale=1, backend=backend)

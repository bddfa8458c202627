"""The loss as the trainers compute it, with the tensors that they make on a GPU.

plain      Transformers' own: all logits, in fp32 too
chunked    TRL's head without logits: tiles of [4096 tokens, 32768 words], of every token
trl        the same, of the labelled tokens alone
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hirank.plan.setting import Setting

__all__ = ["loss_of"]

TOKENS, WORDS = 4096, 32768
"""The size of a tile (TRL 1.16)."""


def loss_of(setting: Setting, model: Any, ids: Tensor) -> Tensor:
    """The mean loss of a batch [B, S] that is its own labels."""
    if setting.loss == "plain":
        found: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return found
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head = inner.get_output_embeddings()
    share = setting.labelled if setting.loss == "trl" else 1.0
    count = max(1, round(share * hidden.shape[0] * hidden.shape[1]))
    return _tiled(head, hidden, count)


def _tiled(head: Any, hidden: Tensor, count: int) -> Tensor:
    for hook in head._forward_pre_hooks.values():  # the head itself is not called
        hook(head, (hidden,))
    chosen = hidden.reshape(-1, hidden.shape[-1])
    chosen = chosen.index_select(0, torch.arange(count, device=hidden.device))
    log_probs: Tensor = _LogProbs.apply(chosen, head.weight)  # type: ignore[no-untyped-call]
    return -log_probs.sum() / count


class _LogProbs(torch.autograd.Function):
    """[N] from hidden [N, H] and weight [V, H]; the tensors of TRL's ChunkedLogProbFunction."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        on = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if on else hidden.dtype
        n = hidden.shape[0]
        running = [hidden.new_zeros(n, dtype=torch.float32) for _ in range(7)]
        tile = hidden.new_empty(min(n, TOKENS), WORDS, dtype=dtype)
        for rows, words in _tiles(n, len(weight)):
            _logits(hidden[rows], weight[words].to(dtype), tile)
        log_z = running[0] + torch.log(running[1])
        ctx.save_for_backward(hidden, weight, log_z)
        ctx.dtype = dtype
        return running[6] - log_z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, _ = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        dh = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        tile = hidden.new_empty(min(len(hidden), TOKENS), WORDS, dtype=ctx.dtype)
        for rows, words in _tiles(len(hidden), len(weight)):
            part = weight[words].to(ctx.dtype)  # while the one before it is still there
            _logits(hidden[rows], part, tile)
        made = (None if g is None else g.to(t.dtype) for g, t in ((dh, hidden), (dw, weight)))
        return tuple(made)


def _tiles(tokens: int, words: int) -> Iterator[tuple[slice, slice]]:
    for row in range(0, tokens, TOKENS):
        for word in range(0, words, WORDS):
            yield slice(row, min(row + TOKENS, tokens)), slice(word, min(word + WORDS, words))


def _logits(hidden: Tensor, weight: Tensor, tile: Tensor) -> None:
    part = tile[: len(hidden), : len(weight)]
    torch.mm(hidden.to(tile.dtype), weight.t(), out=part)

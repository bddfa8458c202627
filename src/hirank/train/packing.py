"""Several documents in one row, and batches in which they do not see each other.

A packed batch carries position ids that start again at 0 for each document and no attention
mask: from that, Transformers builds a block-diagonal mask for eager and sdpa attention, and
flash attention its document borders; but only with use_cache=False, as trainers call it, since
a cache could hold earlier tokens. Whether a model really keeps documents apart is not
taken on trust but tried out (`is_isolated`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hirank.errors import HirankError

__all__ = ["IGNORED", "Collator", "collator_for", "is_isolated", "pack"]

IGNORED = -100
"""The label of a token that the loss does not count."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute documents over few rows of at most `capacity` tokens: best fit, longest first.

    Returns the indices of each row's documents. The same lengths give the same rows.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[index], 0))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return rows


@dataclass(frozen=True)
class Collator:
    """Rows of the encoded dataset to one batch.

    Unpacked: input_ids, labels, attention_mask, all [B, S], padded on the right. Packed:
    input_ids, labels, position_ids [B, S] without a mask; with `flatten`, [1, sum of S]
    without padding, the form that flash attention reads documents from.
    """

    pad_token_id: int
    packed: bool = False
    flatten: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Rows are mappings with input_ids and labels, and seq_lengths when packed."""
        batch = {
            "input_ids": self._stack([row["input_ids"] for row in rows], self.pad_token_id),
            "labels": self._stack([row["labels"] for row in rows], IGNORED),
        }
        if self.packed:
            batch["position_ids"] = self._stack([_positions(row["seq_lengths"]) for row in rows], 0)
        else:
            ones = [[1] * len(row["input_ids"]) for row in rows]
            batch["attention_mask"] = self._stack(ones, 0)
        return batch

    def _stack(self, rows: Sequence[Sequence[int]], fill: int) -> Tensor:
        if self.flatten:
            return torch.tensor([[token for row in rows for token in row]])
        longest = max(len(row) for row in rows)
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def _positions(lengths: Sequence[int]) -> list[int]:
    """0, 1, 2, ... for each document. Padding gets 0s: documents of one token each."""
    return [position for length in lengths for position in range(length)]


def collator_for(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, packing: bool
) -> Collator:
    """The collator for this model (bare or with PEFT adapters).

    With `packing`, raises `HirankError` for a model that lets packed documents see each other.
    """
    attention = str(getattr(model.config, "_attn_implementation", None))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    collator = Collator(pad or 0, packed=packing, flatten=packing and "flash" in attention)
    if packing and not is_isolated(model, collator):
        raise HirankError(
            f"data.packing is on, but {type(model).__name__} with {attention} attention lets "
            "packed examples see each other; set data.packing=false."
        )
    return collator


def is_isolated(model: nn.Module, collator: Collator) -> bool:
    """Try whether a document's output depends on the document packed before it.

    Two forward passes over a handful of tokens, without gradient or dropout; the model's mode
    and the random state stay as they were.
    """
    one, other = (_probe(model, collator, first) for first in ([3, 4, 5, 6], [9, 8, 7, 5]))
    scale = one.abs().max().clamp(min=1e-6)
    return bool(((one - other).abs().max() / scale) < 1e-2)


def _probe(model: nn.Module, collator: Collator, first: list[int]) -> Tensor:
    """Logits [T, V] of one document that is packed behind `first`."""
    second = [4, 3, 8, 2, 6]
    row = {
        "input_ids": first + second,
        "labels": first + second,
        "seq_lengths": [len(first), len(second)],
    }
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in collator([row]).items() if key != "labels"}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(**batch, use_cache=False).logits
    finally:
        for module, mode in modes:
            module.training = mode
    return logits[0, len(first) :].float()

"""Traps in what the model is fed, seen in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hirank.doctor.subject import Subject
from hirank.doctor.trap import trap

__all__ = ["end_never_learnt", "longer_than_positions", "padding_carries_loss"]

IGNORED = -100


def _tensors(subject: Subject) -> tuple[Tensor, Tensor, Tensor] | None:
    """(tokens, labels, real): [B, T] each, with True where a token is no padding."""
    batch = subject.batch or {}
    tokens, labels, mask = (batch.get(k) for k in ("input_ids", "labels", "attention_mask"))
    for tensor in (tokens, labels, mask):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.is_meta:
            return None
    assert tokens is not None and labels is not None and mask is not None
    return tokens, labels, mask.bool()


def _ids(subject: Subject, name: str) -> set[int]:
    """A special token of the tokenizer, or of the model; a model may have several ends."""
    config = getattr(subject.model, "config", None)
    generation = getattr(subject.model, "generation_config", None)
    for holder in (subject.tokenizer, config, generation):
        found: Any = getattr(holder, name, None)
        if found is not None:
            return set(found) if isinstance(found, Iterable) else {int(found)}
    return set()


@trap(
    "error",
    "Padding carries loss: the model learns to write padding",
    fix="Set labels to -100 where attention_mask is 0.",
    source="transformers: DataCollatorForSeq2Seq pads labels with -100",
)
def padding_carries_loss(subject: Subject) -> str | None:
    """A collator padded labels with the padding token."""
    found = _tensors(subject)
    if found is None:
        return None
    _, labels, real = found
    count, learnt = int((~real & (labels != IGNORED)).sum()), int((labels != IGNORED).sum())
    return f"{count} of {learnt} tokens with loss in this batch are padding" if count else None


@trap(
    "error",
    "The end token is the padding token and is masked away: the model never learns to stop",
    fix="Give the tokenizer a padding token of its own, or mask by attention_mask.",
    source="transformers#23530, trl#976",
)
def end_never_learnt(subject: Subject) -> str | None:
    """A collator that masks every padding token masks the real ends of the answers too."""
    found, ends = _tensors(subject), _ids(subject, "eos_token_id")
    if found is None or not ends & _ids(subject, "pad_token_id"):
        return None
    tokens, labels, real = found
    both = torch.tensor(sorted(ends & _ids(subject, "pad_token_id")), device=tokens.device)
    real_ends = torch.isin(tokens, both) & real
    learnt = real_ends & (labels != IGNORED)
    if not real_ends.any() or learnt.any() or not (labels != IGNORED).any():
        return None
    return f"token {both.tolist()} ends {int(real_ends.sum())} texts in this batch, none with loss"


@trap(
    "warning",
    "Rows may be longer than the model's positions",
    fix="Lower max_length to the model's limit, or extend the model's positions first.",
    source="transformers: config.max_position_embeddings",
)
def longer_than_positions(subject: Subject) -> str | None:
    """Beyond them, learned positions fail and rotary ones were never trained."""
    config = getattr(subject.model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    tokens = (subject.batch or {}).get("input_ids")
    told = {"max_length is": subject.settings.max_length or 0}
    if isinstance(tokens, Tensor):
        told["this batch has rows of"] = tokens.shape[-1]
    over = [f"{what} {length}" for what, length in told.items() if length > limit]
    return f"{' and '.join(over)}, the model has {limit} positions" if over else None

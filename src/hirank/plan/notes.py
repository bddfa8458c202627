"""What a plan assumes, and what it cannot know, each with a bound."""

from __future__ import annotations

from hirank.plan import spread
from hirank.plan.inventory import Shape
from hirank.plan.setting import Setting
from hirank.plan.targets import compute_bytes

__all__ = ["notes_of"]


def notes_of(s: Setting, m: Shape) -> list[str]:
    """In the order of their weight."""
    found = [_padding(s, m), spread.note_of(s), _experts(s, m), _images(m), _window(s, m)]
    return [note for note in [*found, _fp32_attention(s), _bits(s), _unlike_trace(s, m)] if note]


def _padding(s: Setting, m: Shape) -> str | None:
    """A mask has S x S numbers for each row, and sdpa copies it to 16 bits for each block."""
    if s.packing or s.batch == 1 or s.attention != "sdpa":
        return None
    blocks = 1 if s.checkpointing else m.layers
    heads = 2 * s.tokens * 2 * (m.q_width - m.kv_width)
    most = blocks * (2 * s.batch * s.sequence**2 + heads)
    return (
        f"rows of unlike length need a mask, which sdpa keeps in every block, with keys and values "
        f"for all heads: up to {most / 2**30:.2f} GiB more"
    )


def _experts(s: Setting, m: Shape) -> str | None:
    if not m.experts:
        return None
    if s.has_gains and s.targets == "all-linear":
        return (
            "PEFT has no DoRA for experts and refuses all-linear here, so this is for attention "
            "alone: name targets, or use lora"
        )
    return (
        "activations of experts are those of grouped products, Transformers' default, and were "
        "held against traces alone; for another implementation allow 50 % of `activations kept`"
    )


def _images(m: Shape) -> str | None:
    return "the part of the model that sees images is not counted" if m.images else None


def _window(s: Setting, m: Shape) -> str | None:
    if not m.sliding or m.window is None or s.sequence <= m.window or s.attention != "sdpa":
        return None
    blocks = 1 if s.checkpointing else m.sliding
    most = blocks * (2 * s.sequence**2 + 4 * s.tokens * (m.q_width - m.kv_width))
    return (
        f"rows beyond the window of {m.window:,} tokens need a mask in {m.sliding} blocks: up to "
        f"{most / 2**30:.2f} GiB more with sdpa"
    )


def _fp32_attention(s: Setting) -> str | None:
    if compute_bytes(s) == 2 or s.attention != "sdpa":
        return None
    return "sdpa in fp32 has no flash kernel on a GPU and may keep scores, as eager does"


def _bits(s: Setting) -> str | None:
    if s.state_dtype == "int8" and not s.is_low_rank:
        return "8-bit AdamW is taken to be bitsandbytes', with blocks of 256"
    return None


def _unlike_trace(s: Setting, m: Shape) -> str | None:
    """Where the closed form is known to part from the trace by more than 3 %."""
    if s.method == "dora-peft" and s.adapter_dtype == "bf16":
        return (
            "of PEFT's DoRA with 16-bit adapters up to 10 % less are needed: --engine trace knows"
        )
    if m.wide_norms and s.attention == "eager" and s.loss == "plain":
        return "of Gemma with eager attention and the plain loss allow 4 % more, or --engine trace"
    return None

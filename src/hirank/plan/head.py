"""The output head and the loss: no part of the model, and often the peak.

plain: Transformers' own. bf16 logits 2 bytes, their fp32 copy 4, log-softmax 4, its gradient 4: 14
bytes for each of T x V. trl and chunked: a tile of [4096 tokens, 32768 words] at a time, so that V
no longer counts; what stays is the gradient of the hidden states, and of the head if it is trained.
"""

from __future__ import annotations

from hirank.plan.block import Part
from hirank.plan.inventory import Shape
from hirank.plan.setting import Setting
from hirank.plan.targets import compute_bytes, stream_bytes, trained_bytes

__all__ = ["eval_part", "final_part", "head_gradient", "logit_bytes", "loss_parts", "scored"]

TOKENS, WORDS = 4096, 32768


def final_part(s: Setting, m: Shape) -> Part:
    """What the last norm keeps, its output, and the token ids."""
    stream = stream_bytes(s)
    kept = 4 + 4 // m.hidden + (0 if s.is_adapter else 4 if m.wide_norms else stream)
    size = s.tokens * (m.hidden * (kept + stream) + 4 + 8)
    return Part(
        size, f"last norm and its output T h: {s.tokens:,} x {m.hidden:,} x {kept + stream}"
    )


def logit_bytes(s: Setting) -> int:
    """Of one logit at the worst moment of the plain loss."""
    return 14 if compute_bytes(s) == 2 else 12


def loss_parts(s: Setting, m: Shape) -> tuple[Part, Part]:
    """At the end of the forward pass, and at the worst moment of the loss's own backward pass."""
    if s.loss == "plain":
        return _plain(s, m)
    count = scored(s)
    tile = min(count, TOKENS) * min(WORDS, m.vocabulary) * compute_bytes(s)
    cast = 0 if compute_bytes(s) == trained_bytes(s) else 2 * min(WORDS, m.vocabulary) * m.hidden
    rows = count * m.hidden * stream_bytes(s)
    text = f"a tile {min(count, TOKENS):,} x {min(WORDS, m.vocabulary):,}, {count:,} rows chosen"
    chosen = rows + 13 * 4 * count
    back = 4 * count * m.hidden + rows
    return Part(tile + cast + chosen, text), Part(
        tile + cast + chosen + back, f"{text}, dh in fp32"
    )


def scored(s: Setting) -> int:
    """Tokens with logits; the last of a row has nothing to predict."""
    every = s.batch * (s.sequence - 1)
    return max(1, round(every * (s.labelled if s.loss == "trl" else 1.0)))


def _plain(s: Setting, m: Shape) -> tuple[Part, Part]:
    each, logits = logit_bytes(s), s.tokens * m.vocabulary
    text = f"T V = {s.tokens:,} x {m.vocabulary:,} logits"
    return (
        Part((each - 4) * logits, f"{text} x {each - 4} bytes"),
        Part(each * logits, f"{text} x {each} bytes"),
    )


def head_gradient(s: Setting, m: Shape) -> Part:
    """While the head's gradient is made: in fp32 for trl and chunked, then in its own dtype."""
    numbers = m.vocabulary * m.hidden
    if s.is_adapter:
        return Part(0, "the head is frozen")
    own = trained_bytes(s)
    wide = own if s.loss == "plain" or own == 4 else own + 4
    return Part(numbers * wide, f"the head's gradient V h: {numbers:,} x {wide} bytes")


def eval_part(s: Setting, m: Shape) -> Part:
    """An evaluation pass keeps nothing: one block at work, and its logits."""
    tokens = s.eval_batch * s.sequence
    c = compute_bytes(s)
    block = tokens * (3 * c * m.intermediate + 6 * c * m.hidden)
    if s.loss == "plain":
        logits = tokens * m.vocabulary * (logit_bytes(s) - 4)
    else:
        logits = min(tokens, TOKENS) * min(WORDS, m.vocabulary) * c
    return Part(max(block, logits), f"{tokens:,} tokens without gradients")

"""The output head and the loss: no part of the model, and often the peak.

plain    Transformers' own, all logits. Forward makes bf16 logits 2 bytes, their fp32 copy 4 and
         log-softmax 4; back are log-softmax 4, its gradient 4 and that of the logits 4: 12 bytes
         for each of T x V, and 14 in a loop that holds the model's output until backward is over.
trl      a tile of [4096 tokens, 32768 words] at a time, so that V no longer counts; what stays is
         the gradient of the hidden states, and of the head if it is trained. Labelled tokens only.
chunked  the same for all tokens.
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


def logit_bytes() -> int:
    """Of one logit at the worst moment of the plain loss, in a trainer that drops the output."""
    return 12


def loss_parts(s: Setting, m: Shape) -> tuple[Part, Part]:
    """At the end of the forward pass, and at the worst moment of the loss's own backward pass."""
    if s.loss == "plain":
        return _plain(s, m)
    count, c = scored(s), compute_bytes(s)
    tile = min(count, TOKENS) * WORDS * c  # made whole, however small the vocabulary
    cast = 0 if c == trained_bytes(s) else c * min(WORDS, m.vocabulary) * m.hidden
    rows = count * m.hidden * stream_bytes(s)
    text = f"a tile {min(count, TOKENS):,} x {WORDS:,}, {count:,} rows chosen"
    forward = tile + cast + rows + 13 * 4 * count
    back = forward + cast + 4 * count * m.hidden + rows
    return Part(forward, text), Part(back, f"{text}, dh in fp32")


def scored(s: Setting) -> int:
    """Tokens with logits; the last of a row has nothing to predict."""
    every = s.batch * (s.sequence - 1)
    return max(1, round(every * (s.labelled if s.loss == "trl" else 1.0)))


def _plain(s: Setting, m: Shape) -> tuple[Part, Part]:
    """Back, the worst is the softmax's gradient, or that of the head once the logits are gone."""
    logits, numbers = s.tokens * m.vocabulary, m.vocabulary * m.hidden
    before = 10 if compute_bytes(s) == 2 else 8
    copied = 2 * numbers if s.autocast and trained_bytes(s) == 4 else 0
    made = 0 if s.is_adapter else numbers * (trained_bytes(s) + (2 if copied else 0))
    text = f"T V = {s.tokens:,} x {m.vocabulary:,} logits"
    back = max(logit_bytes() * logits, compute_bytes(s) * logits + made)
    return (
        Part(before * logits + copied, f"{text} x {before} bytes{_and(copied)}"),
        Part(back + copied, f"{text} x {logit_bytes()} bytes{_and(copied)}"),
    )


def _and(copied: int) -> str:
    return f", and a bf16 copy of the head, {copied:,}" if copied else ""


def head_gradient(s: Setting, m: Shape) -> Part:
    """While it is made for trl and chunked: in fp32, then in its own dtype."""
    numbers = m.vocabulary * m.hidden
    if s.is_adapter or s.loss == "plain":
        return Part(0, "frozen, or counted with the logits")
    own = trained_bytes(s)
    wide = own if own == 4 else own + 4
    return Part(numbers * wide, f"the head's gradient V h: {numbers:,} x {wide} bytes")


def eval_part(s: Setting, m: Shape) -> Part:
    """An evaluation pass keeps nothing: one block at work, and its logits."""
    tokens = s.eval_batch * s.sequence
    c = compute_bytes(s)
    block = tokens * (3 * c * m.intermediate + 6 * c * m.hidden)
    if s.loss == "plain":
        logits = tokens * m.vocabulary * (10 if c == 2 else 8)
    else:
        logits = min(tokens, TOKENS) * WORDS * c
    return Part(max(block, logits), f"{tokens:,} tokens without gradients")

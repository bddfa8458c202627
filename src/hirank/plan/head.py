"""The output head and the loss: no part of the model, and often the peak.

plain    Transformers' own, all logits. Forward makes bf16 logits 2 bytes, their fp32 copy 4 and
         log-softmax 4; back are log-softmax 4, its gradient 4 and that of the logits 4: 12 bytes
         for each of T x V, and 14 in a loop that holds the model's output until backward is over.
trl      a tile of [4096 tokens, 32768 words] at a time, so that V no longer counts; what stays is
         the gradient of the hidden states, and of the head if it is trained. Labelled tokens only.
chunked  the same for all tokens.
"""

from __future__ import annotations

from dataclasses import replace

from hirank.plan.block import Part, rest_of
from hirank.plan.inventory import Shape
from hirank.plan.setting import Setting
from hirank.plan.targets import compute_bytes, recasts, stream_bytes, whole_bytes

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
    cast = 0 if c == stream_bytes(s) else c * min(WORDS, m.vocabulary) * m.hidden
    rows = count * m.hidden * stream_bytes(s)
    text = f"a tile {min(count, TOKENS):,} x {WORDS:,}, {count:,} rows chosen"
    forward = tile + cast + rows + 13 * 4 * count
    next_cast = cast if m.vocabulary > WORDS else 0  # made while the one before is there
    narrow = rows if stream_bytes(s) == 2 else 0
    back = forward + next_cast + 4 * count * m.hidden + narrow
    rest = rest_of((1, tile), (1, cast), (1, rows))
    more = rest_of((1, next_cast), (1, 4 * count * m.hidden), (1, narrow))
    return Part(forward, text, rest), Part(back, f"{text}, dh in fp32", rest + more)


def scored(s: Setting) -> int:
    """Tokens with logits; the last of a row has nothing to predict."""
    every = s.batch * (s.sequence - 1)
    return max(1, round(every * (s.labelled if s.loss == "trl" else 1.0)))


def _plain(s: Setting, m: Shape) -> tuple[Part, Part]:
    """Back, the worst is the softmax's gradient, or that of the head once the logits are gone."""
    logits, numbers = s.tokens * m.vocabulary, m.vocabulary * m.hidden
    before = 10 if compute_bytes(s) == 2 else 8
    copied = 2 * numbers if recasts(s) else 0
    made = 0 if s.is_adapter else numbers * (whole_bytes(s) + (2 if copied else 0))
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
    own = whole_bytes(s)
    wide = own if own == 4 else own + 4
    rest = rest_of((1, numbers * 4), (1 if wide > own else 0, numbers * own))
    return Part(numbers * wide, f"the head's gradient V h: {numbers:,} x {wide} bytes", rest)


# Evaluation.


def eval_part(s: Setting, m: Shape) -> Part:
    """An evaluation pass keeps nothing: one block at work, or the logits."""
    every = replace(s, batch=s.eval_batch)
    head = loss_parts(every, m)[0]
    states = every.tokens * m.hidden * stream_bytes(s)
    moments = [head._replace(size=head.size + states), _mlp_alone(every, m)]
    if s.attention == "eager":
        moments.append(_scores_alone(every, m))
    best = max(moments, key=lambda part: part.size + part.rest)
    return best._replace(
        size=best.size + copies_of_all(s, m),
        formula=f"{every.tokens:,} tokens without gradients, {best.formula}",
    )


def copies_of_all(s: Setting, m: Shape) -> int:
    """Bytes of the 16-bit copies of fp32 weights, which autocast keeps for a whole pass."""
    made = recasts(s) and not s.is_adapter
    return 2 * sum(x.size for x in m.linears) if made else 0


def _stream(s: Setting, m: Shape) -> int:
    """Bytes a token within a block: the embeddings, the block's input, its sum with attention, and
    a norm's output."""
    return (3 * stream_bytes(s) + compute_bytes(s)) * m.hidden


def _mlp_alone(s: Setting, m: Shape) -> Part:
    """The activation, up and their product; PEFT's DoRA joins up's branches in fp32 before."""
    c, width = compute_bytes(s), m.intermediate
    if s.method == "dora-peft":
        each, stream = 3 * c + 12, _stream(s, m) + 4 * m.hidden
    else:
        each, stream = 3 * c, _stream(s, m)
    return Part(s.tokens * (each * width + stream), f"MLP T (i {each} + {stream:,})")


def _scores_alone(s: Setting, m: Shape) -> Part:
    """Scores, and their softmax in fp32 from a copy in fp32; q, k and v for all heads."""
    c = compute_bytes(s)
    each = 10 if c == 2 else 8
    scores = s.tokens * m.heads * s.sequence * each
    rest = s.tokens * (3 * c * m.q_width + _stream(s, m))
    return Part(scores + rest, f"scores T n S x {each}, q, k, v and the stream")

"""What one decoder block keeps for its backward pass, and what comes on top while that runs.

    kept     the tensors that autograd saves, each once however often it is used
    extra    how much more is alive at the worst moment of the block's backward pass

T tokens, h hidden size, q, k widths of q_proj and of k_proj, i intermediate size, S row length,
n heads, r rank; c bytes of a number where linears compute, w of one of the residual stream. Each
line was read off what Transformers 5, PEFT 0.21 and hirank save; the trace checks their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from hirank.plan.inventory import Matrix, Shape
from hirank.plan.setting import BYTES, Setting
from hirank.plan.sizes import in_blocks
from hirank.plan.targets import (
    adapted,
    adapts_experts,
    compute_bytes,
    recasts,
    stream_bytes,
    trained_bytes,
)

__all__ = ["Part", "block_extra", "block_input", "forward_extra", "kept_parts", "rest_of"]


class Part(NamedTuple):
    """Bytes, and their formula with its numbers."""

    size: int
    formula: str
    rest: int = 0
    """More that the allocator counts, as large tensors lie in blocks of whole 2 MiB."""


def _times(what: str, *factors: int, count: int = 1) -> Part:
    """`count` tensors, each as large as the product of `factors`."""
    each = math.prod(factors)
    shown = (count, *factors) if count != 1 else factors
    text = f"{what}: {' x '.join(f'{factor:,}' for factor in shown)}"
    return Part(count * each, text, rest_of((count, each)))


def rest_of(*tensors: tuple[int, int]) -> int:
    """`Part.rest` of tensors: (how many, bytes of each)."""
    return sum(count * (in_blocks(size) - size) for count, size in tensors if size > 2**20)


def block_input(setting: Setting, shape: Shape) -> Part:
    """What checkpointing keeps of a block."""
    return _times("block input T h w", setting.tokens, shape.hidden, stream_bytes(setting))


# Kept.


def kept_parts(setting: Setting, shape: Shape) -> list[Part]:
    """What one block keeps without checkpointing, or computes again with it."""
    parts = [
        *_norms(setting, shape),
        *_inputs(setting, shape),
        *_attention(setting, shape),
        *_mlp(setting, shape),
        *_adapters(setting, shape),
        *_copies(setting, shape),
    ]
    return [part for part in parts if part.size]


def _norms(s: Setting, m: Shape) -> Iterator[Part]:
    """In fp32 whatever comes in; if a norm is trained, its normalised input as well."""
    trained = not s.is_adapter
    each = 4 + ((4 if m.wide_norms else stream_bytes(s)) if trained else 0)
    yield _times(f"{m.norms} norms T h", s.tokens, m.hidden, each, count=m.norms)
    yield _times("their roots", m.norms, s.tokens, 4)
    if m.wide_norms:
        vectors = m.norms * m.hidden + (2 * m.head_dim if m.qk_norm else 0)
        yield _times("1 + weight of each, in fp32", vectors, 4)
    if m.qk_norm:
        each = 4 + ((4 if m.wide_norms else compute_bytes(s)) if trained else 0)
        yield _times("q_norm, k_norm T (q + k)", s.tokens, m.q_width + m.kv_width, each)
        yield _times("their roots", s.tokens, m.heads + m.kv_heads, 4)


def _inputs(s: Setting, m: Shape) -> Iterator[Part]:
    """The inputs of linears that have something to learn."""
    learning = adapted(s, m) if s.is_adapter else m.linears
    if s.method == "dora-peft":
        yield from _inputs_of_peft(s, m, learning)
        return
    names, c = {matrix.name for matrix in learning}, compute_bytes(s)
    apart = stream_bytes(s) != c  # each linear casts for itself, and keeps that
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        count = len(names & set(group))
        if count:
            text = f"input of {', '.join(group)} T h c"
            yield _times(text, s.tokens, m.hidden, c, count=count if apart else 1)
    if "o_proj" in names and s.attention == "eager":
        yield _times("input of o_proj T q c", s.tokens, m.q_width, c)
    if "down_proj" in names:
        yield _times("input of down_proj T i c", s.tokens, m.intermediate, c)


def _inputs_of_peft(s: Setting, m: Shape, learning: tuple[Matrix, ...]) -> Iterator[Part]:
    """PEFT casts x to the adapter's dtype, layer by layer, and autocast casts it back."""
    each = 2 if s.autocast else BYTES[s.adapter_dtype]
    yield _wide("inputs, one copy a layer T in", s.tokens, [x.inp for x in learning], each)


def _attention(s: Setting, m: Shape) -> Iterator[Part]:
    c = compute_bytes(s)
    if s.attention == "eager":
        yield _times("q, k, v for all heads T q c", s.tokens, m.q_width, c, count=3)
        each = 4 + (c if c == 2 else 0) + (c if m.softcapped else 0)
        yield _times("scores T n S", s.tokens, m.heads, s.sequence, each)
        return
    yield _times("q and attention's output T q c", s.tokens, m.q_width, c, count=2)
    masked = s.packing and s.attention == "sdpa"  # then there is no grouped-query kernel
    wide = "k, v for all heads T q c" if masked else "k, v T k c"
    yield _times(wide, s.tokens, m.q_width if masked else m.kv_width, c, count=2)
    yield _times("log-sum-exp T n", s.tokens, m.heads, 4)
    if masked:
        yield _times("the mask of packed rows T S c", s.tokens, s.sequence, c)


def _mlp(s: Setting, m: Shape) -> Iterator[Part]:
    c = compute_bytes(s)
    if not m.experts:
        yield _times("gate, its activation, up T i c", s.tokens, m.intermediate, c, count=3)
        return
    learn, rows = not s.is_adapter or adapts_experts(s, m), s.tokens * m.active
    yield _times("outputs of experts T active h c", rows, m.hidden, c)
    yield _times("gate, activation, up T active i c", rows, m.expert_size, c, count=3)
    yield _times("router T experts", s.tokens, m.experts, 4, count=2)
    if learn:
        yield _times("input of the router T h c", s.tokens, m.hidden, c)
        yield _times("inputs of experts T active h c", rows, m.hidden, c)
        yield _times("their products T active i c", rows, m.expert_size, c)
    if s.is_adapter and learn:  # PEFT makes W + B A of all experts, and their product keeps it
        yield _times("W + B A of gate and up of experts", m.experts, 2 * m.expert_size, m.hidden, c)
        yield _times("W + B A of down of experts", m.experts, m.expert_size, m.hidden, c)


def _adapters(s: Setting, m: Shape) -> Iterator[Part]:
    if not s.is_adapter:
        return
    learning, c = adapted(s, m), compute_bytes(s)
    peft = s.method == "dora-peft"
    narrow = (2 if s.autocast else BYTES[s.adapter_dtype]) if peft else c
    yield _times("h = x A' T r", s.tokens, s.rank, narrow, count=len(learning))
    if not s.has_gains:
        return
    outs = [matrix.out for matrix in learning]
    if peft:
        yield _wide("outputs of base T out", s.tokens, outs, c)
        yield _wide("outputs of B A T out", s.tokens, outs, narrow)
        yield _times("norm, gain, gain - 1 in fp32: out", 3, sum(outs), 4)
        return
    yield _wide("outputs that nothing else keeps T out c", s.tokens, _outputs(s, m), c)


def _wide(what: str, tokens: int, widths: list[int], each: int) -> Part:
    """A tensor [tokens, width] for each of some layers."""
    sizes = [(1, tokens * width * each) for width in widths]
    return _times(what, tokens, sum(widths), each)._replace(rest=rest_of(*sizes))


def _outputs(s: Setting, m: Shape) -> list[int]:
    """Out features of layers whose output only DoRA keeps: those of v_proj and of the MLP's first
    two are kept in any case."""
    shared = {"gate_proj", "up_proj"} | ({"v_proj"} if s.attention != "eager" else set())
    return [matrix.out for matrix in adapted(s, m) if matrix.name not in shared]


def _copies(s: Setting, m: Shape) -> Iterator[Part]:
    """16-bit copies of fp32 weights, which autocast makes and the backward pass needs."""
    if recasts(s):
        weights = sum(matrix.each for matrix in m.linears)
        rest = rest_of(*((1, 2 * matrix.each) for matrix in m.linears))
        yield _times("bf16 copies of linears", weights, 2)._replace(rest=rest)
    if s.method == "dora-peft" and s.autocast and s.adapter_dtype == "fp32":
        numbers = sum(s.rank * (matrix.inp + matrix.out) for matrix in adapted(s, m))
        yield _times("bf16 copies of A and B", numbers, 2)


# On top.


def block_extra(setting: Setting, shape: Shape) -> list[tuple[str, Part]]:
    """What comes on top of all that a block keeps, by class, at the worst moment."""
    moments = [*_of_mlp(setting, shape), *_of_norms(setting, shape), *_of_scores(setting, shape)]
    if setting.method == "dora-peft":
        moments = [*_of_stock_dora(setting, shape), *_of_scores(setting, shape)]
    return max(moments, key=lambda found: sum(part.size for _, part in found))


_WORK, _METHOD = "activations kept", "method temporaries"
Moment = list[tuple[str, Part]]


def _of_mlp(s: Setting, m: Shape) -> Iterator[Moment]:
    """Gradients of product, activation and up; the product itself is gone."""
    if m.experts:
        yield from _of_experts(s, m)
        return
    c = compute_bytes(s)
    found = [
        (_WORK, _times("gradients within the MLP T i c", s.tokens, m.intermediate, c, count=2))
    ]
    if s.method in ("dora", "qdora") and "down_proj" in {x.name for x in adapted(s, m)}:
        gone = -s.tokens * m.hidden * c
        found.append((_WORK, Part(gone, f"down_proj's output is gone: {gone:,}")))
    yield found
    one = _times("gradient of down_proj's input T i c", s.tokens, m.intermediate, c)
    yield [(_WORK, one), *_weight_sized(s, m)]  # down_proj at work, before the rest of the MLP


def _of_experts(s: Setting, m: Shape) -> Iterator[Moment]:
    """Gradients on their way back to the experts' order; or one of all experts' W + B A."""
    c, rows = compute_bytes(s), s.tokens * m.active
    order = _times("gradients of experts' outputs T active h c", rows, m.hidden, c, count=3)
    yield [(_WORK, order), *_weight_sized(s, m)]
    if s.is_adapter and adapts_experts(s, m):
        made = _times("gradient of W + B A of down", m.experts, m.expert_size, m.hidden, c)
        inner = _times("gradients within T active (h + i) c", rows, m.hidden + m.expert_size, c)
        yield [(_WORK, inner), (_METHOD, made)]


def _weight_sized(s: Setting, m: Shape) -> Moment:
    largest = max(matrix.each for matrix in m.linears)
    if s.is_quantised:
        return [(_METHOD, _times("one weight out of NF4", largest, 2))]
    if not s.is_adapter and s.accumulation > 1:
        return [("gradients", _times("one gradient to be added", largest, trained_bytes(s)))]
    return []


def _of_norms(s: Setting, m: Shape) -> Iterator[Moment]:
    """Gemma's norms work in fp32 throughout: five tensors at once, four if the norm is trained."""
    if m.wide_norms:
        count = 5 if s.is_adapter else 4
        yield [(_WORK, _times("gradients within a norm T h", s.tokens, m.hidden, 4, count=count))]


def _of_scores(s: Setting, m: Shape) -> Iterator[Moment]:
    """Gradients of scores, when the MLP's share of what is kept is gone."""
    if s.attention != "eager":
        return
    c = compute_bytes(s)
    scores = _times("gradients of scores T n S", s.tokens, m.heads, s.sequence, 6 if c == 2 else 8)
    gone = s.tokens * (4 * c * m.intermediate + (4 + c) * m.hidden)
    if scores.size > gone:
        formula = f"{scores.formula}, less {gone:,} of the MLP"
        yield [(_WORK, Part(scores.size - gone, formula))]


def _of_stock_dora(s: Setting, m: Shape) -> Iterator[Moment]:
    """Both branches and their gradients in fp32; or, when a block is computed again, its norm."""
    h, i, t = m.hidden, m.intermediate, s.tokens
    if s.checkpointing:
        back = Part(10 * t * h, f"gradients of the block's output T h 10: {t:,} x {h:,} x 10")
        yield [(_METHOD, forward_extra(s, m)), (_WORK, back)]
    work = t * max(14 * i - 4 * h, 0) if s.autocast else t * max(18 * h, 12 * i - 6 * h)
    yield [(_METHOD, Part(work, f"branches and their gradients in fp32: {t:,} tokens"))]


def forward_extra(s: Setting, m: Shape) -> Part:
    """What the last block's forward pass makes on top of what is kept: of note for PEFT's DoRA,
    which multiplies B A with an identity matrix as large as the input of the layer."""
    if s.method != "dora-peft":
        return Part(0, "less than the loss makes")
    widest = max(adapted(s, m), key=lambda matrix: matrix.inp * (matrix.inp + 3 * matrix.out))
    eye, weight = widest.inp**2, widest.inp * widest.out
    if s.autocast:  # the identity is made in fp32, and kept in 16 bits
        size = max(6 * eye + 2 * weight, 2 * eye + 16 * weight)
    else:
        size = 4 * eye + (16 if trained_bytes(s) == 2 else 12) * weight
    if widest.name == "down_proj":
        size += s.tokens * _around_down_proj(s, m)
    formula = f"norm of {widest.name}: identity {eye:,}, B A and sums {weight:,} numbers"
    return Part(size, formula)


def _around_down_proj(s: Setting, m: Shape) -> int:
    """Bytes a token that are alive in its forward pass and not kept: its input, in fp32 too, the
    stream and the norm's output; less what it has yet to make, a narrow input and B A x."""
    c = compute_bytes(s)
    if s.autocast:
        return (4 + c - 2) * m.intermediate + (2 * c - 2) * m.hidden
    return c * m.intermediate + (2 * c - BYTES[s.adapter_dtype]) * m.hidden

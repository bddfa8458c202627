"""What one decoder block keeps for its backward pass, and what comes on top while that runs.

    kept     the tensors that autograd saves, each once however often it is used
    extra    how much more is alive at the worst moment of the block's backward pass

T tokens, h hidden size, q, k widths of q_proj and of k_proj, i intermediate size, S row length,
n heads, r rank; c bytes of a number where linears compute, w of one of the residual stream. Each
line was read off what Transformers 5, PEFT 0.21 and hirank save; the trace checks their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hirank.plan.inventory import Matrix, Shape
from hirank.plan.setting import BYTES, Setting
from hirank.plan.targets import adapted, compute_bytes, stream_bytes, trained_bytes

__all__ = ["Part", "block_extra", "block_input", "forward_extra", "kept_parts"]


class Part(NamedTuple):
    """Bytes, and their formula with its numbers."""

    size: int
    formula: str


def _times(what: str, *factors: int) -> Part:
    size = 1
    for factor in factors:
        size *= factor
    return Part(size, f"{what}: {' x '.join(f'{factor:,}' for factor in factors)}")


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
    yield _times(f"{m.norms} norms T h", m.norms, s.tokens, m.hidden, each)
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
            yield _times(
                f"input of {', '.join(group)} T h c", count if apart else 1, s.tokens, m.hidden, c
            )
    if "o_proj" in names and s.attention == "eager":
        yield _times("input of o_proj T q c", s.tokens, m.q_width, c)
    if "down_proj" in names:
        yield _times("input of down_proj T i c", s.tokens, m.intermediate, c)


def _inputs_of_peft(s: Setting, m: Shape, learning: tuple[Matrix, ...]) -> Iterator[Part]:
    """PEFT casts x to the adapter's dtype, layer by layer, and autocast casts it back."""
    each = 2 if s.autocast else BYTES[s.adapter_dtype]
    width = sum(matrix.inp for matrix in learning)
    yield _times("inputs, one copy a layer T in", s.tokens, width, each)


def _attention(s: Setting, m: Shape) -> Iterator[Part]:
    c = compute_bytes(s)
    if s.attention == "eager":
        yield _times("q, k, v for all heads T q c", 3, s.tokens, m.q_width, c)
        each = 4 + (c if c == 2 else 0) + (c if m.softcapped else 0)
        yield _times("scores T n S", s.tokens, m.heads, s.sequence, each)
        return
    yield _times("q and attention's output T q c", 2, s.tokens, m.q_width, c)
    masked = s.packing and s.attention == "sdpa"  # then there is no grouped-query kernel
    wide = "k, v for all heads T q c" if masked else "k, v T k c"
    yield _times(wide, 2, s.tokens, m.q_width if masked else m.kv_width, c)
    yield _times("log-sum-exp T n", s.tokens, m.heads, 4)
    if masked:
        yield _times("the mask of packed rows T S c", s.tokens, s.sequence, c)


def _mlp(s: Setting, m: Shape) -> Iterator[Part]:
    c = compute_bytes(s)
    if not m.experts:
        yield _times("gate, its activation, up T i c", 3, s.tokens, m.intermediate, c)
        return
    rows = s.tokens * m.active
    yield _times("inputs and outputs of experts T active h c", 2, rows, m.hidden, c)
    yield _times("gate, activation, up, product T active i c", 4, rows, m.expert_size, c)
    yield _times("router T experts", 2, s.tokens, m.experts, 4)


def _adapters(s: Setting, m: Shape) -> Iterator[Part]:
    if not s.is_adapter:
        return
    learning, c = adapted(s, m), compute_bytes(s)
    peft = s.method == "dora-peft"
    narrow = (2 if s.autocast else BYTES[s.adapter_dtype]) if peft else c
    yield _times("h = x A' T r", len(learning), s.tokens, s.rank, narrow)
    if not s.has_gains:
        return
    outs = sum(matrix.out for matrix in learning)
    if peft:
        yield _times("outputs of base and of B A, apart T out", s.tokens, outs, c + narrow)
        yield _times("norm, gain, gain - 1 in fp32: out", 3, outs, 4)
        return
    yield _times("outputs that nothing else keeps T out c", s.tokens, _outputs(s, m), c)


def _outputs(s: Setting, m: Shape) -> int:
    """Out features of layers whose output only DoRA keeps: those of v_proj and of the MLP's first
    two are kept in any case."""
    shared = {"gate_proj", "up_proj"} | ({"v_proj"} if s.attention != "eager" else set())
    return sum(matrix.out for matrix in adapted(s, m) if matrix.name not in shared)


def _copies(s: Setting, m: Shape) -> Iterator[Part]:
    """16-bit copies of fp32 weights, which autocast makes and the backward pass needs."""
    if s.autocast and trained_bytes(s) == 4:
        weights = sum(matrix.each for matrix in m.linears)
        yield _times("bf16 copies of linears", weights, 2)
    if s.method == "dora-peft" and s.autocast and s.adapter_dtype == "fp32":
        numbers = sum(s.rank * (matrix.inp + matrix.out) for matrix in adapted(s, m))
        yield _times("bf16 copies of A and B", numbers, 2)


# On top.


def block_extra(setting: Setting, shape: Shape) -> list[tuple[str, Part]]:
    """What comes on top of all that a block keeps, by class, at the worst moment."""
    moments = [_of_mlp(setting, shape), *_of_norms(setting, shape), *_of_scores(setting, shape)]
    if setting.method == "dora-peft":
        moments = [*_of_stock_dora(setting, shape), *_of_scores(setting, shape)]
    return max(moments, key=lambda found: sum(part.size for _, part in found))


_WORK, _METHOD = "activations kept", "method temporaries"
Moment = list[tuple[str, Part]]


def _of_mlp(s: Setting, m: Shape) -> Moment:
    """Gradients of product, activation and up; the product itself is gone."""
    c, width = compute_bytes(s), m.intermediate
    if m.experts:
        rows = s.tokens * m.active
        found = [(_WORK, _times("gradients within experts", 4, rows, m.expert_size, c))]
    else:
        found = [(_WORK, _times("gradients within the MLP 2 T i c", 2, s.tokens, width, c))]
    if s.method not in ("dora", "qdora") and not m.experts:  # there down_proj's output is gone now
        found.append((_WORK, _times("gradient of the block's output", s.tokens, m.hidden, c)))
    found += _weight_sized(s, m)
    return found


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
        yield [(_WORK, _times("gradients within a norm T h", count, s.tokens, m.hidden, 4))]


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
        yield [(_METHOD, forward_extra(s, m))]
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
    size += s.tokens * max(0, 2 * m.intermediate - 4 * m.hidden)  # its input in fp32
    formula = f"norm of {widest.name}: identity {eye:,}, B A and sums {weight:,} numbers"
    return Part(size, formula)

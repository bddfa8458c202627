"""The closed form: a ledger from formulas, in milliseconds and without torch.

    static           weights, adapters, optimiser state; gradients too if they accumulate
    forward end      static, what all blocks keep, the loss's own tensors
    loss backward    the same at the loss's worst moment, and the head's gradient
    block backward   the last block, the first one, or the embedding: whichever is most
    optimizer step   static, all gradients, what a step makes on its way

A block's backward pass needs, beside what others keep, its own kept tensors (computed again under
checkpointing) and `block_extra`. Going back, activations fall and gradients rise, both linearly, so
that the worst is at one of the ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hirank.errors import HirankError
from hirank.plan import spread
from hirank.plan.block import Part, block_extra, block_input, forward_extra, kept_parts
from hirank.plan.head import copies_of_all, eval_part, final_part, head_gradient, loss_parts
from hirank.plan.inventory import Shape
from hirank.plan.ledger import ESTIMATED, PHASES, Ledger, Overhead, Term, ledger_of
from hirank.plan.notes import notes_of
from hirank.plan.setting import BYTES, Setting
from hirank.plan.states import (
    adapter_parts,
    gradient_parts,
    optimizer_parts,
    step_parts,
    weight_parts,
)
from hirank.plan.targets import adapted, stream_bytes, trained_bytes, whole_bytes

__all__ = ["closed_form", "timeline"]

BUFFERS = "communication buffers"


def closed_form(setting: Setting, shape: Shape, overhead: Overhead = ESTIMATED) -> Ledger:
    """The ledger of a setting on a model of this shape.

    `overhead`: what is taken to come on top of a run's own tensors.

    Raises:
        HirankError: the targets fit no layer, or the attention cannot compute this model.
    """
    if shape.softcapped and setting.attention == "sdpa":
        raise HirankError(
            f"{shape.name} passes its scores through a softcap, which sdpa cannot; set attention "
            "to eager or flash."
        )
    spaces = overhead.workspaces
    text = "cuBLAS workspaces of two threads, on Hopper 32 MiB each"
    terms = [
        *_static(setting, shape),
        Term("method temporaries", _moments(setting), spaces, text),
        *_forward(setting, shape),
        *_backward(setting, shape),
        *_steps(setting, shape),
    ]
    return ledger_of(terms, notes_of(setting, shape), overhead)


def _term(kind: str, phases: Iterable[str], part: Part, setting: Setting) -> Term:
    """One summand of one GPU."""
    parts = spread.parts_of(setting, kind)
    if parts > 1:  # in pieces of a size that nobody told
        text = f"({part.formula}) / {parts} GPUs"
        return Term(kind, tuple(phases), -(-part.size // parts), text)
    text = f"{part.formula}, {part.rest:,} over in blocks" if part.rest else part.formula
    return Term(kind, tuple(phases), part.size + part.rest, text)


def _moments(s: Setting) -> tuple[str, ...]:
    """The phases that a run with this setting has, after loading."""
    absent = {"load"} | (set() if s.is_low_rank else {"refresh step"})
    absent |= set() if s.eval_batch else {"evaluation"}
    return tuple(phase for phase in PHASES if phase not in absent)


def _static(s: Setting, m: Shape) -> Iterator[Term]:
    always = _moments(s)
    for kind, part in weight_parts(s, m):
        yield _term(kind, ("load", *always), part, s)
    for kind, part in adapter_parts(s, m):
        yield _term(kind, always, part, s)
    yield _term("optimizer state", always, optimizer_parts(s, m), s)
    yield _term("optimizer state", always, spread.master_copy(s, m), s)
    yield _term(BUFFERS, always, spread.buffers(s, m), s)


def _held_before(s: Setting) -> bool:
    """Whether gradients of earlier passes are there when the last one begins."""
    return s.accumulation > 1 and not s.step_in_backward


# Forward.


def _forward(s: Setting, m: Shape) -> list[Term]:
    """What is there in the end; or, where all is split, embedding and head as they arrive: in one
    piece, and taken apart."""
    terms = list(_activations(s, m))
    if s.shards == 1:
        return terms
    made = sum(term.size for term in terms if "forward end" in term.phases)
    more = 2 * spread.root_bytes(s, m) - made
    part = Part(max(0, more), "embeddings and head as they arrive, less what comes later")
    return [*terms, _term(BUFFERS, ("forward end",), part, s)]


def _activations(s: Setting, m: Shape) -> Iterator[Term]:
    first = ("forward end", "loss backward")
    for part in _kept_of_all(s, m):
        yield _term("activations kept", first, part, s)
    if s.is_adapter and not s.checkpointing:  # nothing before the first block learns
        part = Part(-4 * s.tokens * m.hidden, "but not the first norm, whose input is frozen")
        yield _term("activations kept", first, part, s)
    yield _term("activations kept", first, final_part(s, m), s)
    forward, backward = loss_parts(s, m)
    norm = forward_extra(s, m)
    if norm.size > forward.size:
        yield _term("method temporaries", first[:1], norm, s)
    else:
        yield _term("logits and loss", first[:1], forward, s)
    yield _term("logits and loss", first[1:], backward, s)
    if _held_before(s):
        yield _term("gradients", first, gradient_parts(s, m), s)
    yield _term(_before_splitting(s), first[1:], head_gradient(s, m), s)
    passing = (*first, "evaluation") if s.eval_batch else first
    yield _term(BUFFERS, passing, spread.together(s, m, blocks=1, gradients=0), s)
    copies = copies_of_all(s, m) if s.checkpointing else 0  # without, blocks keep them
    part = Part(copies, f"autocast's copies of all linears: {copies:,} bytes")
    yield _term("method temporaries", first[:1], part, s)
    if s.eval_batch:
        yield _term("activations kept", ("evaluation",), eval_part(s, m), s)


def _before_splitting(s: Setting) -> str:
    """The class of gradients of embedding and head, which are split when all is over."""
    return BUFFERS if s.shards > 1 else "gradients"


def _kept_of_all(s: Setting, m: Shape) -> list[Part]:
    each = [block_input(s, m)] if s.checkpointing else kept_parts(s, m)
    n = m.layers
    return [Part(x.size * n, f"{n} blocks, {x.formula}", x.rest * n) for x in each]


# Backward.


def _backward(s: Setting, m: Shape) -> list[Term]:
    """Terms of the worst moment."""
    moments = [_last_norm(s, m), _last_block(s, m), _first_block(s, m), _embedding(s, m)]
    if s.step_in_backward:
        moments.append(_early_step(s, m))
    return max(moments, key=lambda terms: sum(term.size for term in terms))


def _last_norm(s: Setting, m: Shape) -> list[Term]:
    """Before any block: fp32 tensors of T h beside what the norm keeps, and a gradient."""
    numbers = s.tokens * m.hidden
    count = 6 if m.wide_norms else 5
    size = numbers * (4 * (1 + count) + stream_bytes(s))
    part = Part(size, f"the last norm at work: {numbers:,} x ({1 + count} x 4 + {stream_bytes(s)})")
    phase = ("block backward",)
    whole = _term(BUFFERS, phase, spread.together(s, m, blocks=1, gradients=0), s)
    return [*_kept_and_gradients(s, m), _term("activations kept", phase, part, s), whole]


def _last_block(s: Setting, m: Shape) -> list[Term]:
    return _kept_and_gradients(s, m) + _one_block(s, m, before=0)


def _kept_and_gradients(s: Setting, m: Shape) -> list[Term]:
    """While all blocks keep what they keep."""
    phase = ("block backward",)
    terms = [_term("activations kept", phase, x, s) for x in _kept_of_all(s, m)]
    if _held_before(s):
        terms.append(_term("gradients", phase, gradient_parts(s, m), s))
        if m.tied and not s.is_adapter:
            waits = Part(m.vocabulary * m.hidden * trained_bytes(s), "the tied head's, which waits")
            terms.append(_term("gradients", phase, waits, s))
    elif not s.is_adapter and not s.step_in_backward:
        alone = s.checkpointing or s.shards > 1  # or what is split is counted with its buffers
        numbers = m.vocabulary * m.hidden + (0 if alone else m.block_parameters)
        part = Part(numbers * whole_bytes(s), f"the first gradients: {numbers:,} numbers")
        terms.append(_term(_before_splitting(s), phase, part, s))
    return terms


def _early_step(s: Setting, m: Shape) -> list[Term]:
    """Stepping in backward: the head moves while all activations are still there."""
    phase = ("block backward",)
    terms = [_term("activations kept", phase, x, s) for x in _kept_of_all(s, m)]
    terms.append(_term("gradients", phase, gradient_parts(s, m), s))
    return [*terms, _term("method temporaries", phase, step_parts(s, m)[1], s)]


def _first_block(s: Setting, m: Shape) -> list[Term]:
    phase = ("block backward",)
    kept = [block_input(s, m)] if s.checkpointing else kept_parts(s, m)
    terms = [_term("activations kept", phase, x, s) for x in kept]
    if s.shards > 1 and not s.is_adapter:
        waits = m.vocabulary * m.hidden * whole_bytes(s)
        terms.append(_term(BUFFERS, phase, Part(waits, "the head's gradient, which waits"), s))
        split = trained_bytes(s) // s.world  # the second block has another on its way instead
        more = m.block_parameters * max(0, whole_bytes(s) - split)
        terms.append(_term(BUFFERS, phase, Part(more, "one on its way, less its gradients"), s))
    return [*terms, _term("gradients", phase, _of_blocks(s, m), s), *_one_block(s, m, 1)]


def _of_blocks(s: Setting, m: Shape) -> Part:
    """All gradients but those that come after this block's MLP, and after the blocks."""
    every = gradient_parts(s, m)
    if s.step_in_backward or _held_before(s):
        return every
    last = _after_the_mlp(s, m)
    if not s.is_adapter and (s.shards > 1 or not m.tied):
        ends = 2 if s.shards > 1 and not m.tied else 1
        last += ends * m.vocabulary * m.hidden * trained_bytes(s)
    return every._replace(
        size=every.size - last, formula=f"{every.formula}, less {last:,} of what comes later"
    )


def _after_the_mlp(s: Setting, m: Shape) -> int:
    """Bytes of a block's gradients without that of down_proj, which is first."""
    each = trained_bytes(s)
    if not s.is_adapter:
        down = sum(x.each for x in m.linears if x.name == "down_proj")
        return (m.block_parameters - down) * each
    every = [x for x in adapted(s, m) if x.name != "down_proj"]
    low = sum(s.rank * (x.inp + x.out) * BYTES[s.adapter_dtype] for x in every)
    return low + (4 * sum(x.out for x in every) if s.has_gains else 0)


def _one_block(s: Setting, m: Shape, before: int) -> list[Term]:
    """A block at its worst: computed again, and at work on its gradients. `before`: 1 if another
    one was, whose gradients are then on their way to be split."""
    phase = ("block backward",)
    terms = [_term(kind, phase, part, s) for kind, part in block_extra(s, m)]
    stream = s.tokens * m.hidden * stream_bytes(s)
    terms.append(_term("activations kept", phase, Part(stream, "the gradient of the stream"), s))
    whole = spread.together(s, m, blocks=2 - before, gradients=before)
    terms.append(_term(BUFFERS, phase, whole, s))
    if not s.checkpointing:
        return terms
    again = [_term("recomputation peak", phase, part, s) for part in kept_parts(s, m)]
    if stream_bytes(s) == 4:  # the block's input is what its first norm keeps
        twice = Part(-stream, "the input, which is there already")
        again.append(_term("recomputation peak", phase, twice, s))
    return terms + again


def _embedding(s: Setting, m: Shape) -> list[Term]:
    """The gradient of an embedding is as large as itself, and added to the head's if tied."""
    phase = ("block backward",)
    if s.shards > 1:
        return _root_at_last(s, m)
    terms = [_term("gradients", phase, gradient_parts(s, m), s)]
    copies = (1 if m.tied else 0) + (1 if s.accumulation > 1 else 0)
    if not s.is_adapter and copies:
        numbers = copies * m.vocabulary * m.hidden
        part = Part(numbers * trained_bytes(s), f"{copies} of the embedding's, to be added")
        terms.append(_term("gradients", phase, part, s))
    return terms


def _root_at_last(s: Setting, m: Shape) -> list[Term]:
    """Embedding and head whole; their gradients, and the same in one piece to be split."""
    phase, every = ("block backward",), gradient_parts(s, m)
    count = 1 if s.is_adapter else 3
    root = Part(count * spread.root_bytes(s, m), f"{count} of embeddings and head")
    if not s.is_adapter:
        own = spread.root_bytes(s, m) // whole_bytes(s) * trained_bytes(s)
        every = Part(every.size - own, f"{every.formula}, less {own:,} of embeddings and head")
    return [_term("gradients", phase, every, s), _term(BUFFERS, phase, root, s)]


# Steps.


def _steps(s: Setting, m: Shape) -> Iterator[Term]:
    usual, refresh = step_parts(s, m)
    yield _term("method temporaries", ("optimizer step",), usual, s)
    phases: tuple[str, ...] = ("optimizer step",)
    if s.is_low_rank:
        yield _term("method temporaries", ("refresh step",), refresh, s)
        phases = ("optimizer step", "refresh step")
    yield _term("gradients", phases, gradient_parts(s, m), s)


# A step as a picture.


def timeline(setting: Setting, shape: Shape) -> list[tuple[str, dict[str, int]]]:
    """(moment, bytes by class) from the start of a step to its end, for a picture of it."""
    ledger = closed_form(setting, shape)
    rest = dict(ledger.phases["save"])
    moments = [("start", rest), ("forward end", dict(ledger.phases["forward end"]))]
    moments.append(("loss backward", dict(ledger.phases["loss backward"])))
    for name, found in (("last block", _last_block), ("first block", _first_block)):
        moments.append((name, _with(rest, found(setting, shape))))
    moments.append(("embedding", _with(rest, _embedding(setting, shape))))
    steps = [phase for phase in ("refresh step", "optimizer step") if phase in ledger.phases]
    moments += [(phase, dict(ledger.phases[phase])) for phase in steps[:1]]
    return [*moments, ("end", rest)]


def _with(rest: dict[str, int], terms: list[Term]) -> dict[str, int]:
    found = dict(rest)
    for term in terms:
        found[term.kind] = found.get(term.kind, 0) + term.size
    return found

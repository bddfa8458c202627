"""One step of one parameter: AdamW, and GaLore with its relatives.

    plain        W <- (1 - lr wd) W - lr N(G)
    projected    W <- (1 - lr wd) W - lr s back(N(R))                       GaLore
                 ...               - lr s phi (G - back(R))                 and Fira's residual
                 W <- (1 - lr wd) W - lr s f G                              APOLLO

    N(R) = (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)
    phi, f: |N| / |R| per column of the longer side; f also over the whole tensor
    limiter: the norm of the residual or of f G grows at most by a factor from step to step

All modes are one product and one elementwise term, delta = A B + c G, so a weight is read and
written once, span by span: nothing of a weight's size is made in fp32.

A step whose gradient is not finite changes nothing. That is decided on the device, by masks: the
functions return an `Outcome` of tensors instead of waiting for it; the host asks only where a basis
is due. One pass over what is stepped with tells both its norm and whether it is finite.

Papers     GaLore arXiv 2403.03507 (Alg. 2, moments stored without bias correction, as Adam does);
           Fira 2410.01623; APOLLO 2412.05270; moments in a new basis as in LDAdam 2410.16103.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels.blockquant import BLOCK, launchable
from hirank.kernels.galore_step import Adam, adam_int8_
from hirank.optim import bases, carry, sharded, weights
from hirank.optim import state as moments
from hirank.optim.bases import Basis, Layout
from hirank.optim.dice import MOMENTS, WEIGHTS, seed_of
from hirank.optim.hyper import Hyper
from hirank.optim.sharded import Norm
from hirank.optim.state import FIRST, SECOND, SPAN, WIDE_SPAN

__all__ = [
    "Outcome",
    "Seen",
    "adam_direction",
    "adamw_step",
    "apply_reduced",
    "finite",
    "galore_adam_step",
    "is_projected",
    "kept",
    "needs_dense",
    "reduce_gradient",
    "seeds",
    "start",
]

State = dict[str, Any]


class Outcome(NamedTuple):
    """Of a step, on the device: the host does not wait for it."""

    ok: Tensor
    """0-dim bool: the gradient was finite; if not, weight and state are as before."""
    norm: Norm
    """Of what was stepped with: of R where only that is needed, else of the gradient."""


class Seen(NamedTuple):
    """A gradient as its basis sees it."""

    reduced: Tensor
    basis: Basis | None = None
    """Loaded for it; None if it is to be loaded again."""


# Adam.


def adam_direction(
    grad: Tensor,
    state: State,
    hyper: Hyper,
    span: slice,
    ok: Tensor,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Move the moments of a flat span towards `grad`; the bias-corrected direction, 0 if not ok.
    int8 moments give it in `dtype`, others as wide as they are."""
    (b1, b2), age = hyper.betas, state["age"]
    codes = moments.codes_of(state, span)
    if codes is not None:
        return adam_int8_(grad, codes, ok, Adam(b1, b2, hyper.eps, age), seed, span.start, dtype)
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    old_m, old_v = (moments.read(state, n, span).to(grad.dtype) for n in (FIRST, SECOND))
    m = torch.lerp(old_m, grad, 1 - b1)
    v = (old_v * b2).addcmul_(grad, grad, value=1 - b2)
    moments.write(state, FIRST, span, m, ok, seed)
    moments.write(state, SECOND, span, v, ok, seed)
    root = v.sqrt_().div_((1 - b2**age) ** 0.5).add_(hyper.eps)
    return torch.where(ok, m.div_(1 - b1**age).div_(root), 0)


def _width(tensor: Tensor, *launched: bool) -> int:
    """Numbers worked on at a time: more where all that is done is launches of ours."""
    plain = tensor.codes if isinstance(tensor, weights.Int8Weight) else tensor
    return WIDE_SPAN if launchable(plain) and all(launched) else SPAN


def finite(norm: Tensor) -> Tensor:
    """Whether that is the norm of finite numbers whose squares add up to one: with others a second
    moment would be infinite from then on. NaN is not."""
    return norm < math.inf


def adamw_step(p: Tensor, grad: Tensor, state: State, hyper: Hyper) -> Outcome:
    """One AdamW step of any tensor, in place."""
    mine, flat = sharded.local(p), sharded.local(grad).reshape(-1)
    start(state, mine.shape, mine, hyper)
    norm = sharded.norm(grad)
    ok = sharded.everywhere(finite(norm.value), p)
    wide = torch.promote_types(p.dtype, torch.float32)
    draw, round_w = seeds(p, state, hyper)
    state["step"], state["age"] = state["step"] + 1, state["age"] + 1
    keep, target = kept(ok, hyper, wide), _contiguous(mine)
    width = _width(mine, moments.in_codes(state), round_w is not None)
    for span in moments.spans(mine.numel(), width):
        # Not kept by a name: the direction of one span is gone before that of the next is made.
        weights.move(
            target,
            span,
            adam_direction(flat[span], state, hyper, span, ok, draw).to(wide),
            hyper.lr,
            keep,
            round_w,
        )
    _back(mine, target)
    return Outcome(ok, norm)


# GaLore.


def is_projected(p: Tensor, hyper: Hyper) -> bool:
    """Whether a rank is asked for and the parameter is a matrix with two usable sides."""
    return hyper.rank is not None and bases.matrix_shape(p.shape) is not None


def needs_dense(hyper: Hyper) -> bool:
    """Whether a step needs the gradient itself beside its projection."""
    return hyper.residual != "none" or hyper.scale_by != "element"


def galore_adam_step(p: Tensor, grad: Tensor, state: State, hyper: Hyper) -> Outcome:
    """One step of a parameter [m, ...] seen as a matrix [m, n], in place.

    Args:
        p: the parameter: fp64, fp32, bf16, fp16, or an Int8Weight.
        grad: as large as p.
        state: {} before the first step; afterwards tensors and numbers only.
        hyper: the settings; `rank` is set.
    """
    seen = reduce_gradient(p, grad, state, hyper)
    if seen is None:
        norm = sharded.norm(grad)
        return Outcome(torch.zeros((), dtype=torch.bool, device=p.device), norm)
    return apply_reduced(p, seen, grad, state, hyper)


def reduce_gradient(p: Tensor, grad: Tensor, state: State, hyper: Hyper) -> Seen | None:
    """R of the gradient, after a refresh of the basis if one is due.

    None if a refresh is due and the gradient is not finite: then the state is untouched.
    """
    where = _layout(p.shape, hyper)
    if bases.due(state):
        matrix = sharded.whole(grad).reshape(where.m, where.n)
        size = float(sharded.norm(matrix).value)
        if not size < math.inf:
            return None
        start(state, where.reduced, p, hyper)
        # A gradient of zeros, or of what squares to them, says nothing of a basis.
        if not state["refreshes"] or size > 0 or bool(matrix.any()):
            carry.refresh(state, matrix, where, hyper)
    basis = bases.load(state, where, hyper, grad)
    return Seen(sharded.project(basis, grad, where), basis)


@lru_cache(maxsize=256)
def _layout(shape: torch.Size, hyper: Hyper) -> Layout:
    matrix = bases.matrix_shape(shape)
    assert matrix is not None, "only a matrix with two usable sides is projected"
    return bases.layout(matrix, hyper)


def start(state: State, shape: tuple[int, ...], like: Tensor, hyper: Hyper) -> None:
    """Numbers and moments of a parameter that has none yet."""
    if "age" in state:
        return
    state.setdefault("index", 0)
    state.update(step=0, age=0)
    for name in (FIRST, SECOND):
        moments.create(state, name, shape, like, hyper)
    if is_projected(like, hyper):
        state.update(refreshes=0, drawn=0, next_refresh=0, calm=0, stretch=1.0)
        if hyper.limiter:
            state["limited_norm"] = torch.zeros((), device=like.device)


def seeds(p: Tensor, state: State, hyper: Hyper) -> tuple[int, int | None]:
    """For moments, and for weights if those are rounded stochastically."""
    numbers = (hyper.seed, state["step"], state["index"])
    stochastic = isinstance(p, weights.Int8Weight) or hyper.weight_rounding == "stochastic"
    return seed_of(*numbers, MOMENTS), seed_of(*numbers, WEIGHTS) if stochastic else None


def kept(ok: Tensor, hyper: Hyper, wide: torch.dtype) -> Tensor | None:
    """What decoupled weight decay leaves of a weight; 1 for a step that is skipped."""
    if not hyper.weight_decay:
        return None
    kept = 1 - hyper.lr * hyper.weight_decay
    return torch.where(ok, torch.full((), kept, dtype=wide, device=ok.device), 1)


def apply_reduced(
    p: Tensor, seen: Seen, grad: Tensor | None, state: State, hyper: Hyper
) -> Outcome:
    """The rest of a step, from R. `grad` may be None unless `needs_dense(hyper)`."""
    where, norm = _layout(p.shape, hyper), sharded.norm(seen.reduced)
    ok, dense = finite(norm.value), None
    if grad is not None and needs_dense(hyper):
        dense = sharded.whole(grad).reshape(where.m, where.n)
        norm = sharded.norm(dense)
        ok = ok & finite(norm.value)
    basis = seen.basis or bases.load(state, where, hyper, p)
    draw, round_w = seeds(p, state, hyper)
    state["step"], state["age"] = state["step"] + 1, state["age"] + 1
    direction = _direction(seen.reduced, state, hyper, ok, draw, _narrow(p, dense, hyper))
    change = _change(seen.reduced, direction, dense, basis, state, hyper, ok)
    mine = sharded.local(p)
    target = _contiguous(mine)
    _apply(target, sharded.rows(p), where.n, change, hyper, ok, round_w)
    _back(mine, target)
    return Outcome(ok, norm)


def _narrow(p: Tensor, dense: Tensor | None, hyper: Hyper) -> torch.dtype:
    """What the direction may be made in: on a GPU the product would round it to 16 bits anyway."""
    narrow = p.is_cuda and dense is None and p.dtype in (torch.bfloat16, torch.float16)
    return p.dtype if narrow and hyper.sides != "two" else torch.float32


def _direction(
    reduced: Tensor, state: State, hyper: Hyper, ok: Tensor, seed: int, dtype: torch.dtype
) -> Tensor:
    n, width = reduced.numel(), _width(reduced, moments.in_codes(state))
    if n <= width:
        whole = adam_direction(reduced.reshape(-1), state, hyper, slice(0, n), ok, seed, dtype)
        return whole.view(reduced.shape)
    flat, spans = reduced.reshape(-1), list(moments.spans(n, width))
    out = torch.empty_like(reduced, dtype=reduced.dtype if dtype == torch.float32 else dtype)
    for span in spans:
        out.view(-1)[span] = adam_direction(flat[span], state, hyper, span, ok, seed, dtype)
    return out


class _Change(NamedTuple):
    """delta / (lr s) = A B + c G, either part None."""

    product: tuple[Tensor, Tensor] | None  # [m, r], [r, n]
    factor: Tensor | None  # [1, n], [m, 1] or []
    grad: Tensor | None  # [m, n]
    ok: Tensor


def _change(
    reduced: Tensor,
    direction: Tensor,
    grad: Tensor | None,
    basis: Basis,
    state: State,
    hyper: Hyper,
    ok: Tensor,
) -> _Change:
    if grad is None:
        return _Change(basis.factors(direction), None, None, ok)
    clean = torch.where(ok, reduced, 0)
    along = None if hyper.scale_by == "tensor" else int(basis.left is None)
    factor = _ratio(direction, clean, along)
    if hyper.residual == "none":
        norm = (factor * _norm(grad, along)).norm()
        return _Change(None, factor * _limit(norm, state, hyper, ok), grad, ok)
    seen = _norm_of_back(clean, basis, along)
    unseen = (_norm(grad, along).square() - 2 * clean.square().sum(along, True) + seen).clamp_min(0)
    factor = factor * _limit((factor * unseen.sqrt()).norm(), state, hyper, ok)
    return _Change(basis.factors(direction - factor * clean), factor, grad, ok)


def _norm(x: Tensor, along: int | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=along, keepdim=along is not None, dtype=wide)
    return norm


def _ratio(direction: Tensor, reduced: Tensor, along: int | None) -> Tensor:
    """|N| / |R|; 0 where there is no gradient."""
    below = _norm(reduced, along)
    return torch.where(below > 0, _norm(direction, along) / torch.where(below > 0, below, 1), 0)


def _norm_of_back(reduced: Tensor, basis: Basis, along: int | None) -> Tensor:
    """Column-wise |back(R)|^2: R'(P'P)R, as a stored basis is orthonormal to its rounding only."""
    side = basis.left if basis.left is not None else basis.right
    assert side is not None
    side = side.to(reduced.dtype)
    gram = side.T @ side
    turned = gram @ reduced if along == 0 else reduced @ gram
    return (turned * reduced).sum(along, True)


def _limit(norm: Tensor, state: State, hyper: Hyper, ok: Tensor) -> Tensor | float:
    """The factor that keeps `norm` within hyper.limiter of the last step's."""
    if not hyper.limiter:
        return 1.0
    last, norm = state["limited_norm"], norm.float()
    most = last * hyper.limiter
    held = (last > 0) & (norm > most)
    factor = torch.where(held, most / torch.where(norm > 0, norm, 1), 1)
    last.copy_(torch.where(ok, norm * factor, last))
    return factor


def _apply(
    p: Tensor,
    rows: slice,
    n: int,
    change: _Change,
    hyper: Hyper,
    ok: Tensor,
    seed: int | None,
) -> None:
    """p holds `rows` of the [m, n] weight."""
    step = hyper.lr * hyper.scale
    plain = not (isinstance(p, weights.Int8Weight) or seed is not None or hyper.weight_decay)
    if plain and change.product and change.factor is None:
        a, b = (part.to(p.dtype) for part in change.product)
        p.view(-1, n).addmm_(a[rows], b, alpha=-step)
        return
    keep = kept(ok, hyper, torch.promote_types(p.dtype, torch.float32))
    change = _as_multiplied(change, p)
    for slab in _slabs(rows, n, _width(p, seed is not None)):
        span = slice((slab.start - rows.start) * n, (slab.stop - rows.start) * n)
        weights.move(p, span, _delta(change, slab, p.dtype).reshape(-1), step, keep, seed)


def _as_multiplied(change: _Change, p: Tensor) -> _Change:
    """The factors in the dtype that `multiply` wants, cast once and not for every slab."""
    if change.product is None or not p.is_cuda:
        return change
    a, b = (part.to(p.dtype) for part in change.product)
    return change._replace(product=(a, b))


def _slabs(rows: slice, n: int, width: int) -> Iterator[slice]:
    """Parts of `rows`, whole blocks of the flat weight, about `width` numbers at a time."""
    unit = BLOCK // math.gcd(n, BLOCK)
    height = max(1, width // (n * unit)) * unit
    for start in range(rows.start, rows.stop, height):
        yield slice(start, min(start + height, rows.stop))


def _delta(change: _Change, rows: slice, dtype: torch.dtype) -> Tensor:
    """[rows, n] of A B + c G, fp32; for 16-bit weights on a GPU A and B go into it as 16 bits."""
    product, factor, grad, ok = change
    whole = bases.multiply(product[0][rows], product[1], dtype) if product else None
    if grad is None or factor is None:
        assert whole is not None
        return whole
    scale = factor[rows] if factor.dim() and factor.shape[0] > 1 else factor
    dense = torch.where(ok, grad[rows].to(factor.dtype), 0) * scale
    return dense if whole is None else whole.add_(dense)


def _contiguous(p: Tensor) -> Tensor:
    """p without its graph, or a stand-in if its strides are others; `_back` puts that back."""
    return p if isinstance(p, weights.Int8Weight) else p.detach().contiguous()


def _back(p: Tensor, target: Tensor) -> None:
    if not isinstance(p, weights.Int8Weight) and not p.is_contiguous():
        p.detach().copy_(target)


# Bytes.

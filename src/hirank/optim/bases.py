"""The subspace a gradient is seen through, and when it is replaced.

    R = P' G          left, [r, n]     P [m, r]       back: P R
    R = G Q           right, [m, r]    Q [n, r]       back: R Q'
    R = P' G Q        two, [r, r]                     back: P R Q'

A parameter's state keeps `left` and `right` (or `left_codes`, `left_scale`, `left_low` in int4) and
when to refresh next. The side and the rank follow from the settings alone, see `layout`.

Two sides. With P and Q the singular vectors of G, P'GQ is diagonal: off the diagonal is rounding
noise, which Adam's first step turns into +-1 like the signal. So Q is turned by a random rotation
that stays the same from refresh to refresh: same span, no state, and a dense R.

Refreshing. `subspace` is one step of orthogonal iteration from the old basis, P <- qr(G G'P), signs
fixed so that columns stay near what they were. The columns of G G'P are nearly orthogonal when P
was nearly invariant, and QR does not mind their lengths, so fp32 is enough.

Laziness. The overlap ||P_old' P_new||^2 / r is 1 for equal spans, whatever the signs or rotations.
P_new is one subspace iteration, the cheap check; a basis that costs more is computed only if the
overlap is below `lazy`. After `lazy_patience` passes in a row the gap grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._noise import uniform_ref
from hirank.kernels._products import product
from hirank.kernels.blockquant import dequantize_affine, quantize_affine
from hirank.optim.costs import Layout, layout, matrix_shape
from hirank.optim.dice import BASIS, ROTATION, dice, seed_of
from hirank.optim.hyper import Hyper

__all__ = [
    "Basis",
    "Layout",
    "due",
    "layout",
    "load",
    "matrix_shape",
    "multiply",
    "overlap",
    "refresh",
]

State = dict[str, Any]

_OVERSAMPLING, _POWER_STEPS = 10, 2
_GOLDEN = (5**0.5 - 1) / 2


# The basis as it is used.


@dataclass(frozen=True)
class Basis:
    """P [m, r] and Q [n, r], None for a side that is not projected."""

    left: Tensor | None
    right: Tensor | None

    def project(self, grad: Tensor) -> Tensor:
        """R of an [m, n] gradient, fp32 (fp64 for fp64)."""
        reduced = grad
        if self.left is not None:
            reduced = multiply(self.left.T, reduced, grad.dtype)
        if self.right is not None:
            reduced = multiply(reduced, self.right, reduced.dtype)
        return reduced

    def factors(self, reduced: Tensor) -> tuple[Tensor, Tensor]:
        """A [m, r] and B [r, n] whose product is R projected back; a basis as it is stored."""
        if self.right is None:
            assert self.left is not None
            return self.left, reduced
        if self.left is None:
            return reduced, self.right.T
        return self.left.to(reduced.dtype) @ reduced, self.right.T


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in fp32 (fp64 for fp64), from operands rounded to `dtype` where the device multiplies
    16-bit numbers into fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    kind = dtype if a.is_cuda else wide
    return product(a.to(kind), b.to(kind), wide)


def overlap(old: Tensor, new: Tensor) -> Tensor:
    """||old' new||^2 / r: the share of one span that lies in the other. Both orthonormal [m, r]."""
    return (old.T @ new).square().sum() / old.shape[1]


# How it is kept.


def load(state: State, where: Layout, hyper: Hyper, like: Tensor) -> Basis:
    """The stored basis as stored; drawn or decoded in fp32, or as wide as `like`, for whose device
    and dtype it is, and in its 16 bits on a GPU, where products take no more."""
    draw = None
    if hyper.basis_store == "seed":
        draw = dice(like.device, hyper.seed, state["drawn"], state["index"], BASIS)
    made: list[Tensor | None] = []
    for key, on, height in (("left", where.left, where.m), ("right", where.right, where.n)):
        if not on:
            made.append(None)
        elif draw is not None:
            made.append(_seeded(height, where.rank, hyper.basis, like, draw))
        else:
            made.append(_get(state, key, (height, where.rank), like))
    return Basis(*made)


def _get(state: State, key: str, shape: tuple[int, int], like: Tensor) -> Tensor:
    if key in state:
        kept: Tensor = state[key]
        return kept
    codes, scale, low = (state[f"{key}_{part}"] for part in ("codes", "scale", "low"))
    size, dtype = math.prod(shape), _decoded_in(like)
    return dequantize_affine(codes, scale, low, size, 4, dtype).view(shape)


def _decoded_in(like: Tensor) -> torch.dtype:
    return like.dtype if like.is_cuda and like.dtype == torch.bfloat16 else torch.float32


def _put(state: State, key: str, basis: Tensor, hyper: Hyper) -> None:
    if hyper.basis_store == "int4":
        parts = quantize_affine(basis, 4)
        state.update(zip((f"{key}_codes", f"{key}_scale", f"{key}_low"), parts, strict=True))
    elif hyper.basis_store == "bf16":
        state[key] = basis.to(torch.bfloat16)
    elif hyper.basis_store == "fp32":
        state[key] = basis.contiguous()


# When and how it is replaced.


def due(state: State) -> bool:
    """Whether the next step starts with a refresh: always before the first one."""
    return bool(state.get("step", 0) >= state.get("next_refresh", 0))


def refresh(state: State, grad: Tensor, where: Layout, hyper: Hyper) -> tuple[Basis, Basis] | None:
    """Give `state` a basis for `grad` [m, n] (finite), and say when the next one is due.

    Returns the old and the new basis if there was an old one and it was replaced.
    """
    old = load(state, where, hyper, grad) if state.get("refreshes") else None
    step = state["drawn"] = state["step"]
    found = _find(state, grad, where, hyper, old)
    gap = max(1, min(int(hyper.gap * state["stretch"]), max(hyper.lazy_max_gap, hyper.gap)))
    state["next_refresh"] = step + (gap if old or not hyper.stagger else _first_gap(state, hyper))
    if found is None:
        return None
    state["refreshes"] += 1
    for key, side in (("left", found.left), ("right", found.right)):
        if side is not None:
            _put(state, key, side, hyper)
    return (old, load(state, where, hyper, grad)) if old else None


def _first_gap(state: State, hyper: Hyper) -> int:
    """Steps to a parameter's second refresh: golden-ratio fractions of the gap are well spread."""
    return 1 + int(hyper.gap * ((state["index"] + 1) * _GOLDEN % 1.0))


def _find(
    state: State, grad: Tensor, where: Layout, hyper: Hyper, old: Basis | None
) -> Basis | None:
    """The new basis, or None to go on with the old one."""
    if old is None or not hyper.lazy:
        return _computed(state, grad, where, hyper, old)
    checked = _computed(state, grad, where, hyper, old, kind="subspace")
    calm = min(float(share) for share in _overlaps(old, checked)) >= hyper.lazy
    state["calm"] = state["calm"] + 1 if calm else 0
    if not calm:
        state["stretch"] = 1.0
    elif state["calm"] >= hyper.lazy_patience:
        state["calm"], state["stretch"] = 0, state["stretch"] * hyper.lazy_growth
    if hyper.basis == "subspace":
        return checked  # it is there already
    return None if calm else _computed(state, grad, where, hyper, old)


def _overlaps(old: Basis, new: Basis) -> list[Tensor]:
    pairs = ((old.left, new.left), (old.right, new.right))
    return [overlap(a.to(b.dtype), b) for a, b in pairs if a is not None and b is not None]


def _computed(
    state: State,
    grad: Tensor,
    where: Layout,
    hyper: Hyper,
    old: Basis | None,
    kind: str | None = None,
) -> Basis:
    kind = kind or hyper.basis
    draw = dice(grad.device, hyper.seed, state["step"], state["index"], BASIS)
    turn = _rotation(state, grad, where, hyper)
    left = right = None
    if where.left:
        left = _leading(grad, where.rank, kind, old.left if old else None, draw)
    if where.right:
        warm = old.right if old else None
        if warm is not None and turn is not None:
            warm = warm.to(turn.dtype) @ turn.T
        right = _leading(grad.T, where.rank, kind, warm, draw)
        right = right if turn is None else right @ turn
    return Basis(left, right)


def _rotation(state: State, grad: Tensor, where: Layout, hyper: Hyper) -> Tensor | None:
    """Orthogonal [r, r], the same at every refresh of a parameter; None if nothing is turned."""
    given = hyper.basis in ("random", "gaussian", "identity")
    if given or not (where.left and where.right and hyper.rotate):
        return None
    seed = seed_of(hyper.seed, state["index"], ROTATION)
    drawn = uniform_ref(seed, 0, where.rank**2, grad.device).sub_(0.5).to(_wide(grad))
    return _orthonormal(drawn.view(where.rank, where.rank))


def _leading(grad: Tensor, r: int, kind: str, warm: Tensor | None, draw: torch.Generator) -> Tensor:
    """[m, r]: where the columns of `grad` [m, n] are largest, as `kind` finds it."""
    if kind in ("random", "gaussian", "identity"):
        return _seeded(grad.shape[0], r, kind, grad, draw)
    if kind == "subspace" and warm is not None:
        return _orthonormal(_times(grad, _unit(_times(grad.T, warm))))
    if kind == "svd":
        u: Tensor = torch.linalg.svd(_scaled(grad), full_matrices=False)[0]
        return _signed(u[:, :r], warm)
    if kind == "eigh":
        return _signed(_by_gram(_scaled(grad), r), warm)
    return _signed(_randomised(grad, r, draw), warm)


def _signed(basis: Tensor, warm: Tensor | None) -> Tensor:
    """Columns turned towards the old ones, so that kept moments still point the right way; without
    old ones, so that the largest entry is positive. A solver leaves signs to rounding."""
    if warm is None:
        along = basis.gather(0, basis.abs().argmax(0, keepdim=True))[0]
    else:
        along = (warm.to(basis.dtype) * basis).sum(0)
    return basis * torch.where(along < 0, -1.0, 1.0).to(basis.dtype)


def _seeded(m: int, r: int, kind: str, like: Tensor, draw: torch.Generator) -> Tensor:
    if kind == "identity":
        return torch.eye(m, r, device=like.device, dtype=_wide(like))
    normal = _normal((m, r), like, draw)
    return normal / r**0.5 if kind == "gaussian" else _orthonormal(normal)


def _by_gram(grad: Tensor, r: int) -> Tensor:
    """From the eigenvectors of the smaller of G G' and G'G."""
    m, n = grad.shape
    if m <= n:
        return _top(grad @ grad.T, r)
    return _orthonormal(grad @ _top(grad.T @ grad, r))


def _top(gram: Tensor, r: int) -> Tensor:
    """The eigenvectors of the r largest eigenvalues, largest first."""
    vectors: Tensor = torch.linalg.eigh(gram)[1]
    return vectors.flip(1)[:, :r]


def _randomised(grad: Tensor, r: int, draw: torch.Generator) -> Tensor:
    """Halko, Martinsson and Tropp's range finder with power steps, then an r-dimensional choice."""
    q = min(r + _OVERSAMPLING, *grad.shape)
    basis = _orthonormal(_times(grad, _normal((grad.shape[1], q), grad, draw)))
    for _ in range(_POWER_STEPS):
        basis = _orthonormal(_times(grad, _orthonormal(_times(grad.T, basis))))
    seen = _unit(_times(grad.T, basis))  # [n, q]
    return basis @ _top(seen.T @ seen, r)


# Small linear algebra.


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _normal(shape: tuple[int, int], like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw, device=like.device, dtype=_wide(like))


def _times(grad: Tensor, basis: Tensor) -> Tensor:
    return multiply(grad, basis, grad.dtype)


def _unit(x: Tensor) -> Tensor:
    """x over its norm, so that squares of tiny gradients do not underflow."""
    norm = torch.linalg.vector_norm(x)
    return x / torch.where(norm > 0, norm, 1)


def _scaled(grad: Tensor) -> Tensor:
    wide = grad.to(_wide(grad))
    peak = wide.abs().amax()
    return wide / torch.where(peak > 0, peak, 1)


def _orthonormal(x: Tensor) -> Tensor:
    """Q of QR with the diagonal of R made positive: unique, and continuous in x."""
    q: Tensor
    q, r = torch.linalg.qr(x)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)

"""Bytes of a low-rank optimiser's state, from shapes and settings alone: torch is not needed.

What is kept for a parameter is written down here once, for `LowRankAdamW.cost` and for `hirank
plan`; that the tensors really are so large is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hirank.kernels._block_sizes import affine_bytes, power_bytes
from hirank.optim.hyper import Hyper

__all__ = [
    "SMALL",
    "Layout",
    "basis_cost",
    "cost",
    "int8_weight_cost",
    "kind_of",
    "layout",
    "matrix_shape",
    "moments_cost",
    "power_bytes",
]

SMALL = 4096
"""Tensors with fewer numbers are not quantised."""

# Which side.


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """(out, rest) if both are at least 2: what can be projected; else None."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if min(rows, columns) >= 2 else None


class Layout(NamedTuple):
    """Which sides of an [m, n] gradient are projected, and to how many directions."""

    m: int
    n: int
    left: bool
    right: bool
    rank: int

    @property
    def reduced(self) -> tuple[int, int]:
        """The shape of R."""
        return (self.rank if self.left else self.m, self.rank if self.right else self.n)


def layout(shape: tuple[int, int], hyper: Hyper) -> Layout:
    """Follows `hyper.sides`; the rank is at most the shorter side.

    Of a square matrix the right side is the short one, as in galore-torch (the paper says the left
    one): a small Llama learns better so.
    """
    m, n = shape
    wide = m < n
    left = hyper.sides in ("left", "two") or hyper.sides == ("short" if wide else "long")
    right = hyper.sides in ("right", "two") or hyper.sides == ("long" if wide else "short")
    return Layout(m, n, left, right, min(hyper.rank or 0, m, n))


# Bytes.


def kind_of(n: int, hyper: Hyper) -> str:
    """How `n` moments are kept: fp32, bf16 or int8."""
    return "fp32" if n < SMALL else hyper.state


def moments_cost(n: int, hyper: Hyper, wide: int = 4) -> int:
    """Bytes of both moments of `n` numbers; `wide` is 8 for fp64 weights."""
    kind = kind_of(n, hyper)
    if kind != "int8":
        return 2 * n * (wide if kind == "fp32" else 2)
    return 2 * power_bytes(n) * (2 if hyper.rounding == "feedback" else 1)


def basis_cost(where: Layout, hyper: Hyper, wide: int = 4) -> int:
    """Bytes of the stored bases; `wide` is 8 for fp64 weights."""
    sizes = [where.m * where.rank] * where.left + [where.n * where.rank] * where.right
    if hyper.basis_store == "int4":
        return sum(affine_bytes(size, 4) for size in sizes)
    return sum(sizes) * {"fp32": wide, "bf16": 2, "seed": 0}[hyper.basis_store]


def cost(shape: tuple[int, ...], hyper: Hyper, wide: int = 4) -> int:
    """Bytes of the state of a parameter of `shape`: moments, bases, and the limiter's one number.
    Of a plain parameter's shard give the shard's shape.

    `wide` is the size of the widest number kept: 4, or 8 for fp64 weights.
    """
    matrix = matrix_shape(shape)
    if hyper.rank is None or matrix is None:
        return moments_cost(math.prod(shape), hyper, wide)
    where = layout(matrix, hyper)
    kept = moments_cost(math.prod(where.reduced), hyper, wide) + basis_cost(where, hyper, wide)
    return kept + (4 if hyper.limiter else 0)


def int8_weight_cost(n: int) -> int:
    """Bytes of a weight of `n` numbers in int8."""
    return affine_bytes(n, 8)

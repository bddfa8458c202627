"""Singular values of a product B A, without forming it, and what they say about rank.

    B = Q_B R_B,  A^T = Q_A R_A        s B A = Q_B (s R_B R_A^T) Q_A^T

The middle is R x R and has the singular values of the product: two thin QR and one small SVD, all
in fp64. The cost is 2 (N + K) R^2 FLOPs instead of 2 N K R, and memory is that of the factors.

Shapes     lora_B [N, R]; lora_A [R, K]; values [min(N, K, R)], largest first.
Gram       where B or A is well conditioned its R comes from a Cholesky of B^T B in fp64, three
           times as fast and right to ten digits (see `_upper`); else from Householder's QR.
Eckart-Young  no matrix of rank r is nearer to the product than its first r singular triples; what
           is left is the root of the sum of the squares of the other values.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Factors", "Spectrum", "Triples", "difference_norm", "product_triples"]
__all__ += ["product_values"]

CONDITION = 1e3


class Factors(NamedTuple):
    """B [N, R] and A [R, K] of a product."""

    B: Tensor
    A: Tensor


@dataclass(frozen=True)
class Spectrum:
    """Singular values, largest first, as numbers in fp64."""

    values: tuple[float, ...]

    @property
    def norm(self) -> float:
        """Frobenius."""
        return math.sqrt(self.energy)

    @property
    def energy(self) -> float:
        """Sum of the squares."""
        return math.fsum(value * value for value in self.values)

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the values as shares of their sum (Roy and Vetterli, 2007).

        R for R equal values, 1 for a single one, 0 where all are zero.
        """
        total = math.fsum(self.values)
        shares = [value / total for value in self.values if value > 0] if total > 0 else []
        return math.exp(-math.fsum(p * math.log(p) for p in shares if p > 0)) if shares else 0.0

    @property
    def stable_rank(self) -> float:
        """Energy over the largest square; 0 where all values are zero."""
        return self.energy / self.values[0] ** 2 if self.values and self.values[0] > 0 else 0.0

    def kept(self, rank: int) -> float:
        """Share of the energy in the first `rank` values; 1 for a product that is zero."""
        if self.energy == 0:
            return 1.0
        return 1 - math.fsum(value * value for value in self.values[rank:]) / self.energy

    def residual(self, rank: int) -> float:
        """Eckart-Young: what the best matrix of that rank misses, relative to the product's norm.

        0 for a product that is zero.
        """
        if self.energy == 0:
            return 0.0
        left = math.fsum(value * value for value in self.values[rank:])
        return math.sqrt(left / self.energy)

    def rank_for(self, energy: float) -> int:
        """The least rank that keeps this share of the energy; 0 for a product that is zero."""
        if self.energy == 0:
            return 0
        allowed, left = (1 - energy) * self.energy, 0.0
        for rank in range(len(self.values), 0, -1):
            left += self.values[rank - 1] ** 2
            if left > allowed:
                return rank
        return 0


def _core(factors: Factors) -> Tensor:
    """R_B R_A^T: at most [R, R], with the singular values of B A."""
    return _upper(factors.B.double()) @ _upper(factors.A.double().T).T


def _upper(matrix: Tensor) -> Tensor:
    """R of a QR of a tall matrix in fp64, by Cholesky of its Gram matrix where that is as good.

    Its singular values are off by about eps cond^2, relatively: 1e-10 at most, where the condition
    (bounded from above by the norms of R and its inverse) is at most `CONDITION`.
    """
    lower: Tensor
    lower, failed = torch.linalg.cholesky_ex(matrix.T @ matrix)
    if int(failed) == 0:
        one = torch.eye(len(lower), dtype=lower.dtype)
        inverse = torch.linalg.solve_triangular(lower, one, upper=False)
        if float(lower.norm() * inverse.norm()) <= CONDITION:
            return lower.mT
    upper: Tensor = torch.linalg.qr(matrix, mode="r").R
    return upper


@torch.no_grad()
def product_values(factors: Factors, scale: float = 1.0) -> Spectrum:
    """The singular values of `scale * B A`, whatever the dtype of the factors."""
    values = torch.linalg.svdvals(_core(factors)) * abs(scale)
    return Spectrum(tuple(values.tolist()))


class Triples(NamedTuple):
    """The singular value decomposition of B A, in fp64: left diag(values) right."""

    left: Tensor
    """[N, min(N, K, R)]"""
    values: Tensor
    right: Tensor
    """[min(N, K, R), K]"""

    def cut(self, rank: int) -> Factors:
        """The best factors of that rank, balanced: B'^T B' = A' A'^T = diag(values)."""
        root = self.values[:rank].sqrt()
        return Factors(self.left[:, :rank] * root, root[:, None] * self.right[:rank])


@torch.no_grad()
def product_triples(factors: Factors) -> Triples:
    """All singular triples of B A, whatever the dtype of the factors."""
    Q_B, upper_B = torch.linalg.qr(factors.B.double())
    Q_A, upper_A = torch.linalg.qr(factors.A.double().T)
    left, values, right = torch.linalg.svd(upper_B @ upper_A.T, full_matrices=False)
    return Triples(Q_B @ left, values, right @ Q_A.T)


@torch.no_grad()
def difference_norm(one: Factors, other: Factors) -> float:
    """Frobenius norm of B A - B' A', not formed either: the product of the factors side by side."""
    B = torch.cat([one.B.double(), -other.B.double()], dim=1)
    A = torch.cat([one.A.double(), other.A.double()], dim=0)
    return float(torch.linalg.matrix_norm(_core(Factors(B, A))))

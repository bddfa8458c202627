"""The largest singular values of a matrix that is only ever seen in blocks of rows.

A random matrix of l columns finds the range of D (Halko, Martinsson and Tropp, 2011), two power
iterations turn it towards the large values, and an SVD of Q^T D, [l, K], has them:

    Y = D X,  Q = orth(Y);  twice: X = orth(D^T Q), Q = orth(D X);  values of D^T Q

Values found so are never above the true ones, so what they leave of the energy, which is summed
exactly, is never below the true residual: `residual` is an upper bound, and near it.

Shapes     D [N, K]; X [K, l], half as many columns again as values are asked for.
Precision  products in fp32, sums of squares and SVD in fp64.
Memory     (N + K) l numbers, a block of rows, and D itself if it is within `HELD` bytes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hirank.audit.spectrum import Spectrum, Triples

__all__ = ["Blocks", "PartialSpectrum", "largest_triples", "largest_values"]

EXACT = 256
"""The smaller side up to which all values are computed."""
HELD = 2**29
_POWER, _SEED = 2, 0


@dataclass(frozen=True)
class Blocks:
    """A matrix [N, K] in fp32, read anew each time it is gone through."""

    shape: tuple[int, int]
    read: Callable[[], Iterator[Tensor]]
    """Blocks of rows from the first to the last."""


@dataclass(frozen=True)
class PartialSpectrum:
    """The largest values, and the energy of all."""

    known: Spectrum
    energy: float
    size: int
    """How many values there are."""

    @property
    def norm(self) -> float:
        """Frobenius."""
        return math.sqrt(self.energy)

    @property
    def complete(self) -> bool:
        return self.energy == 0 or len(self.known.values) == self.size

    def residual(self, rank: int) -> float:
        """What the best matrix of that rank misses at most, relative to the norm."""
        if self.energy == 0:
            return 0.0
        kept = math.fsum(value * value for value in self.known.values[:rank])
        return math.sqrt(max(0.0, 1 - kept / self.energy))

    def rank_for(self, energy: float) -> int | None:
        """A rank that keeps this share of the energy; None if it is above the known values."""
        if self.energy == 0:
            return 0
        kept = 0.0
        for rank, value in enumerate(self.known.values):
            if kept >= energy * self.energy:
                return rank
            kept += value * value
        return len(self.known.values) if kept >= energy * self.energy else None


@torch.no_grad()
def largest_values(matrix: Blocks, count: int) -> PartialSpectrum:
    """The `count` largest singular values of a matrix in blocks, and all of a small one.

    The random numbers are always the same, and so is the result. A matrix that is zero, or holds
    what is not finite, has no values and says so by its energy.
    """
    matrix = _held(matrix)
    squares = [float(block.double().square().sum()) for block in matrix.read()]
    energy, size = math.fsum(squares), min(matrix.shape)
    if energy == 0 or not math.isfinite(energy):
        return PartialSpectrum(Spectrum(()), energy, size)
    if size <= max(EXACT, count):
        dense = torch.cat(list(matrix.read())).double()
        values = torch.linalg.svdvals(dense)
    else:
        _, image = _range(matrix, count)
        values = torch.linalg.svdvals(image.double())[:count]
    return PartialSpectrum(Spectrum(tuple(values.tolist())), energy, size)


def _held(matrix: Blocks) -> Blocks:
    if 4 * matrix.shape[0] * matrix.shape[1] > HELD:
        return matrix
    blocks = list(matrix.read())
    return Blocks(matrix.shape, lambda: iter(blocks))


@torch.no_grad()
def largest_triples(matrix: Blocks, count: int) -> Triples:
    """The `count` largest singular triples of a matrix in blocks, found as its values are."""
    matrix = _held(matrix)
    size = min(matrix.shape)
    if size <= max(EXACT, count):
        dense = torch.cat(list(matrix.read())).double()
        left, values, right = torch.linalg.svd(dense, full_matrices=False)
        return Triples(left[:, :count], values[:count], right[:count])
    Q, image = _range(matrix, count)
    turn, values, right = torch.linalg.svd(image.double().T, full_matrices=False)
    return Triples(Q.double() @ turn[:, :count], values[:count], right[:count])


def _range(matrix: Blocks, count: int) -> tuple[Tensor, Tensor]:
    """Q [N, l], near the span of the `count` largest left vectors, and D^T Q [K, l]."""
    columns = min(*matrix.shape, count + max(8, count // 2))
    dice = torch.Generator().manual_seed(_SEED)
    X = torch.randn(matrix.shape[1], columns, generator=dice)
    Q = _orthogonal(_times(matrix, X))
    for _ in range(_POWER):
        X = _orthogonal(_transposed_times(matrix, Q))
        Q = _orthogonal(_times(matrix, X))
    return Q, _transposed_times(matrix, Q)


def _orthogonal(matrix: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(matrix.double()).Q
    return basis.float()


def _times(matrix: Blocks, X: Tensor) -> Tensor:
    """D X, [N, l]."""
    return torch.cat([block @ X for block in matrix.read()])


def _transposed_times(matrix: Blocks, Y: Tensor) -> Tensor:
    """D^T Y, [K, l]."""
    total, row = torch.zeros(matrix.shape[1], Y.shape[1]), 0
    for block in matrix.read():
        total.addmm_(block.T, Y[row : row + block.shape[0]])
        row += block.shape[0]
    return total

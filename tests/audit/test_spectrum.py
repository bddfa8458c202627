"""Singular values of a product against the dense product in fp64."""

import math

import pytest
import torch

from hirank.audit.partial import Blocks, largest_values
from hirank.audit.spectrum import (
    Factors,
    Spectrum,
    difference_norm,
    product_triples,
    product_values,
)

SHAPES = [(40, 30, 8), (9, 50, 16), (50, 9, 16), (7, 7, 1)]


def factors(n: int, k: int, r: int, dtype: torch.dtype = torch.float32) -> Factors:
    return Factors(torch.randn(n, r).to(dtype), torch.randn(r, k).to(dtype))


def dense(f: Factors) -> torch.Tensor:
    return f.B.double() @ f.A.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_dense_product(shape: tuple[int, ...], dtype: torch.dtype):
    f = factors(*shape, dtype=dtype)
    truth = torch.linalg.svdvals(1.5 * dense(f))[: min(shape)]
    found = torch.tensor(product_values(f, -1.5).values, dtype=torch.float64)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_small_values_beside_large_ones_are_right():
    torch.manual_seed(1)
    f = factors(60, 50, 12, torch.float64)
    f.B.mul_(torch.logspace(0, -9, 12, dtype=torch.float64))
    truth = torch.linalg.svdvals(dense(f))[:12]
    found = torch.tensor(product_values(f).values, dtype=torch.float64)
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("condition", [10, 50, 200, 1e4, 1e8])
def test_values_are_right_to_ten_digits_whatever_the_condition(condition: float):
    """Below about a thousand they come from Gram matrices, above from QR."""
    f = factors(90, 70, 12, torch.float64)
    f.B.mul_(torch.logspace(0, -math.log10(condition), 12, dtype=torch.float64))
    Q_B, R_B = torch.linalg.qr(f.B)
    Q_A, R_A = torch.linalg.qr(f.A.T)
    truth = torch.linalg.svdvals(R_B @ R_A.T)
    found = torch.tensor(product_values(f).values, dtype=torch.float64)
    eps = torch.finfo(torch.float64).eps
    torch.testing.assert_close(found, truth, rtol=max(1e-10, 10 * eps * condition), atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cut_is_the_best_matrix_of_its_rank(shape: tuple[int, ...]):
    f = factors(*shape)
    U, S, V = torch.linalg.svd(dense(f), full_matrices=False)
    for rank in range(1, min(shape) + 1):
        cut = product_triples(f).cut(rank)
        best = U[:, :rank] * S[:rank] @ V[:rank]
        torch.testing.assert_close(cut.B @ cut.A, best, rtol=0, atol=1e-12)
        missed = product_values(f).residual(rank) * float(S.norm())
        assert difference_norm(f, cut) == pytest.approx(float(S[rank:].norm()), abs=1e-11)
        assert missed == pytest.approx(float(S[rank:].norm()), abs=1e-11)


def test_ranks_of_known_spectra():
    flat, one, none = Spectrum((2.0,) * 5), Spectrum((3.0, 0.0)), Spectrum((0.0, 0.0))
    assert flat.effective_rank == pytest.approx(5) and flat.stable_rank == pytest.approx(5)
    assert (one.effective_rank, one.stable_rank, one.rank_for(0.99)) == (1, 1, 1)
    assert (none.effective_rank, none.stable_rank, none.rank_for(0.99)) == (0, 0, 0)
    assert (none.residual(0), none.kept(0)) == (0, 1)
    shares = [0.5, 0.3, 0.2]  # of 5, 3, 2
    entropy = -sum(p * math.log(p) for p in shares)
    assert Spectrum((5.0, 3.0, 2.0)).effective_rank == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 0.999999])
def test_the_least_rank_for_an_energy(energy: float):
    values = torch.rand(30, dtype=torch.float64).sort(descending=True).values
    found = Spectrum(tuple(values.tolist()))
    kept = values.square().cumsum(0) / values.square().sum()
    assert found.rank_for(energy) == int((kept < energy).sum()) + 1
    assert found.kept(found.rank_for(energy)) >= energy > found.kept(found.rank_for(energy) - 1)


# Matrices that are seen in blocks.


def in_blocks(matrix: torch.Tensor, height: int = 37) -> Blocks:
    return Blocks(tuple(matrix.shape), lambda: iter(matrix.split(height)))


def decaying(n: int, k: int) -> torch.Tensor:
    size = min(n, k)
    U, V = (torch.linalg.qr(torch.randn(x, size)).Q for x in (n, k))
    return U * torch.arange(1, size + 1).float().pow(-0.7) @ V.T


@pytest.mark.parametrize("held", [0, 2**29])
def test_large_values_and_their_residual(held: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hirank.audit.partial.HELD", held)
    matrix = decaying(400, 300)
    truth = torch.linalg.svdvals(matrix.double())
    found = largest_values(in_blocks(matrix), 24)
    known = torch.tensor(found.known.values, dtype=torch.float64)
    assert (known <= truth[:24] * (1 + 1e-6)).all()
    torch.testing.assert_close(known, truth[:24], rtol=0.02, atol=0)
    assert found.norm == pytest.approx(float(truth.norm()), rel=1e-6) and not found.complete
    for rank in (0, 1, 8, 24):
        floor = float(truth[rank:].norm() / truth.norm())
        assert floor * (1 - 1e-6) <= found.residual(rank) <= floor * 1.01
    assert found.rank_for(0.5) == Spectrum(tuple(truth.tolist())).rank_for(0.5)
    assert found.rank_for(0.999) is None


def test_a_small_matrix_is_known_whole():
    matrix = torch.randn(30, 50)
    found = largest_values(in_blocks(matrix), 4)
    assert found.complete
    truth = torch.linalg.svdvals(matrix.double())
    torch.testing.assert_close(torch.tensor(found.known.values, dtype=torch.float64), truth)
    assert largest_values(in_blocks(torch.zeros(5, 4)), 4).rank_for(0.99) == 0

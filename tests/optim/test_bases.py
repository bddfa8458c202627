"""Bases: orthonormal, the right span, reproducible, replaced when due, lazily or not."""

import pytest
import torch
from torch import Tensor

from hirank import GaLoreAdamW
from hirank.optim import bases
from hirank.optim.bases import Basis, layout, overlap
from hirank.optim.hyper import Hyper
from optim.toys import grads, parameter, run

EXACT = ["svd", "eigh"]
LOOKING = [*EXACT, "randomised", "subspace"]
ORTHONORMAL = [*LOOKING, "random", "identity"]


def fresh() -> dict:
    return {"step": 0, "index": 0, "refreshes": 0, "drawn": 0, "calm": 0, "stretch": 1.0}


def basis_of(grad: Tensor, state: dict | None = None, **options) -> Basis:
    hyper = Hyper(**options)
    state, where = fresh() if state is None else state, layout(tuple(grad.shape), hyper)
    bases.refresh(state, grad, where, hyper)
    return bases.load(state, where, hyper, grad)


def low_rank(m: int, n: int, r: int, noise: float = 0.0, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, r, generator=draw), torch.randn(r, n, generator=draw)
    return a @ b / r**0.5 + noise * torch.randn(m, n, generator=draw)


def off(basis: Tensor) -> float:
    return float((basis.T @ basis - torch.eye(basis.shape[1])).abs().max())


@pytest.mark.parametrize("kind", ORTHONORMAL)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64)], ids=str)
@pytest.mark.parametrize("sides", ["short", "long", "two"])
def test_gb7_bases_are_orthonormal(kind: str, shape: tuple[int, int], sides: str):
    grad = grads(1, *shape)[0].bfloat16().float()
    basis = basis_of(grad, rank=16, basis=kind, sides=sides)
    made = [side for side in (basis.left, basis.right) if side is not None]
    assert len(made) == (2 if sides == "two" else 1)
    assert max(off(side) for side in made) < 1e-5


@pytest.mark.parametrize(("store", "bound"), [("fp32", 1e-5), ("bf16", 2e-3), ("int4", 0.05)])
def test_gb7_what_storing_costs(store: str, bound: float):
    basis = basis_of(low_rank(1024, 1100, 128, noise=0.1), rank=128, basis_store=store).left
    assert off(basis.float()) < bound


@pytest.mark.parametrize("kind", [*LOOKING, "random"])
def test_rank_deficient_gradients_give_orthonormal_bases(kind: str):
    for grad in (low_rank(32, 48, 3), torch.zeros(32, 48)):
        assert off(basis_of(grad, rank=8, basis=kind).left) < 1e-5


@pytest.mark.parametrize("kind", LOOKING)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48)], ids=str)
def test_energy_kept_is_near_the_best(kind: str, shape: tuple[int, int]):
    grad = low_rank(*shape, 8, noise=0.2)
    state = fresh()
    for _ in range(2):  # the second time warm
        basis = basis_of(grad, state, rank=8, basis=kind)
    best = torch.linalg.svdvals(grad)[:8].square().sum()
    kept = basis.project(grad).square().sum()
    assert kept >= best * (1 - 1e-5 if kind in EXACT else 0.995)


def test_warm_iteration_converges_to_the_leading_subspace():
    grad, state = low_rank(48, 80, 8, noise=0.3), fresh()
    for _ in range(10):
        basis = basis_of(grad, state, rank=8)
    best = torch.linalg.svd(grad).U[:, :8]
    assert overlap(best, basis.left) > 1 - 1e-5


def test_warm_iteration_keeps_columns_in_place():
    grad, state = low_rank(48, 80, 8, noise=0.05), fresh()
    for _ in range(20):
        old = basis_of(grad, state, rank=8).left
    new = basis_of(grad + 0.01 * grads(1, 48, 80)[0], state, rank=8).left
    assert ((old * new).sum(0) > 0.9).all()


@pytest.mark.parametrize("kind", EXACT)
def test_two_sides_see_what_one_sees(kind: str):
    grad = low_rank(48, 80, 8, noise=0.1)
    two = basis_of(grad, rank=8, basis=kind, sides="two")
    one = basis_of(grad, rank=8, basis=kind)
    assert two.project(grad).norm() == pytest.approx(float(one.project(grad).norm()), rel=1e-5)


def test_the_stored_basis_projects_and_projects_back():
    grad = low_rank(48, 80, 8, noise=0.1)
    state = fresh()
    basis = basis_of(grad, state, rank=8, basis_store="int4")
    again = bases.load(state, layout((48, 80), Hyper(rank=8)), Hyper(rank=8), grad)
    assert torch.equal(again.left, basis.left)
    assert torch.equal(basis.project(grad), basis.left.T @ grad)
    a, b = basis.factors(basis.project(grad))
    assert torch.equal(a @ b, basis.left @ (basis.left.T @ grad))


def test_two_codes_of_a_stored_basis_share_a_byte():
    state = fresh()
    basis_of(low_rank(48, 80, 8), state, rank=8, basis_store="int4")
    assert state["left_codes"].numel() == 48 * 8 // 2 and state["left_codes"].dtype == torch.uint8


# Overlap and laziness.


def turned(basis: Tensor, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return basis @ torch.linalg.qr(torch.randn(basis.shape[1], basis.shape[1], generator=draw)).Q


def test_overlap_is_blind_to_signs_and_rotations():
    a = torch.linalg.qr(torch.randn(64, 8)).Q
    assert overlap(a, -a) == pytest.approx(1, abs=1e-5)
    assert overlap(a, turned(a)) == pytest.approx(1, abs=1e-5)
    b = torch.linalg.qr(torch.randn(64, 8)).Q
    assert overlap(a, b) < 0.4  # 8 / 64 on average
    far = torch.linalg.qr(torch.cat([a, b], 1)).Q[:, 8:]
    assert overlap(a, far) < 1e-10


def gaps(optimizer: GaLoreAdamW, p, gradients) -> list[int]:
    """The steps at which a refresh was due."""
    at = []
    for step, gradient in enumerate(gradients):
        if optimizer.state[p].get("next_refresh", 0) == step:
            at.append(step)
        run(optimizer, p, [gradient])
    return at


def same_span(steps: int, seed: int = 0) -> list[Tensor]:
    """Gradients of one 4-dimensional column space, with fresh coefficients and signs."""
    span = torch.linalg.qr(low_rank(32, 4, 4, seed=seed)).Q
    return [span @ g for g in grads(steps, 4, 48, seed=seed + 1)]


@pytest.mark.parametrize("kind", LOOKING)
def test_a_constant_subspace_is_looked_at_ever_less(kind: str):
    p = parameter(32, 48)
    optimizer = GaLoreAdamW([p], rank=4, gap=2, basis=kind, lazy=0.9, lazy_patience=2)
    assert gaps(optimizer, p, same_span(40)) == [0, 2, 4, 8, 12, 20, 28]
    if kind != "subspace":
        assert optimizer.state[p]["refreshes"] == 1  # the exact basis was never needed again


@pytest.mark.parametrize("kind", EXACT)
def test_a_subspace_that_moves_brings_the_gap_back(kind: str):
    p = parameter(32, 48)
    optimizer = GaLoreAdamW([p], rank=4, gap=2, basis=kind, lazy=0.9)
    calm, moved = same_span(14), same_span(5, seed=7)
    assert gaps(optimizer, p, calm + moved) == [0, 2, 6, 14, 16]
    assert optimizer.state[p]["refreshes"] == 2
    assert overlap(optimizer.state[p]["left"], torch.linalg.svd(moved[0]).U[:, :4]) > 0.999


def test_the_gap_is_capped():
    p = parameter(32, 48)
    optimizer = GaLoreAdamW([p], rank=4, gap=2, lazy=0.9, lazy_max_gap=5)
    assert gaps(optimizer, p, same_span(30)) == [0, 2, 6, 11, 16, 21, 26]


def test_staggered_refreshes_are_spread():
    shapes = [(8, 12)] * 10
    params = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
    optimizer = GaLoreAdamW(params, rank=2, gap=20, stagger=True)
    at = []
    for step in range(60):
        for p, g in zip(params, grads(10, 8, 12, seed=step), strict=True):
            at += [step] * (optimizer.state[p].get("next_refresh", 0) == step)
            p.grad = g
        optimizer.step()
    assert at.count(0) == 10 and max(at.count(s) for s in range(1, 60)) <= 2


# The trap of two sides.


def cosine(sides: str, *, rotate: bool, dtype: torch.dtype, steps: int = 1, seed: int = 0) -> float:
    """cos(update, G) for G = U diag(exp(-i / 20)) V', 256 x 384, rank 32."""
    draw = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, 256, generator=draw)).Q for n in (256, 384))
    grad = u @ torch.diag((-torch.arange(256.0) / 20).exp()) @ v.T
    p = torch.nn.Parameter(torch.zeros(256, 384))
    optimizer = GaLoreAdamW([p], rank=32, sides=sides, rotate=rotate, basis="svd", lr=1.0)
    before = p.detach().clone()
    for _ in range(steps):
        noise = torch.randn(256, 384, generator=draw)
        noisy = grad if steps == 1 else grad + 0.5 * grad.norm() * noise / noise.norm()
        before = p.detach().clone()
        run(optimizer, p, [noisy.to(dtype).float()])
    moved = (before - p.detach()).flatten()
    return float(torch.nn.functional.cosine_similarity(moved, grad.flatten(), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_sides_rotated_do_not_amplify_rounding_noise(dtype: torch.dtype):
    assert cosine("two", rotate=False, dtype=dtype) < 0.35  # the plain form does
    assert cosine("two", rotate=True, dtype=dtype) > 0.6
    assert cosine("short", rotate=True, dtype=dtype) > 0.6


def test_two_sides_rotated_hold_under_noise():
    plain, rotated = (cosine("two", rotate=r, dtype=torch.float32, steps=10) for r in (False, True))
    assert plain < 0.35 < 0.6 < rotated


# Randomness.


@pytest.mark.parametrize("kind", ["subspace", "randomised", "random", "gaussian"])
def test_g15_bases_are_reproducible(kind: str):
    grad = grads(1, 32, 48)[0]
    state = torch.get_rng_state()
    a, b = (basis_of(grad, rank=4, basis=kind).left for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    other = basis_of(grad, rank=4, basis=kind, seed=1).left
    assert not torch.equal(a, other)
    if kind in ("random", "gaussian"):
        neighbour = basis_of(grad, fresh() | {"index": 1}, rank=4, basis=kind).left
        assert not torch.equal(a, neighbour)


def test_gaussian_columns_have_the_papers_variance():
    basis = basis_of(grads(1, 400, 500)[0], rank=100, basis="gaussian").left
    assert basis.var() == pytest.approx(1 / 100, rel=0.05)


# Moments on a refresh.


def moments_after(mode: str, **options) -> tuple[dict, Basis, Basis]:
    p = parameter(12, 20)
    optimizer = GaLoreAdamW([p], rank=4, gap=3, moments=mode, basis="svd", **options)
    where = layout((12, 20), Hyper(rank=4, **options))
    run(optimizer, p, grads(3, 12, 20))
    old = bases.load(optimizer.state[p], where, Hyper(rank=4), p)
    kept = {k: v.clone() for k, v in optimizer.state[p].items() if k.startswith("exp")}
    zero = [torch.zeros(12, 20)]
    zero[0][0, 0] = 1e-30  # a refresh from this one; what it adds to the moments is nothing
    run(optimizer, p, zero)
    new = bases.load(optimizer.state[p], where, Hyper(rank=4), p)
    return kept | {"now": optimizer.state[p]}, old, new


def test_moments_are_kept_as_they_are():
    got, _, _ = moments_after("keep")
    assert (got["now"]["exp_avg"] - 0.9 * got["exp_avg"]).abs().max() < 1e-7


def test_moments_are_reset_with_their_bias_correction():
    got, _, _ = moments_after("reset")
    assert got["now"]["exp_avg"].abs().max() < 1e-7 and got["now"]["age"] == 1


@pytest.mark.parametrize("sides", ["left", "right", "two"])
def test_moments_are_projected_into_the_new_basis(sides: str):
    got, old, new = moments_after("project", sides=sides)
    a, b = old.factors(got["exp_avg"])
    expected = 0.9 * new.project(a @ b)
    assert (got["now"]["exp_avg"] - expected).abs().max() < 1e-6
    assert (got["now"]["exp_avg_sq"] >= 0).all()


def test_projecting_into_the_same_basis_changes_nothing():
    trails, gradient = [], low_rank(12, 20, 4)
    for mode in ("keep", "project"):
        p = parameter(12, 20)
        trails.append(run(GaLoreAdamW([p], rank=4, gap=2, moments=mode), p, [gradient] * 7))
    assert (trails[0] - trails[1]).abs().max() < 1e-5

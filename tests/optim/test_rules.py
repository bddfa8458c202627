"""Steps against torch.optim.AdamW and against the papers' formulas in fp64."""

import copy

import pytest
import torch
from torch import nn

from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW
from hirank.optim.hyper import Hyper
from hirank.optim.rules import galore_adam_step
from optim.toys import GL, galore_by_definition, grads, parameter, run, same, snapshot

HP = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(12, 20), (20, 12), (16, 16)]


@pytest.mark.parametrize(
    ("shape", "sides"),
    [(shape, "short") for shape in SHAPES]
    + [((12, 20), "left"), ((20, 12), "right"), ((16, 16), "two")],
    ids=str,
)
def test_gb6_identity_basis_of_full_rank_is_adamw(shape: tuple[int, int], sides: str):
    ours, theirs = parameter(*shape), parameter(*shape)
    options = {"rank": min(shape), "scale": 1.0, "basis": "identity", "sides": sides, "gap": 4}
    a = run(GaLoreAdamW([ours], **options, **HP), ours, grads(12, *shape))
    b = run(torch.optim.AdamW([theirs], **HP), theirs, grads(12, *shape))
    assert (a - b).abs().max() < 1e-6


def test_gb6_full_rank_of_another_basis_is_not_adamw():
    ours, theirs = parameter(12, 20), parameter(12, 20)
    a = run(GaLoreAdamW([ours], rank=12, scale=1.0, lr=0.01), ours, grads(3, 12, 20))
    b = run(torch.optim.AdamW([theirs], lr=0.01, weight_decay=0), theirs, grads(3, 12, 20))
    assert (a - b).abs().max() > 0.01


@pytest.mark.parametrize("shape", [(64,), (50, 32), (), (1, 16)], ids=str)
def test_g21_unprojected_parameters_step_as_in_torch(shape: tuple[int, ...]):
    ours, theirs = parameter(*shape), parameter(*shape)
    a = run(GaLoreAdamW([{"params": [ours]}], **HP), ours, grads(10, *shape))
    b = run(torch.optim.AdamW([theirs], **HP), theirs, grads(10, *shape))
    assert (a - b).abs().max() < 1e-6


class Leading:
    """The first left singular vectors, each turned towards the one before it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.last = rank, None

    def __call__(self, g: torch.Tensor) -> torch.Tensor:
        u = torch.linalg.svd(g, full_matrices=False).U[:, : self.rank]
        if self.last is None:
            self.last = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
        else:
            self.last = u * (u * self.last).sum(0).sign()
        return self.last


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("basis", ["svd", "eigh"])
def test_one_sided_is_alg_2_step_for_step(shape: tuple[int, int], basis: str):
    p, gradients = parameter(*shape, dtype=torch.float64), grads(13, *shape, dtype=torch.float64)
    start = p.detach().clone()
    want = galore_by_definition(start, gradients, rank=5, gap=4, scale=0.25, basis=Leading(5), **HP)
    optimizer = GaLoreAdamW([p], rank=5, gap=4, scale=0.25, basis=basis, **HP)
    for gradient, expected in zip(gradients, want, strict=True):
        assert (run(optimizer, p, [gradient]) - expected).abs().max() < 1e-10


def test_default_basis_follows_alg_2_given_the_same_bases():
    p, gradients = parameter(12, 20, dtype=torch.float64), grads(9, 12, 20, dtype=torch.float64)
    start, bases = p.detach().clone(), []
    optimizer, trail = GaLoreAdamW([p], rank=5, gap=4, scale=0.25, **HP), []
    for gradient in gradients:
        trail.append(run(optimizer, p, [gradient]))
        bases.append(optimizer.state[p]["left"].clone())
    told = iter([bases[0], bases[4], bases[8]])
    want = galore_by_definition(
        start, gradients, rank=5, gap=4, scale=0.25, basis=lambda _: next(told), **HP
    )
    assert max((a - b).abs().max() for a, b in zip(trail, want, strict=True)) < 1e-12


def test_the_step_function_is_the_whole_rule():
    p, state = parameter(12, 20), {}
    other = nn.Parameter(p.detach().clone())
    optimizer = GaLoreAdamW([other], rank=3, gap=2)
    for gradient in grads(5, 12, 20):
        assert galore_adam_step(p, gradient, state, Hyper(rank=3, gap=2))
        run(optimizer, other, [gradient])
    assert torch.equal(p, other)
    assert same(state, dict(optimizer.state[other]))


# The papers' other rules, written out in fp64.


def first_direction(r: torch.Tensor) -> torch.Tensor:
    return r / (r.abs() + 1e-8)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)], ids=str)
def test_fira_adds_the_scaled_residual_with_its_limiter(shape: tuple[int, int]):
    p = parameter(*shape, dtype=torch.float64)
    g = grads(1, *shape, dtype=torch.float64)[0]
    optimizer, before = Fira([p], rank=3, lr=0.1, scale=0.5, basis="svd"), p.detach().clone()
    after = run(optimizer, p, [g])
    g = g if shape[0] < shape[1] else g.T
    basis = torch.linalg.svd(g).U[:, :3]
    r = basis.T @ g
    n = first_direction(r)
    residual = (g - basis @ r) * (n.norm(dim=0) / r.norm(dim=0))
    moved = 0.1 * 0.5 * (basis @ n + residual)
    moved = moved if shape[0] < shape[1] else moved.T
    assert (before - after - moved).abs().max() < 1e-7
    assert abs(float(optimizer.state[p]["limited_norm"]) / residual.norm() - 1) < 1e-6


def test_the_limiter_lets_the_residual_grow_by_one_percent():
    p, (g,) = parameter(6, 20), grads(1, 6, 20)
    optimizer = Fira([p], rank=3, lr=0.1, betas=(0.0, 0.999), gap=100)
    norms = []
    for factor in (1.0, 1.0, 50.0, 50.0):
        run(optimizer, p, [g * factor])
        norms.append(float(optimizer.state[p]["limited_norm"]))
    assert norms[2] == pytest.approx(1.01 * norms[1], rel=1e-5)
    assert all(b <= 1.0101 * a for a, b in zip(norms, norms[1:], strict=False))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)], ids=str)
def test_apollo_scales_columns_of_the_gradient(shape: tuple[int, int]):
    p, g = parameter(*shape, dtype=torch.float64), grads(1, *shape, dtype=torch.float64)[0]
    optimizer, before = Apollo([p], rank=3, lr=0.1, basis_store="fp32"), p.detach().clone()
    after = run(optimizer, p, [g])
    side = optimizer.state[p]["left" if shape[0] < shape[1] else "right"]
    g = g if shape[0] < shape[1] else g.T
    r = side.T @ g
    moved = 0.1 * g * (first_direction(r).norm(dim=0) / r.norm(dim=0))
    moved = moved if shape[0] < shape[1] else moved.T
    assert (before - after - moved).abs().max() < 1e-7


def test_apollo_mini_scales_the_whole_gradient():
    p, g = parameter(6, 20, dtype=torch.float64), grads(1, 6, 20, dtype=torch.float64)[0]
    optimizer, before = ApolloMini([p], lr=0.1, basis_store="fp32"), p.detach().clone()
    after = run(optimizer, p, [g])
    r = optimizer.state[p]["left"].T @ g
    moved = 0.1 * 128**0.5 * g * first_direction(r).norm() / r.norm()
    assert (before - after - moved).abs().max() < 1e-6


@pytest.mark.parametrize("cls", [Apollo, ApolloMini])
def test_a_basis_kept_as_a_seed_is_the_stored_one(cls: type):
    made = []
    for store in ("seed", "fp32"):
        p = parameter(6, 20)
        made.append(run(cls([p], rank=2, gap=2, basis_store=store), p, grads(5, 6, 20)))
    assert torch.equal(*made)


# Counting, decay, refusals.


def test_g24_one_increment_a_step():
    w = nn.Parameter(torch.zeros(4, 4))
    optimizer = GaLoreAdamW([{"params": [w]}], lr=0.1)
    run(optimizer, w, [torch.ones(4, 4)] * 3)
    assert (w.abs() - 0.3).abs().max() < 1e-6
    assert optimizer.state[w]["step"] == 3


def test_g24_refreshes_happen_every_gap_from_the_first_step():
    w, at = parameter(8, 12), []
    optimizer = GaLoreAdamW([w], rank=2, gap=4)
    for step, gradient in enumerate(grads(12, 8, 12)):
        before = optimizer.state[w].get("refreshes", 0)
        run(optimizer, w, [gradient])
        at += [step] * (optimizer.state[w]["refreshes"] - before)
    assert at == [0, 4, 8]


def test_g25_weights_decay_before_the_update():
    w = nn.Parameter(torch.ones(1))
    run(GaLoreAdamW([w], lr=0.1, weight_decay=0.5), w, [torch.ones(1)])
    assert abs(w.item() - 0.85) < 1e-6


def test_g25_decay_does_not_depend_on_scale_or_projection():
    moved = []
    for decay in (0.0, 0.5):
        w = parameter(6, 8)
        moved.append(run(GaLoreAdamW([w], rank=2, lr=0.1, weight_decay=decay), w, grads(1, 6, 8)))
    assert (moved[0] - moved[1] - 0.05 * parameter(6, 8)).abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("cls", [GaLoreAdamW, Fira, Apollo])
def test_g12_a_non_finite_gradient_changes_nothing(cls, state, at, bad, caplog):
    w = parameter(64, 80)
    optimizer = cls([w], rank=52, gap=200, state=state, weight_decay=0.1)
    run(optimizer, w, grads(at, 64, 80))
    weights, kept = w.detach().clone(), snapshot(dict(optimizer.state[w]))
    poisoned = grads(1, 64, 80)[0]
    poisoned[0, 0] = bad
    run(optimizer, w, [poisoned])
    assert torch.equal(w, weights)
    assert same(kept, {k: v for k, v in optimizer.state[w].items() if at or k != "index"})
    assert "non-finite" in caplog.text and "parameter 0" in caplog.text
    assert optimizer.param_groups[0]["skipped"] == 1
    healthy = run(optimizer, w, grads(2, 64, 80))
    assert healthy.isfinite().all() and not torch.equal(healthy, weights)


@pytest.mark.parametrize("kind", ["plain", "projected"])
def test_a_skipped_step_leaves_no_trace_in_later_ones(kind: str):
    after = []
    for poison in (False, True):
        w = parameter(8, 12)
        optimizer = GaLoreAdamW([{"params": [w], **(GL if kind == "projected" else {})}])
        for number, gradient in enumerate(grads(6, 8, 12)):
            if poison and number in (0, 3):
                run(optimizer, w, [gradient * float("nan")])
            run(optimizer, w, [gradient])
        after.append(w.detach().clone())
    assert torch.equal(*after)


@pytest.mark.parametrize("shape", [(8,), (8, 4, 3), (8, 4, 3, 3), (1, 16), (), (0, 4)], ids=str)
def test_g13_any_number_of_axes(shape: tuple[int, ...]):
    w = parameter(*shape)
    before = w.detach().clone()
    optimizer = GaLoreAdamW([{"params": [w], **GL}])
    run(optimizer, w, grads(3, *shape))
    assert w.isfinite().all() and (w.numel() == 0 or not torch.equal(w, before))
    assert ("left" in optimizer.state[w]) == (len(shape) > 2)


def test_a_convolution_in_channels_last_steps_as_a_contiguous_one():
    plain = parameter(8, 4, 3, 3)
    strided = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for p in (plain, strided):
        run(GaLoreAdamW([p], rank=3, gap=2), p, grads(3, 8, 4, 3, 3))
    assert torch.equal(plain, strided) and not strided.is_contiguous()


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (64, 64)], ids=str)
@pytest.mark.parametrize("rank", [8, 64, 128])
@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
def test_g11_every_side_steps_over_a_refresh(shape, rank, kind):
    w = parameter(*shape)
    before = w.detach().clone()
    optimizer = GaLoreAdamW([{"params": [w], "rank": rank, "gap": 2, "proj_type": kind}])
    run(optimizer, w, grads(3, *shape))
    assert w.shape == shape and w.isfinite().all() and not torch.equal(w, before)
    kept = {"left", "right"} & optimizer.state[w].keys()
    tall = shape[0] >= shape[1]
    sides = {"std": {"right" if tall else "left"}, "reverse_std": {"left" if tall else "right"}}
    assert kept == sides.get(kind, {"left", "right"} if kind == "full" else {kind})


def test_g23_a_projected_layer_moves_in_place():
    w = parameter(16, 24)
    before, place = w.detach().clone(), w.data_ptr()
    run(GaLoreAdamW([w], rank=8, lr=0.1, scale=1.0), w, grads(5, 16, 24))
    plain = parameter(16, 24)
    run(torch.optim.AdamW([plain], lr=0.1, weight_decay=0), plain, grads(5, 16, 24))
    assert (w - before).norm() > 0.5 * (plain - before).norm() and w.data_ptr() == place


def test_gradients_of_zero_keep_the_basis():
    w = parameter(8, 12)
    optimizer = GaLoreAdamW([w], rank=2, gap=2)
    run(optimizer, w, grads(2, 8, 12))
    left = optimizer.state[w]["left"].clone()
    run(optimizer, w, [torch.zeros(8, 12)])
    assert torch.equal(left, optimizer.state[w]["left"])
    fresh = parameter(8, 12)
    run(GaLoreAdamW([fresh], rank=2), fresh, [torch.zeros(8, 12)])
    assert torch.equal(fresh, parameter(8, 12))


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("basis", ["subspace", "svd", "eigh", "randomised"])
def test_gradients_of_any_size_give_the_same_directions(basis: str, scale: float):
    moved = []
    for factor in (1.0, scale):
        w = parameter(8, 12)
        steps = [g * factor for g in grads(5, 8, 12)]
        run(GaLoreAdamW([w], rank=2, gap=2, basis=basis, eps=0.0), w, steps)
        moved.append(w.detach() - parameter(8, 12))
    assert (moved[0] - moved[1]).norm() < 1e-3 * moved[0].norm()


def test_steps_do_not_touch_the_users_randomness():
    state = torch.get_rng_state()
    w = parameter(64, 80)
    optimizer = GaLoreAdamW([w], rank=52, gap=2, state="int8", basis_store="int4", basis="random")
    run(optimizer, w, grads(5, 64, 80))
    assert torch.equal(torch.get_rng_state(), state)


def test_closure_and_copy():
    w = parameter(8, 12)
    optimizer = GaLoreAdamW([w], rank=2)

    def closure():
        optimizer.zero_grad()
        value = w.square().sum()
        value.backward()
        return value

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    twin = copy.deepcopy(optimizer)
    assert same(twin.state_dict(), optimizer.state_dict())

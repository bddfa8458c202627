"""Stepping in backward equals stepping after it, however a step is cut into micro-batches."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW, HirankError, QGaLoreAdamW
from hirank.kernels.galore_step import Blocks, Move
from hirank.optim import rules
from hirank.optim import weights as optim_weights
from hirank.optim.weights import Int8Weight
from optim.toys import data, everything, grads, loss, mlp, parameter, run_batches, same, weights
from recorder import LiveBytes

PRESETS = [GaLoreAdamW, Fira, Apollo, ApolloMini]
SMALL = {"rank": 4, "gap": 3, "lr": 0.01}


def options_of(cls: type) -> dict:
    return SMALL | ({"rank": 1} if cls is ApolloMini else {})


def halves(x: Tensor, y: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(n), y.chunk(n), strict=True))


def moved(model: nn.Module, start: Tensor) -> Tensor:
    return weights(model) - start


def rel_l2(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def step_counters(optimizer) -> set[int]:
    return {state["step"] for state in optimizer.state.values()}


def trained(cls: type, steps: int, n: int, **engine) -> tuple[nn.Module, object]:
    """`steps` steps of 4 rows in n micro-batches; engine options None: a usual step."""
    model = mlp()
    optimizer = cls(model, **options_of(cls))
    if engine is not None and "usual" not in engine:
        optimizer.step_in_backward(micro_batches=n, **engine)
    for step in range(steps):
        run_batches(optimizer, model, halves(*data(4, seed=step), n))
    return model, optimizer


@pytest.mark.parametrize("cls", PRESETS)
def test_stepping_in_backward_is_stepping_after_it(cls: type):
    usual, a = trained(cls, 7, 1, usual=True)
    hooked, b = trained(cls, 7, 1)
    assert torch.equal(weights(usual), weights(hooked))
    assert same(a.state_dict()["state"], b.state_dict()["state"])


@pytest.mark.parametrize("cls", PRESETS)
def test_g01_four_micro_batches_are_one_step(cls: type):
    one, a = trained(cls, 1, 1)
    four, b = trained(cls, 1, 4)
    start = weights(mlp())
    assert rel_l2(moved(four, start), moved(one, start)) < 1e-2
    assert step_counters(a) == step_counters(b) == {1}


@pytest.mark.parametrize("cls", PRESETS)
def test_g04_accumulation_of_projections_is_exact(cls: type):
    one, _ = trained(cls, 7, 1)
    four, b = trained(cls, 7, 4)
    assert torch.allclose(weights(one), weights(four), atol=1e-5)
    assert step_counters(b) == {7}


def test_g02_int8_weights_are_requantised_once_a_step(monkeypatch: pytest.MonkeyPatch):
    updates: list[Tensor] = []
    real = optim_weights.move_int8_

    def moved_int8_(weight: Blocks, delta: Tensor, move: Move) -> None:
        updates.append(-move.step * delta)
        real(weight, delta, move)

    monkeypatch.setattr(optim_weights, "move_int8_", moved_int8_)
    for n in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        # Four rows give a gradient of rank four: more directions would be rounding noise.
        optimizer = QGaLoreAdamW(model, rank=4, lr=0.01)
        optimizer.step_in_backward(micro_batches=n)
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
        run_batches(optimizer, model, halves(x, 0.1 * x, n))
        assert len(updates) == (2 if n == 1 else 4) and step_counters(optimizer) == {1}
    assert max(rel_l2(updates[2 + i], updates[i]) for i in range(2)) < 1e-2


@pytest.mark.parametrize("cls", [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo])
def test_g03_every_trainable_parameter_moves(cls: type):
    model = everything()
    optimizer = cls(model, rank=4)
    optimizer.step_in_backward()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.arange(50).view(5, 10)
    model(tokens).logsumexp(-1).square().mean().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert not torch.equal(_plain(start[name]), _plain(p.detach())), name
        assert p.grad is None


def _plain(p: Tensor) -> Tensor:
    return p.widened() if isinstance(p, Int8Weight) else p


def test_g04_between_refreshes_nothing_of_full_size_waits():
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    optimizer = GaLoreAdamW(model, rank=4, gap=10)
    engine = optimizer.step_in_backward(micro_batches=4)
    run_batches(optimizer, model, halves(*data(4), 4))  # the refresh
    for x, y in halves(*data(4, seed=2), 4)[:3]:
        loss(model, x, y).backward()
        assert engine.waiting_bytes() == (4 * 64 + 4 * 64) * 4
    sizes = [s["waiting_reduced"].numel() for s in optimizer.state.values()]
    assert max(sizes) <= 4 * max(max(p.shape) for p in model.parameters())
    assert not any("waiting" in s for s in optimizer.state.values())


def test_a_refresh_may_come_from_the_first_micro_batch():
    model = mlp()
    optimizer = GaLoreAdamW(model, rank=4, refresh_from="first")
    optimizer.step_in_backward(micro_batches=4)
    loss(model, *data(1)).backward()
    projected = [optimizer.state[p] for p in optimizer.projected()]
    assert all("waiting_reduced" in s and "waiting" not in s for s in projected)


@pytest.mark.parametrize("n", [1, 3])
def test_g08_a_window_is_one_step(n: int):
    model = mlp()
    optimizer = GaLoreAdamW(model, **SMALL)
    engine = optimizer.step_in_backward()
    for _ in range(2):
        with engine.window(n):
            for x, y in halves(*data(n), n):
                loss(model, x, y).backward()
    assert step_counters(optimizer) == {2}


def test_g08_a_backward_outside_its_window_is_an_error():
    model = mlp()
    optimizer = GaLoreAdamW(model, **SMALL)
    optimizer.step_in_backward()
    loss(model, *data()).backward()
    with pytest.raises(HirankError, match="optimizer.step()"):
        loss(model, *data()).backward()


def test_an_error_in_a_window_drops_its_gradients():
    model, start = mlp(), weights(mlp())
    optimizer = GaLoreAdamW(model, **SMALL)
    engine = optimizer.step_in_backward()
    with pytest.raises(ZeroDivisionError), engine.window(2):
        loss(model, *data()).backward()
        raise ZeroDivisionError
    assert torch.equal(weights(model), start) and engine.waiting_bytes() == 0
    assert engine.micro_batches == 1


def test_a_short_last_window_steps_with_what_there_is():
    long, short = mlp(), mlp()
    a, b = GaLoreAdamW(long, **SMALL), GaLoreAdamW(short, **SMALL)
    a.step_in_backward(micro_batches=2)
    b.step_in_backward(micro_batches=5)
    for model, optimizer in ((long, a), (short, b)):
        run_batches(optimizer, model, halves(*data(4), 2))
    assert torch.equal(weights(long), weights(short)) and step_counters(b) == {1}


def test_parameters_without_gradients_wait_for_theirs():
    """An expert that no token chose."""
    used, idle = nn.Linear(32, 8), nn.Linear(32, 8)
    optimizer = GaLoreAdamW(nn.ModuleList([used, idle]), **SMALL)
    optimizer.step_in_backward(micro_batches=2)
    for _ in range(2):
        loss(used, *data()).backward()
    optimizer.step()
    loss(idle, *data()).backward()
    loss(used, *data()).backward()
    optimizer.step()
    assert [optimizer.state[m.weight]["step"] for m in (used, idle)] == [2, 1]


# Clipping.


def test_clipping_is_torchs_where_nothing_is_projected():
    usual, hooked = mlp(), mlp()
    a = GaLoreAdamW([{"params": usual.parameters()}], lr=0.01)
    b = GaLoreAdamW([{"params": hooked.parameters()}], lr=0.01)
    b.step_in_backward(clip=0.1)
    for step in range(5):
        loss(usual, *data(4, seed=step)).backward()
        assert nn.utils.clip_grad_norm_(usual.parameters(), 0.1) > 0.1
        a.step()
        a.zero_grad()
        run_batches(b, hooked, [data(4, seed=step)])
    assert torch.allclose(weights(usual), weights(hooked), atol=1e-7)


@pytest.mark.parametrize("n", [1, 2])
def test_clipping_is_torchs_where_the_basis_is_complete(n: int):
    options = {"rank": 64, "basis": "identity", "gap": 3, "lr": 0.01}
    usual, hooked = mlp(), mlp()
    a, b = GaLoreAdamW(usual, **options), GaLoreAdamW(hooked, **options)
    b.step_in_backward(clip=0.1, micro_batches=n)
    for step in range(5):
        loss(usual, *data(4, seed=step)).backward()
        nn.utils.clip_grad_norm_(usual.parameters(), 0.1)
        a.step()
        a.zero_grad()
        run_batches(b, hooked, halves(*data(4, seed=step), n))
    assert torch.allclose(weights(usual), weights(hooked), atol=1e-6)


@pytest.mark.parametrize("cls", [Fira, Apollo])
def test_clipping_is_torchs_where_the_gradient_waits_in_full(cls: type):
    usual, hooked = mlp(), mlp()
    a, b = cls(usual, **SMALL), cls(hooked, **SMALL)
    b.step_in_backward(clip=0.1)
    for step in range(5):
        loss(usual, *data(4, seed=step)).backward()
        nn.utils.clip_grad_norm_(usual.parameters(), 0.1)
        a.step()
        a.zero_grad()
        run_batches(b, hooked, [data(4, seed=step)])
    assert torch.allclose(weights(usual), weights(hooked), atol=1e-6)


def test_clipping_sees_the_projected_norm():
    p = nn.Parameter(torch.zeros(8, 12))
    optimizer = GaLoreAdamW([p], rank=2, betas=(0.0, 0.999), basis="svd")
    optimizer.step_in_backward(clip=0.5)
    (g,) = grads(1, 8, 12)
    (p * g).sum().backward()
    seen = optimizer.state[p]["waiting_reduced"].clone()
    assert seen.norm() < g.norm()
    optimizer.step()
    kept = optimizer.state[p]["exp_avg_sq"] / 1e-3
    torch.testing.assert_close(kept, (seen * 0.5 / seen.norm()) ** 2, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("n", [1, 2])
def test_the_norm_is_known_after_a_step_and_torchs_where_the_basis_is_complete(n, clip):
    options = {"rank": 64, "basis": "identity", "gap": 3, "lr": 0.01}
    usual, hooked = mlp(), mlp()
    a, b = GaLoreAdamW(usual, **options), GaLoreAdamW(hooked, **options)
    engine = b.step_in_backward(clip=clip, micro_batches=n)
    assert engine.grad_norm is None
    for step in range(5):
        loss(usual, *data(4, seed=step)).backward()
        norm = nn.utils.clip_grad_norm_(usual.parameters(), clip or float("inf"))
        a.step()
        a.zero_grad()
        run_batches(b, hooked, halves(*data(4, seed=step), n))
        assert float(engine.grad_norm) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_norm_is_of_what_is_stepped_with_at_a_refresh_too(clip: float | None):
    p, q = nn.Parameter(torch.zeros(8, 12)), nn.Parameter(torch.zeros(5))
    optimizer = GaLoreAdamW([p, q], rank=2, gap=2, basis="svd")
    engine = optimizer.step_in_backward(clip=clip)
    for g in grads(4, 8, 12):
        ((p * g).sum() + q.sum()).backward()
        optimizer.step()
        seen = (optimizer.state[p]["left"].T @ g).square().sum() + 5
        assert float(engine.grad_norm) == pytest.approx(float(seen.sqrt()), rel=1e-5)


# The rest of a training loop.


def test_g05_a_schedule_acts_on_what_steps():
    ends = []
    for hooked in (True, False):
        model = mlp()
        optimizer = GaLoreAdamW(model, **SMALL)
        if hooked:
            optimizer.step_in_backward()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
        for step in range(50):
            run_batches(optimizer, model, [data(16, seed=step % 5)])
            schedule.step()
        ends.append(loss(model, *data(16)).item())
    assert ends[0] == ends[1]


def test_mixed_precision_divides_by_the_loss_scale():
    usual, scaled = mlp(), mlp()
    a, b = GaLoreAdamW(usual, **SMALL), GaLoreAdamW(scaled, **SMALL)
    a.step_in_backward()
    engine = b.step_in_backward()
    for step in range(4):
        run_batches(a, usual, [data(4, seed=step)])
        engine.loss_scale = torch.tensor(2.0**step)
        (loss(scaled, *data(4, seed=step)) * engine.loss_scale).backward()
        b.step()
    assert torch.equal(weights(usual), weights(scaled))


def test_autocast_and_a_scaler_after_backward():
    model, start = mlp(), weights(mlp())
    optimizer = GaLoreAdamW(model, **SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, *data(4, seed=step))
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert rel_l2(moved(model, start), moved(trained(GaLoreAdamW, 3, 1)[0], start)) < 0.2


def test_zero_grad_and_closures():
    model = mlp()
    optimizer = GaLoreAdamW(model, **SMALL)
    optimizer.step_in_backward()

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        value = loss(model, *data())
        value.backward()
        return value

    values = [optimizer.step(closure).item() for _ in range(5)]
    assert values[-1] < values[0] and step_counters(optimizer) == {5}


def test_tied_weights_step_once():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 8))
    model[2].weight = model[0].weight
    optimizer = GaLoreAdamW(model, **SMALL)
    engine = optimizer.step_in_backward()
    run_batches(optimizer, model, [data()])
    assert step_counters(optimizer) == {1} and engine.calls == 3  # two matrices; the biases


def test_checkpointed_layers_step_once():
    model = mlp()
    optimizer = GaLoreAdamW(model, **SMALL)
    optimizer.step_in_backward()
    x, y = data(4, seed=0)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    (out - y).square().mean().backward()
    optimizer.step()
    assert torch.equal(weights(model), weights(trained(GaLoreAdamW, 1, 1)[0]))
    assert step_counters(optimizer) == {1}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("at", [0, 2])
def test_g12_a_non_finite_gradient_is_skipped_and_counted(at: int, clip: float | None, caplog):
    p, q = parameter(8, 12), parameter(5)
    optimizer = GaLoreAdamW([p, q], rank=2)
    optimizer.step_in_backward(clip=clip)
    for step, g in enumerate(grads(4, 8, 12)):
        before = p.detach().clone(), q.detach().clone()
        bad = float("nan") if step == at else 1.0
        ((p * g * bad).sum() + q.sum()).backward()
        optimizer.step()
        if step == at:
            assert torch.equal(p, before[0])
            assert torch.equal(q, before[1]) == (clip is not None)  # a global norm is for all
    assert optimizer.state[p]["step"] == 3 and p.isfinite().all()
    assert optimizer.param_groups[0]["skipped"] == (1 if clip is None else 2)
    assert "non-finite" in caplog.text


def test_a_checkpoint_in_the_middle_of_a_window_resumes(tmp_path):
    whole, first, second = mlp(), mlp(), mlp()
    batches = [halves(*data(4, seed=step), 4) for step in range(6)]
    one, two, three = (GaLoreAdamW(m, **SMALL) for m in (whole, first, second))
    for optimizer in (one, two, three):
        optimizer.step_in_backward(micro_batches=4)
    for parts in batches:
        run_batches(one, whole, parts)
    for at in range(6 * 4):
        if at == 4 * 4 + 2:  # in the fifth step, two of four passes done
            torch.save(two.state_dict(), tmp_path / "optimizer.pt")
            second.load_state_dict(first.state_dict())
            three.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
            first, two = second, three
        x, y = batches[at // 4][at % 4]
        (loss(first, x, y) / 4).backward()
        if at % 4 == 3:
            two.step()
    assert torch.equal(weights(whole), weights(second))


def test_the_engine_can_be_removed():
    model = mlp()
    optimizer = GaLoreAdamW(model, **SMALL)
    engine = optimizer.step_in_backward()
    with pytest.raises(HirankError, match="already"):
        optimizer.step_in_backward()
    run_batches(optimizer, model, [data()])
    engine.remove()
    loss(model, *data()).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    assert step_counters(optimizer) == {2}


@pytest.mark.parametrize("options", [{"micro_batches": 0}, {"clip": 0.0}], ids=str)
def test_bad_options_are_refused(options: dict):
    with pytest.raises(HirankError, match="give"):
        GaLoreAdamW(mlp()).step_in_backward(**options)


def test_gradients_never_all_exist_at_once():
    """While backward runs, the only full gradient is the one whose hook is running."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)])
    optimizer = GaLoreAdamW(model, rank=2)
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    engine = optimizer.step_in_backward()
    model(data()[0]).square().mean().backward()
    assert alive == [1] * 6 and engine.waiting_bytes() == 0


def test_a_gradient_that_is_not_projected_is_let_go_with_its_step():
    """Its norm outlives it, until all norms are summed."""
    layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(6)))
    optimizer = GaLoreAdamW([{"params": list(layers.parameters()), "rank": None}])
    engine = optimizer.step_in_backward()
    x = torch.randn(3, 400)
    layers(x).square().sum().backward()
    optimizer.step()
    with LiveBytes() as live:
        layers(x).square().sum().backward()
    assert live.live < layers[0].weight.nbytes
    optimizer.step()
    assert engine.grad_norm > 0


@pytest.mark.parametrize("side", [(256, 512), (512, 256)], ids=str)
def test_a_gradient_is_gone_before_its_weight_moves(side: tuple[int, int], monkeypatch):
    """Both at once would be the peak of a step: the change of a weight is as large in fp32."""
    layer = nn.Linear(*side, bias=False)
    optimizer = GaLoreAdamW(layer, rank=4)
    optimizer.step_in_backward()
    x = torch.randn(3, side[0])
    layer(x).square().sum().backward()
    optimizer.step()
    real, alive = rules.apply_reduced, []
    with LiveBytes() as live:
        monkeypatch.setattr(
            rules, "apply_reduced", lambda *a: (alive.append(live.live), real(*a))[1]
        )
        layer(x).square().sum().backward()
    assert len(alive) == 1 and alive[0] < layer.weight.nbytes


@pytest.mark.parametrize("cls", [GaLoreAdamW, QGaLoreAdamW])
def test_a_model_and_its_state_are_let_go_with_their_optimizer(cls: type):
    """A hook that held the optimiser would keep both for ever: no collector sees that cycle."""
    model = mlp()
    optimizer = cls(model, rank=4)
    optimizer.step_in_backward()
    loss(model, *data(4)).backward()
    optimizer.step()
    kept = [weakref.ref(p) for p in model.parameters()]
    entries = (state.values() for state in optimizer.state.values())
    kept += [weakref.ref(v) for entry in entries for v in entry if isinstance(v, Tensor)]
    del model, optimizer, entries
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)

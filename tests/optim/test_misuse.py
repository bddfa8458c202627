"""What a training script does to an optimiser beside stepping it: it works, or a sentence says why
not; never a wrong step in silence."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW, HirankError, QGaLoreAdamW
from hirank.optim.weights import Int8Weight
from optim.toys import data, everything, grads, loss, mlp, parameter, run, run_batches, weights

PRESETS = [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo, ApolloMini]
ODD = [(1, 7), (7, 1), (1, 1), (2, 2), (2, 300), (300, 2), (3, 1, 1), (1, 3, 3), (0, 12), (5, 0)]


def rank_of(cls: type, rank: int) -> dict:
    return {"rank": 1 if cls is ApolloMini else rank}


def plain(p: torch.Tensor) -> torch.Tensor:
    return (p.widened() if isinstance(p, Int8Weight) else p.detach()).clone()


def copied(thing):
    """Written and read as data, as a checkpoint is."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file)  # weights_only=True


# Shapes and values.


@pytest.mark.parametrize("cls", PRESETS)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_shapes_with_a_rank_above_them(cls: type, shape: tuple[int, ...]):
    p = parameter(*shape)
    optimizer = cls([p], gap=2, **rank_of(cls, 500))
    run(optimizer, p, grads(5, *shape))
    assert p.isfinite().all() and optimizer.cost() == optimizer.state_bytes()


@pytest.mark.parametrize("cls", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learning_rate_of_zero_moves_nothing(cls: type, dtype: torch.dtype):
    model = everything().to(dtype)
    optimizer = cls(model, lr=0.0, weight_decay=0.1, **rank_of(cls, 4))
    before = [plain(p) for p in model.parameters()]
    for _ in range(3):
        model(torch.arange(10)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(before, model.parameters(), strict=True)
    assert all(torch.equal(a, plain(b)) for a, b in pairs)


@pytest.mark.parametrize("why", ["not finite", "a rate of zero"])
def test_int8_weights_that_do_not_move_keep_every_code(why: str):
    """A code read back and divided again is off by the last bit of fp32: of millions, some flip."""
    w = nn.Parameter(Int8Weight.of(0.02 * parameter(512, 2048).detach()))
    rate = 0.01 if why == "not finite" else 0.0
    optimizer = QGaLoreAdamW([w], rank=4, lr=rate, gap=100)
    g = 1e-3 * parameter(512, 2048, seed=1).detach()
    w.grad = g
    optimizer.step()
    before = w.codes.clone()
    for _ in range(6):
        w.grad = g * float("nan") if why == "not finite" else g
        optimizer.step()
    assert torch.equal(before, w.codes)


def test_int8_weights_decay_as_asked():
    w = nn.Parameter(Int8Weight.of(0.05 + 0.02 * parameter(256, 256).detach()))
    before = plain(w).mean()
    optimizer = GaLoreAdamW([w], rank=4, lr=1e-3, weight_decay=1.0, scale=1e-9)
    for g in grads(100, 256, 256):
        w.grad = g
        optimizer.step()
    assert float(plain(w).mean() / before) == pytest.approx(0.999**100, rel=1e-3)


@pytest.mark.parametrize("cls", [GaLoreAdamW, Fira, Apollo])
def test_gradients_of_any_strides(cls: type):
    moved = []
    for change in (torch.Tensor.contiguous, lambda g: g):
        p, q = parameter(8, 12), parameter(12)
        optimizer = cls([p, q], rank=2)
        (g,) = grads(1, 12, 8)
        p.grad, q.grad = change(g.T), change(torch.ones(1).expand(12))
        optimizer.step()
        p.grad, q.grad = change(torch.ones(1, 1).expand(8, 12)), change(g[:, 0])
        optimizer.step()
        moved.append(torch.cat([p.detach().flatten(), q.detach()]))
    assert torch.allclose(*moved, atol=1e-6)


@pytest.mark.parametrize("cls", PRESETS)
@pytest.mark.parametrize("at", [0, 1])
def test_gradients_whose_squares_are_infinite_are_skipped(cls: type, at: int):
    """A second moment that is once infinite stays so, and the weight would stand still for good."""
    p, q = parameter(16, 24), parameter(24)
    optimizer = cls([p, q], gap=5, **rank_of(cls, 4))
    for step in range(4):
        size = 1e25 if step == at else 1.0
        for one in (p, q):
            one.grad = size * grads(1, *one.shape, seed=step)[0]
        before = plain(p), plain(q)
        optimizer.step()
        still = torch.equal(p, before[0]), torch.equal(q, before[1])
        assert still == (step == at,) * 2
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.as_tensor(value).isfinite().all() for value in states)


def test_sparse_gradients_are_refused_in_either_mode():
    for in_backward in (False, True):
        table = nn.Embedding(50, 8, sparse=True)
        optimizer = GaLoreAdamW(table, rank=2)
        if in_backward:
            optimizer.step_in_backward()
        with pytest.raises(HirankError, match=r"sparse=False\.$"):
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()


# Options and parameters.


def test_torchs_switches_are_taken_if_they_ask_for_nothing():
    names = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")
    for name in names:
        group = GaLoreAdamW([{"params": [parameter(8, 12)], name: None}], **{name: False})
        assert name not in group.param_groups[0]
        with pytest.raises(HirankError, match=f"{name}=True is a switch of torch's AdamW"):
            GaLoreAdamW([parameter(8, 12)], **{name: True})


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (parameter(8, 12), "params is one tensor"),
        ({"params": [parameter(8, 12)]}, "params is one group"),
        (nn.Linear(3, 4).requires_grad_(False), "unfreeze what is to be trained"),
    ],
    ids=["tensor", "group", "frozen"],
)
def test_what_is_not_a_set_of_parameters(params, said: str):
    with pytest.raises(HirankError, match=said):
        GaLoreAdamW(params)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", 8), ("sides", "two"), ("state", "int8"), ("basis_store", "int4"), ("limiter", 1.01)],
)
def test_what_a_state_is_built_for_does_not_change_under_it(name: str, value):
    p = parameter(64, 80)
    optimizer = Fira([p], rank=4, limiter=0.0) if name == "limiter" else GaLoreAdamW([p], rank=4)
    optimizer.param_groups[0][name], old = value, optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = old  # before the first step it may
    run(optimizer, p, grads(2, 64, 80))
    optimizer.param_groups[0][name] = value
    with pytest.raises(HirankError, match="when its state was made.*build a new optimiser"):
        run(optimizer, p, grads(1, 64, 80))


def test_settings_may_change_before_the_first_step_and_the_others_at_any_time():
    p = parameter(64, 80)
    optimizer = GaLoreAdamW([p], rank=4)
    optimizer.param_groups[0]["rank"] = 8
    run(optimizer, p, grads(1, 64, 80))
    assert optimizer.state[p]["exp_avg"].shape == (8, 80)
    optimizer.param_groups[0] |= {"lr": 0.1, "scale": 2.0, "weight_decay": 0.1, "betas": (0.5, 0.9)}
    run(optimizer, p, grads(2, 64, 80))


def test_a_parameter_that_thaws_is_stepped_in_backward():
    model = mlp()
    model[0].weight.requires_grad = False
    optimizer = GaLoreAdamW(list(model.parameters()), rank=4)
    optimizer.step_in_backward(clip=1.0)
    run_batches(optimizer, model, [data()])
    model[0].weight.requires_grad, before = True, plain(model[0].weight)
    run_batches(optimizer, model, [data()])  # this one is stepped after backward
    assert not torch.equal(before, model[0].weight)
    loss(model, *data()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_group_that_is_added_is_stepped_in_backward():
    model, twin = mlp(), mlp()
    hooked, usual = (GaLoreAdamW(list(m[0].parameters()), rank=4) for m in (model, twin))
    hooked.step_in_backward(micro_batches=2)
    for step in range(4):
        if step == 2:
            for optimizer, m in ((hooked, model), (usual, twin)):
                optimizer.add_param_group({"params": list(m[2].parameters()), "rank": 4})
                optimizer.zero_grad()
        run_batches(hooked, model, [data(seed=step), data(seed=step)])
        twin.zero_grad()
        run_batches(usual, twin, [data(seed=step)])
        model.zero_grad()
    assert torch.allclose(weights(model), weights(twin), atol=1e-6)
    assert not torch.equal(model[2].weight, mlp()[2].weight)


def test_the_number_of_micro_batches_may_change_from_step_to_step():
    model, twin = mlp(), mlp()
    hooked, usual = GaLoreAdamW(model, rank=4, gap=3), GaLoreAdamW(twin, rank=4, gap=3)
    engine = hooked.step_in_backward()
    for step, count in enumerate((1, 4, 2, 1, 3)):
        engine.micro_batches = count
        run_batches(hooked, model, [data(seed=step)] * count)
        run_batches(usual, twin, [data(seed=step)] * count)
    assert torch.allclose(weights(model), weights(twin), atol=1e-5)


# Copies and files.


@pytest.mark.parametrize("cls", [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimiser_goes_on_alike(cls: type, how: str):
    model = mlp()
    optimizer = cls(model, rank=4, gap=2)
    run_batches(optimizer, model, [data()])
    both = (model, optimizer)
    twin, other = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    for m, o in ((model, optimizer), (twin, other)):
        run_batches(o, m, [data(seed=2)])
        run_batches(o, m, [data(seed=3)])
    assert torch.equal(weights(model), weights(twin))
    assert type(twin[0].weight) is type(model[0].weight)


def test_a_copy_in_the_middle_of_a_window_does_not_step_in_backward():
    model = mlp()
    optimizer = GaLoreAdamW(model, rank=4)
    optimizer.step_in_backward(micro_batches=2)
    loss(model, *data()).backward()
    twin, other = copy.deepcopy((model, optimizer))
    loss(twin, *data()).backward()
    assert all(p.grad is not None for p in twin.parameters())
    other.step()


def test_int8_weights_in_a_state_dict_load_as_data():
    model, other, wide = mlp(), mlp(seed=1), mlp(seed=1)
    for m in (model, other):
        QGaLoreAdamW(m, rank=4)
    kept = copied(model.state_dict())
    other.load_state_dict(kept)
    assert torch.equal(other[0].weight.codes, model[0].weight.codes)
    wide.load_state_dict(kept)
    assert torch.equal(wide[0].weight, model[0].weight.widened())
    other.load_state_dict(mlp().state_dict())
    assert isinstance(other[0].weight, Int8Weight)
    assert (other[0].weight.widened() - mlp()[0].weight).abs().max() < 1e-2


WIDTHS = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("cls", [GaLoreAdamW, Fira, Apollo])
@pytest.mark.parametrize("saved", WIDTHS, ids=str)
@pytest.mark.parametrize("loaded", WIDTHS, ids=str)
def test_a_state_is_taken_to_weights_of_another_dtype(cls: type, saved, loaded):
    optimizers = []
    for dtype in (saved, loaded):
        model = mlp().to(dtype)
        optimizers.append(cls(model, rank=4, gap=2))
        if len(optimizers) == 2:
            optimizers[1].load_state_dict(copied(optimizers[0].state_dict()))
        for _ in range(1 if len(optimizers) == 1 else 3):
            for i, p in enumerate(model.parameters()):
                p.grad = grads(1, *p.shape, seed=i, dtype=dtype)[0]
            optimizers[-1].step()
        assert all(p.isfinite().all() and p.dtype == dtype for p in model.parameters())
    assert {state["step"] for state in optimizers[1].state.values()} == {4}


def test_another_optimisers_state_is_refused():
    model = mlp()
    theirs = torch.optim.AdamW(model.parameters())
    loss(model, *data()).backward()
    theirs.step()
    ours = GaLoreAdamW(list(model.parameters()), rank=4)
    with pytest.raises(HirankError, match="another optimiser wrote it"):
        ours.load_state_dict(theirs.state_dict())


def test_torchs_distributed_checkpoints_hold_the_state():
    model, other = mlp(), mlp(seed=1)
    a, b = GaLoreAdamW(model, rank=4), GaLoreAdamW(other, rank=4)
    run_batches(a, model, [data()])
    kept_model, kept = get_state_dict(model, a)
    set_state_dict(other, b, model_state_dict=kept_model, optim_state_dict=kept)
    for m, o in ((model, a), (other, b)):
        run_batches(o, m, [data(seed=2)])
    assert torch.equal(weights(model), weights(other))


def test_a_schedule_that_moves_betas_too():
    model = mlp()
    optimizer = GaLoreAdamW(model, rank=4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    seen = set()
    for _ in range(4):
        run_batches(optimizer, model, [data()])
        schedule.step()
        seen.add(optimizer.hyper_of(model[0].weight).betas)
    assert len(seen) == 4


def test_a_learning_rate_in_a_tensor_may_change_in_place():
    model = mlp()
    optimizer = GaLoreAdamW(model, rank=4, lr=0.1)
    rate = torch.tensor(0.1)
    for group in optimizer.param_groups:
        group["lr"] = rate
    run_batches(optimizer, model, [data()])
    rate.zero_()
    before = weights(model)
    run_batches(optimizer, model, [data(seed=2)])
    assert torch.equal(weights(model), before)

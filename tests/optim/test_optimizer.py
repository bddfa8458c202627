"""The optimiser as torch sees it: groups, options, files, schedules."""

import logging

import pytest
import torch
from torch import nn

import hirank
from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW, HirankError, QGaLoreAdamW
from hirank.optim.hyper import ALIASES, Hyper
from hirank.optim.weights import Int8Weight
from optim.toys import GL, data, everything, grads, loss, mlp, parameter, run, same

PRESETS = [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo, ApolloMini]


# Options.


def test_the_papers_settings_are_the_defaults():
    hyper = GaLoreAdamW([parameter(4, 4)]).param_groups[0]
    assert (hyper["lr"], hyper["gap"], hyper["scale"]) == (0.01, 200, 0.25)
    assert (hyper["betas"], hyper["eps"], hyper["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_names_of_other_libraries(alias: str, name: str):
    value = "std" if name == "sides" else 1
    group = GaLoreAdamW([{"params": [parameter(4, 4)], "rank": 2} | {alias: value}]).param_groups[0]
    assert group[name] == ("short" if name == "sides" else 1)
    assert alias not in group


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rnk": 4}, "no option rnk; the nearest known one is rank"),
        ({"rank": 0}, "rank is 0"),
        ({"lr": -1.0}, "lr is -1"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"gap": 0}, "gap is 0"),
        ({"lazy": 2.0}, "lazy is 2"),
        ({"basis": "dct"}, "basis is 'dct'"),
        ({"basis_store": "seed"}, "basis='random' or 'gaussian'"),
        ({"residual": "fira", "sides": "two"}, "sides='two'"),
        ({"residual": "fira", "scale_by": "channel"}, "choose one"),
        ({"limiter": 1.01}, "limiter"),
        ({"basis": "random", "lazy": 0.5}, "does not look at the gradient"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_sentence(options: dict, said: str):
    with pytest.raises(HirankError, match="^[^\n]*$") as caught:
        GaLoreAdamW([parameter(4, 4)], **options)
    assert said in str(caught.value)


def test_gb4_group_options_reach_their_group():
    options = {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-7}
    groups = GaLoreAdamW(everything(), rank=4, **options).param_groups
    assert all(g["betas"][1] == 0.95 and g["eps"] == 1e-7 for g in groups)
    decays = {tuple(p.dim() for p in g["params"]): g["weight_decay"] for g in groups}
    assert {d for dims, d in decays.items() if 1 not in dims} == {0.1}
    assert {d for dims, d in decays.items() if 1 in dims} == {0.0}


def test_gb5_frozen_parameters_are_left_out_and_a_high_rank_is_reported(caplog):
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad = False
    optimizer = GaLoreAdamW(model, rank=128)
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(held) == 2 and not any(p is model[0].weight for p in held)
    assert "rank 128" in caplog.text and "1 parameter," in caplog.text


def test_groups_that_name_a_rank_are_projected():
    a, b = parameter(8, 12), parameter(8, 12)
    optimizer = GaLoreAdamW([{"params": [a], **GL}, {"params": [b]}])
    assert [p is a for p in optimizer.projected()] == [True]


def test_a_models_embeddings_head_norms_and_biases_are_not_projected():
    optimizer = GaLoreAdamW(everything(), rank=4)
    assert [tuple(p.shape) for p in optimizer.projected()] == [(64, 32), (50, 64)]

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = nn.Linear(8, 12), nn.Linear(12, 50, bias=False)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    assert [tuple(p.shape) for p in GaLoreAdamW(WithHead(), rank=4).projected()] == [(12, 8)]


def test_g07_the_description_says_what_runs():
    said = GaLoreAdamW(mlp(), rank=4).describe()
    assert said.startswith("GaLoreAdamW: 2 projected parameters at rank 4, scale 0.25, gap 200; 2 ")
    assert f"{GaLoreAdamW(mlp(), rank=4).cost():,} bytes" in said


# What is refused.


@pytest.mark.parametrize("mark", ["_is_flat_param", "ds_id", "_hp_mapping"])
def test_g16_flattened_parameters_are_refused(mark: str):
    p = parameter(96)
    setattr(p, mark, True)
    with pytest.raises(HirankError, match="FSDP2") as caught:
        GaLoreAdamW([{"params": [p], **GL}])
    assert str(caught.value).count(".") == 1


def test_g16_parameters_exchanged_behind_our_back_are_refused():
    optimizer = GaLoreAdamW([parameter(8, 12)], rank=2)
    flat = parameter(96)
    flat.grad = torch.ones(96)
    optimizer.param_groups[0]["params"] = [flat]  # what ZeRO does
    with pytest.raises(HirankError, match="FSDP2"):
        optimizer.step()


def test_complex_parameters_are_refused():
    with pytest.raises(HirankError, match="complex"):
        GaLoreAdamW([nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))])


# Schedules and precision.


def test_g06_the_learning_rate_is_the_one_asked_for():
    a, b = parameter(8, 12), parameter(8, 12)
    optimizer = GaLoreAdamW([a], rank=2, lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates = []
    for g in grads(3, 8, 12):
        rates.append(schedule.get_last_lr()[0])
        run(optimizer, a, [g])
        schedule.step()
    assert rates == [3e-4, 1.5e-4, 0.75e-4]
    other = GaLoreAdamW([b], rank=2, lr=1.0)
    for g, rate in zip(grads(3, 8, 12), rates, strict=True):
        other.param_groups[0]["lr"] = rate
        run(other, b, [g])
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_parameters_of_any_float_dtype(dtype: torch.dtype):
    p = parameter(16, 24, dtype=dtype)
    before = p.detach().clone()
    optimizer = GaLoreAdamW([p], rank=4, gap=2, weight_decay=0.1)
    run(optimizer, p, grads(5, 16, 24, dtype=dtype))
    assert p.dtype == dtype and p.isfinite().all() and not torch.equal(p, before)
    wide = torch.promote_types(dtype, torch.float32)
    assert optimizer.state[p]["exp_avg"].dtype == wide


def test_a_bf16_run_is_a_rounded_fp32_run():
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter((0.05 * parameter(16, 24).detach()).bfloat16().to(dtype))
        start = p.detach().clone()
        gradients = [g.bfloat16().to(dtype) for g in grads(5, 16, 24)]
        run(GaLoreAdamW([p], rank=4, gap=2, lr=0.1), p, gradients)
        moved.append((p.detach() - start).float())
    assert (moved[0] - moved[1]).norm() < 0.05 * moved[0].norm()


def test_zero_grad_without_none_is_a_step_with_zeros():
    trails = []
    for to_none in (True, False):
        p = parameter(8, 12)
        optimizer = GaLoreAdamW([p], rank=2)
        for _ in range(3):
            (p.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        trails.append(p.detach().clone())
    assert torch.equal(*trails)


# Files.


def trained(cls: type, model: nn.Module, optimizer, steps: range) -> None:
    x, y = data(64)
    for step in steps:
        rows = torch.arange(8) + 7 * step % 50
        loss(model, x[rows], y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(model: nn.Module) -> dict:
    """Weights bit by bit."""
    return {
        name: {"codes": p.codes, "scale": p.scale, "low": p.low}
        if isinstance(p, Int8Weight)
        else p.detach()
        for name, p in model.named_parameters()
    }


OPTIONS = [
    {},
    {"state": "int8", "basis_store": "int4"},
    {"state": "int8", "rounding": "feedback", "moments": "project"},
    {"state": "bf16", "basis": "randomised", "lazy": 0.3, "stagger": True},
    {"sides": "two", "basis": "svd", "moments": "reset"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"),
    [(GaLoreAdamW, o) for o in OPTIONS] + [(c, {}) for c in PRESETS[1:]],
    ids=str,
)
def test_g10_resume_is_bit_exact(cls, options, dtype, tmp_path):
    def wide_mlp():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 320), nn.Tanh(), nn.Linear(320, 8)).to(dtype).float()

    def made():
        model = wide_mlp().to(dtype)
        model.forward = lambda x, inner=model.forward: inner(x.to(dtype)).float()
        return model, cls(model, **{"rank": 16 if cls is not ApolloMini else 1, "gap": 4} | options)

    whole, optimizer = made()
    trained(cls, whole, optimizer, range(20))
    first, optimizer_1 = made()
    trained(cls, first, optimizer_1, range(9))
    torch.save(optimizer_1.state_dict(), tmp_path / "optimizer.pt")
    second, optimizer_2 = made()
    for p, q in zip(second.parameters(), first.parameters(), strict=True):
        p.data.copy_(q.data)
    optimizer_2.load_state_dict(torch.load(tmp_path / "optimizer.pt"))  # weights_only=True
    trained(cls, second, optimizer_2, range(9, 20))
    assert same(tensors(whole), tensors(second))
    assert same(optimizer.state_dict(), optimizer_2.state_dict())


def test_runs_repeat_and_seeds_differ():
    def go(seed: int) -> torch.Tensor:
        p = parameter(64, 80)
        options = {"state": "int8", "basis": "random", "gap": 2, "seed": seed}
        return run(GaLoreAdamW([p], rank=60, **options), p, grads(5, 64, 80))

    assert torch.equal(go(0), go(0)) and not torch.equal(go(0), go(1))


def test_presets_are_at_the_top():
    assert all(getattr(hirank, cls.__name__) is cls for cls in PRESETS)
    assert all("arXiv" in cls.__doc__ for cls in PRESETS)
    assert all(isinstance(cls.settings, Hyper) for cls in PRESETS)


def test_nothing_is_logged_in_a_healthy_run(caplog):
    p = parameter(8, 12)
    with caplog.at_level(logging.WARNING):
        run(GaLoreAdamW([p], rank=2), p, grads(3, 8, 12))
    assert caplog.text == ""

"""The truth is the definition in fp32; an arm further from it than stock PEFT is found out."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import tiny_llama
from hirank.bench import arms as arms_
from hirank.bench.gate import agreement, check, distances, relative_rms, with_judges
from hirank.bench.model import gate_probe
from hirank.bench.truth import exact, truth_of
from hirank.errors import HirankError

CPU = torch.device("cpu")
IDS = torch.arange(24).view(1, 24)


def frozen(dtype=torch.float32):
    return tiny_llama(dtype=dtype).requires_grad_(False)


def models(base, *names, dropout=0.0):
    return arms_.build(base, names or arms_.ARMS, rank=4, dropout=dropout)


def probe(model):
    return gate_probe(model, IDS, CPU)


def run_truth(base, weights, **settings):
    """Logits and gradients by name."""
    with exact():
        logits = probe(truth_of(base, weights, scale=arms_.SCALE, **settings)).detach()
    grads = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return logits, grads


@pytest.mark.parametrize("name", ["peft-lora", "peft-dora"])
def test_the_truth_is_pefts_model_in_fp64(name):
    base = frozen()
    stock = models(base, name)[name]
    truth, grads = run_truth(base, arms_.trainable(stock))
    wide = copy.deepcopy(stock).double()
    logits = wide(input_ids=IDS, use_cache=False).logits
    assert relative_rms(truth, logits.detach()) < 1e-6
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    wanted = {n: p.grad for n, p in arms_.trainable(wide).items()}
    assert grads.keys() == wanted.keys()
    assert all(relative_rms(grads[n], wanted[n]) < 1e-5 for n in wanted)


def test_sixteen_bits_are_widened_where_they_are_used_and_nowhere_else():
    base = frozen(torch.bfloat16)
    weights = arms_.trainable(models(base, "peft-dora")["peft-dora"])
    logits, grads = run_truth(base, weights)
    assert logits.dtype == torch.float32
    same, same_grads = run_truth(copy.deepcopy(base).float(), weights)
    assert torch.equal(logits, same)
    assert all(torch.equal(grads[name], same_grads[name]) for name in grads)
    assert {p.dtype for p in base.parameters()} == {torch.bfloat16}
    model = truth_of(base, weights, scale=arms_.SCALE)
    probe(model)  # recomputation in the backward pass stops in the middle of a layer
    kept = {p.dtype for n, p in model.named_parameters() if "lora" not in n and "magn" not in n}
    assert kept == {torch.bfloat16}


def test_autocast_does_not_reach_the_truth():
    base = frozen(torch.bfloat16)
    weights = arms_.trainable(models(base, "peft-lora")["peft-lora"])
    alone, _ = run_truth(base, weights)
    with torch.autocast("cpu", torch.bfloat16):
        under, _ = run_truth(base, weights)
    assert torch.equal(alone, under)


def test_a_layer_without_a_definition_is_named():
    base = nn.ModuleDict({"sound": nn.Conv1d(4, 4, 3)})
    name, A, B = (
        "base_model.model.sound.lora_{}.default.weight",
        torch.ones(2, 4, 3),
        torch.ones(4, 2, 1),
    )
    weights = {name.format("A"): nn.Parameter(A), name.format("B"): nn.Parameter(B)}
    with pytest.raises(HirankError, match="sound is a Conv1d"):
        truth_of(base, weights, scale=2.0)


def test_arms_agree():
    base = frozen()
    arms = models(base)
    found = agreement(base, arms, probe, torch.float32)
    assert {name: one.against for name, one in found.items()} == {
        "hirank-lora": "peft-lora",
        "hirank-dora": "peft-dora",
        "dense-dora": "peft-dora",
    }
    assert all(one.agrees for one in found.values())
    assert set(found["hirank-dora"].off) == {
        "outputs", "gradients", "lora_A", "lora_B", "lora_magnitude_vector"
    }  # fmt: skip
    assert max(found["hirank-dora"].off.values()) < 1e-5
    assert all(p.grad is None for model in arms.values() for p in model.parameters())


def test_arms_that_drop_the_same_agree():
    base = frozen()
    arms = models(base, "peft-lora", "peft-dora", "hirank-lora", "hirank-dora", dropout=0.3)
    found = agreement(base, arms, probe, torch.float32, dropout=0.3)
    assert all(one.agrees for one in found.values()), found
    assert not any(type(m).__name__ == "_SameMask" for m in arms["hirank-dora"].modules())
    without = agreement(base, arms, probe, torch.float32)  # a truth that drops nothing is another
    assert not any(one.agrees for one in without.values())


def test_an_arm_that_forgets_its_gain_is_found():
    base = frozen()
    arms = models(base)
    for name, module in arms["hirank-dora"].named_modules():
        if name.endswith("up_proj"):
            module.lora_variant.clear()
    found = agreement(base, arms, probe, torch.float32)
    assert not found["hirank-dora"].agrees and found["dense-dora"].agrees


def test_judges_come_after_the_arms_that_want_them():
    wanted = ["hirank-dora", "base", "hirank-lora"]
    assert with_judges(wanted) == [*wanted, "peft-dora", "peft-lora"]
    assert with_judges(["peft-lora", "hirank-lora"]) == ["peft-lora", "hirank-lora"]


@pytest.mark.parametrize(
    ("ours", "judges", "agrees"),
    [
        (0.06, 0.06, True),
        (0.02, 0.06, True),
        (0.064, 0.06, True),  # within 5 % and half a rounding
        (0.07, 0.06, False),
        (0.30, 0.30, False),  # as wrong as PEFT is still wrong
        (math.nan, 0.06, False),
        (0.06, math.nan, False),
        (math.inf, math.inf, False),
    ],
)
def test_no_further_from_the_truth_than_the_judge(ours, judges, agrees):
    found = check("peft-dora", {"outputs": ours}, {"outputs": judges}, torch.bfloat16)
    assert found.agrees is agrees


def test_few_rows_leave_more_to_chance():
    ours, judges = {"outputs": 0.075}, {"outputs": 0.06}
    assert not check("peft-dora", ours, judges, torch.bfloat16, rows=256).agrees
    assert check("peft-dora", ours, judges, torch.bfloat16, rows=8).agrees
    assert not check("peft-dora", {"outputs": 0.08}, judges, torch.bfloat16, rows=8).agrees


def test_each_kind_of_gradient_counts():
    near = {"outputs": 0.01, "gradients": 0.02, "lora_magnitude_vector": 0.03}
    assert check("peft-dora", near, near, torch.bfloat16).agrees
    assert not check(
        "peft-dora", near | {"lora_magnitude_vector": 0.06}, near, torch.bfloat16
    ).agrees


def test_fp32_is_allowed_another_order_of_sums_only():
    assert check("peft-lora", {"outputs": 9e-6}, {"outputs": 1e-6}, torch.float32).agrees
    assert not check("peft-lora", {"outputs": 2e-5}, {"outputs": 1e-6}, torch.float32).agrees


def test_a_missing_gradient_is_infinitely_far():
    out, grad = torch.ones(2), {"a.lora_A.w": torch.ones(2)}
    assert distances((out, grad), (out, grad)) == {"outputs": 0, "gradients": 0, "lora_A": 0}
    assert distances((out, {}), (out, grad))["gradients"] == math.inf


def test_a_distance_that_is_not_finite_can_be_recorded():
    bad = {"outputs": math.nan, "gradients": math.inf}
    said = check("peft-lora", bad, {"outputs": 0.1}, torch.float32).record()
    assert said["off"] == {"outputs": None, "gradients": None}
    assert said["judge_off"] == {"outputs": 0.1} and said["agrees"] is False

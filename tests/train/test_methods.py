"""Adapters on a tiny model: what is trained, at which scale, and what is refused beforehand."""

import math

import pytest
import torch

from helpers import tiny_llama
from hirank.errors import HirankError
from hirank.train.methods import METHODS, MethodConfig, apply, check, parameter_counts


def meta_llama():
    with torch.device("meta"):
        return tiny_llama()


def lora_layers(model):
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and m.lora_A}


@pytest.mark.parametrize(
    ("name", "scale"), [("lora", 2), ("dora", 2), ("rslora", 8 / math.sqrt(4))]
)
@pytest.mark.parametrize("accelerate", [True, False])
def test_default_scale(name, scale, accelerate):
    applied = apply(tiny_llama(), MethodConfig(name=name, r=4, accelerate=accelerate))
    layers = lora_layers(applied.model)
    assert len(layers) == 14
    assert {layer.scaling["default"] for layer in layers.values()} == {scale}


@pytest.mark.parametrize("name", METHODS)
def test_the_check_foretells_the_number_of_trained_parameters(name):
    config = MethodConfig(name=name, r=4)
    foretold = check(meta_llama(), config)
    assert foretold == parameter_counts(apply(tiny_llama(), config).model)[0]


def test_adapters_are_float32_on_a_bfloat16_base():
    model = apply(tiny_llama(dtype=torch.bfloat16), MethodConfig(r=4)).model
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}


def test_full_trains_everything():
    applied = apply(tiny_llama(), MethodConfig(name="full"))
    assert all(p.requires_grad for p in applied.model.parameters())
    assert applied.layers == []


@pytest.mark.parametrize(("accelerate", "tiers"), [(True, {"eager"}), (False, {"peft"})])
def test_layers_say_which_code_they_run(accelerate, tiers):
    layers = apply(tiny_llama(), MethodConfig(r=4, accelerate=accelerate)).layers
    assert {layer["tier"] for layer in layers} == tiers
    assert {layer["kind"] for layer in layers} == {"dora"}
    assert all(set(layer) == {"name", "kind", "tier", "reason"} for layer in layers)


def test_a_rank_larger_than_a_layer_is_refused_naming_the_layer():
    with pytest.raises(HirankError) as caught:
        check(meta_llama(), MethodConfig(r=24))
    # key and value projections map 32 to 16
    assert "rank 24" in str(caught.value)
    assert "model.layers.0.self_attn.k_proj" in str(caught.value)
    assert "method.r <= 16" in str(caught.value)


def test_a_rank_from_a_pattern_is_checked_too():
    config = MethodConfig(r=4, rank_pattern={r".*down_proj": 33})
    with pytest.raises(HirankError, match="rank 33 .*down_proj"):
        check(meta_llama(), config)


@pytest.mark.parametrize("targets", [["c_attn"], "nothing.*"])
def test_targets_that_match_nothing_are_refused_naming_what_there_is(targets):
    with pytest.raises(HirankError, match="matches no layer.*q_proj, k_proj"):
        check(meta_llama(), MethodConfig(r=4, target_modules=targets))


def test_the_output_head_is_refused():
    with pytest.raises(HirankError, match="output head"):
        check(meta_llama(), MethodConfig(r=4, target_modules=["q_proj", "lm_head"]))


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
def test_d58_a_pattern_that_matches_nothing_is_named(setting, accelerate):
    config = MethodConfig(r=4, accelerate=accelerate, **{setting: {"layers.9.q_proj": 2}})
    with pytest.warns(UserWarning, match=rf"method.{setting}: 'layers.9.q_proj'") as told:
        check(meta_llama(), config)
        apply(tiny_llama(), config)
    assert len([w for w in told if "layers.9.q_proj" in str(w.message)]) == 1


def test_patterns_that_match_are_silent():
    config = MethodConfig(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.*": 3})
    check(meta_llama(), config)
    layers = lora_layers(apply(tiny_llama(), config).model)
    ranks = {n.rpartition(".")[2]: layer.r["default"] for n, layer in layers.items()}
    assert (ranks["q_proj"], ranks["k_proj"]) == (2, 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["q_proj", "gate_prj"]}, "'gate_prj'.*gate_proj"),
        ({"modules_to_save": ["lm_heat"]}, "'lm_heat'.*lm_head"),
        ({"modules_to_save": [""]}, "names ''"),
        ({"r": 10**11}, "rank 100000000000 is larger"),
        ({"rank_pattern": {"q_proj": 10**25}}, "is larger"),
    ],
)
def test_a_name_that_fits_nothing_and_a_rank_beyond_memory_are_refused(settings, said):
    with pytest.raises(HirankError, match=said):
        check(meta_llama(), MethodConfig(**({"r": 4} | settings)))

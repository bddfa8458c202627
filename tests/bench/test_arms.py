"""All arms share weights and values; what is saved and kept is counted once."""

import pytest
import torch

from helpers import tiny_llama
from hirank.bench import arms as arms_
from hirank.bench.memory import cache_bytes, saved_bytes, size
from hirank.bench.model import gate_probe
from hirank.errors import HirankError

CPU = torch.device("cpu")
IDS = torch.arange(24).view(1, 24)


@pytest.fixture
def base():
    return tiny_llama().requires_grad_(False)


@pytest.fixture
def models(base):
    return arms_.build(base, arms_.ARMS, rank=4)


def probe(model):
    return gate_probe(model, IDS, CPU)


def test_base_weights_are_shared_and_unchanged(base, models):
    own = {parameter.data_ptr() for parameter in base.parameters()}
    for model in models.values():
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert {parameter.data_ptr() for parameter in frozen} == own
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_adapters_are_shared_and_perturbed(models):
    lora, dora = (arms_.trainable(models[name]) for name in ("peft-lora", "hirank-dora"))
    assert all(dora[name] is parameter for name, parameter in lora.items())
    assert all(parameter.abs().sum() > 0 for parameter in dora.values())
    names = [name for name in dora if arms_.MAGNITUDE in name]
    assert len(names) == 14 and set(dora) - set(lora) == set(names)
    layer = models["hirank-dora"].get_submodule(names[0].partition("." + arms_.MAGNITUDE)[0])
    norm = layer.base_layer.weight.norm(dim=1)
    assert ((dora[names[0]] / norm - 1).abs() > 0.01).float().mean() > 0.5


def test_values_do_not_depend_on_which_arms_there_are(base, models):
    alone = arms_.trainable(arms_.build(base, ["hirank-dora"], rank=4)["hirank-dora"])
    together = arms_.trainable(models["hirank-dora"])
    assert all(torch.equal(alone[name], together[name]) for name in together)


def test_an_unknown_model_is_refused():
    with pytest.raises(HirankError, match="qwen3-8b"):
        arms_.load_base("no-such-folder", CPU)


def test_a_folder_is_loaded_frozen(tiny_model_dir):
    model = arms_.load_base(str(tiny_model_dir), CPU)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_saved_bytes_leave_out_what_is_owned():
    x = torch.randn(5, 3, requires_grad=True)
    w = torch.randn(3, 4, requires_grad=True)
    assert saved_bytes(lambda: (x @ w).exp(), [x, w]) == 5 * 4 * 4  # what exp gave
    assert saved_bytes(lambda: (x @ w).exp(), [w]) == (5 * 4 + 5 * 3) * 4


def test_a_graph_that_was_dropped_keeps_nothing():
    x, w = torch.randn(5, 3), torch.randn(3, 4, requires_grad=True)
    assert saved_bytes(lambda: (x @ w) / (x @ w).exp().detach(), [x, w]) == 5 * 4 * 4  # the divisor
    assert saved_bytes(lambda: x @ w, [w]) == 5 * 3 * 4


def test_a_storage_counts_once():
    x = torch.zeros(6)
    assert size([x, x[:2], x.view(2, 3)]) == 24


def test_kept_norms_are_counted(models):
    probe(models["hirank-dora"])
    weights = arms_.trainable(models["hirank-dora"]).items()
    magnitudes = [weight for name, weight in weights if arms_.MAGNITUDE in name]
    kept = cache_bytes(models["hirank-dora"])
    assert size(magnitudes) <= kept < size(models["hirank-dora"].parameters()) / 2
    assert cache_bytes(models["peft-dora"]) == 0

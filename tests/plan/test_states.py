"""Adapters, gradients and optimiser states against PEFT's and torch's own, byte by byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hirank.errors import HirankError
from hirank.optim import presets
from hirank.optim.groups import model_groups
from hirank.plan.catalogue import CATALOGUE
from hirank.plan.inventory import read_shape
from hirank.plan.setting import Setting
from hirank.plan.states import (
    adapter_numbers,
    adapter_parts,
    gradient_parts,
    hyper_of,
    nf4_bytes,
    optimizer_parts,
    trained_numbers,
    weight_parts,
)
from plan.models import model_of, shape_of, trained_bytes

SOME: dict[str, Any] = {"model": "tiny", "rank": 5}


@pytest.mark.parametrize("method", ["lora", "dora", "dora-peft"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_adapters_are_as_large_as_pefts(method: Any, kind: str, targets: Any):
    setting = Setting(method=method, targets=targets, attention="eager", **SOME)
    model = model_of(setting, kind, device="meta")
    shape = shape_of(kind)
    found = sum(part.size for name, part in adapter_parts(setting, shape) if name == "adapters")
    assert found == trained_bytes(model) == gradient_parts(setting, shape).size
    assert trained_numbers(setting, shape) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
def test_adapters_of_experts_are_as_large_as_pefts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    setting = Setting(method="lora", **SOME)
    model = model_of(setting, "qwen3_moe", device="meta", **sizes)
    shape = shape_of("qwen3_moe", **sizes)
    assert gradient_parts(setting, shape).size == trained_bytes(model)
    assert optimizer_parts(setting, shape).size == 2 * trained_bytes(model)


@pytest.mark.parametrize(
    ("model", "targets", "rank", "numbers"),
    [
        ("qwen2.5-7b", ("q_proj", "v_proj"), 16, 5_046_272),
        ("qwen2.5-7b", ("q_proj", "k_proj", "v_proj", "o_proj"), 32, 20_185_088),
        ("qwen2.5-7b", "all-linear", 64, 161_480_704),
        ("llama-3.1-8b", ("q_proj", "v_proj"), 8, 3_407_872),
        ("llama-3.1-8b", "all-linear", 16, 41_943_040),
    ],
)
def test_adapters_of_known_models(model: str, targets: Any, rank: int, numbers: int):
    shape = read_shape(CATALOGUE[model].config, model)
    assert adapter_numbers(Setting(model, rank=rank, targets=targets), shape) == (numbers, 0)


def test_magnitudes_of_known_models():
    shape = read_shape(CATALOGUE["qwen2.5-7b"].config, "q")
    setting = Setting("q", method="dora", rank=16)
    assert trained_numbers(setting, shape) == 41_760_768
    assert trained_numbers(replace(setting, rank=64), shape) == 162_871_296


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_and_adamw_of_a_full_training(dtype: Any):
    setting = Setting("tiny", method="full", base_dtype=dtype, step="loop")
    model, shape = model_of(setting, "qwen2"), shape_of("qwen2")
    weights = sum(part.size for _, part in weight_parts(setting, shape))
    assert weights == trained_bytes(model) == gradient_parts(setting, shape).size
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer_parts(setting, shape).size == moments(optimizer)


def moments(optimizer: torch.optim.Optimizer) -> int:
    """Without the counters, which are 4 bytes each."""
    kept = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    return sum(v.numel() * v.element_size() for v in kept if isinstance(v, torch.Tensor))


CLASSES = {
    "galore": presets.GaLoreAdamW,
    "qgalore": presets.QGaLoreAdamW,
    "fira": presets.Fira,
    "apollo": presets.Apollo,
    "apollo-mini": presets.ApolloMini,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("method", CLASSES)
def test_low_rank_states_are_as_the_optimiser_says(method: Any, kind: str):
    setting = Setting("tiny", method=method, rank=7)
    model, shape = model_of(setting, kind, device="meta"), shape_of(kind)
    hyper = hyper_of(setting)
    groups = model_groups(model, replace(hyper, weights="keep"))
    optimizer = CLASSES[method](groups, **vars(replace(hyper, weights="keep")))
    assert optimizer_parts(setting, shape).size == optimizer.cost()


def test_int8_weights_of_qgalore():
    setting, shape = Setting("tiny", method="qgalore", rank=4), shape_of("llama")
    model = model_of(setting, "llama")
    optimizer = presets.QGaLoreAdamW(model, rank=4)
    inner = [p for group in optimizer.param_groups for p in group["params"]]
    parts = [t for p in inner for t in ((p.codes, p.scale, p.low) if hasattr(p, "codes") else (p,))]
    found = sum(part.size for _, part in weight_parts(setting, shape))
    assert found == sum(t.numel() * t.element_size() for t in parts)


def test_stepping_in_backward_keeps_the_largest_gradient():
    setting = Setting("tiny", method="galore", rank=4, step_in_backward=True)
    model, shape = model_of(setting, "llama"), shape_of("llama")
    optimizer = presets.GaLoreAdamW(model, rank=4)
    assert gradient_parts(setting, shape).size == optimizer.gradient_cost(in_backward=True)


def test_nf4_is_4_127_bits():
    assert nf4_bytes(2**24) * 8 / 2**24 == pytest.approx(4.127, abs=1e-3)
    shape = read_shape(CATALOGUE["qwen2.5-7b"].config, "q")
    sizes = dict(weight_parts(Setting("q", method="qlora"), shape))
    assert sum(part.size for part in sizes.values()) == pytest.approx(5.55e9, rel=2e-3)


def test_widened_embeddings_of_a_quantised_base():
    shape = read_shape(CATALOGUE["qwen2.5-7b"].config, "q")
    found = weight_parts(Setting("q", method="qlora", kbit_upcast=True), shape)
    assert sum(part.size for _, part in found) == pytest.approx(7.73e9, rel=2e-3)


def test_adamw_in_8_bits():
    """8.125 bits a number and moment, fp32 for small tensors."""
    shape = read_shape(CATALOGUE["llama-3.1-8b"].config, "l")
    setting = Setting("l", method="full", state_dtype="int8")
    assert optimizer_parts(setting, shape).size == pytest.approx(2 * 8.03e9 * 1.015625, rel=1e-3)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_porj",), "nearest known one is q_proj"),
        ("mlp.nothing", "match no linear layer"),
    ],
)
def test_targets_that_are_not_there(targets: Any, said: str):
    with pytest.raises(HirankError, match=said):
        trained_numbers(Setting("tiny", targets=targets), shape_of("llama"))


def test_targets_by_regex():
    setting = Setting("tiny", rank=2, targets=r".*self_attn\.(q|v)_proj")
    assert adapter_numbers(setting, shape_of("llama"))[0] == 2 * 2 * (96 + 144 + 96 + 48)

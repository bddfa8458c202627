"""Counts of parameters against Transformers' own models, to the unit."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hirank.errors import HirankError
from hirank.plan.catalogue import CATALOGUE
from hirank.plan.inventory import KNOWN, read_shape

TINY = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def meta(config: dict[str, Any], **changes: Any) -> Any:
    """Transformers' model of a config.json, without memory."""
    settings = {**config, **changes}
    made = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made)


def count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_known_model_has_the_published_count(name: str):
    entry = CATALOGUE[name]
    assert read_shape(entry.config, name).parameters == entry.parameters


@pytest.mark.parametrize("name", CATALOGUE)
def test_so_has_the_model_of_transformers(name: str):
    """With one block, as all blocks are alike."""
    entry = CATALOGUE[name]
    shape = read_shape(entry.config, name)
    left_out = (shape.layers - 1) * shape.block_parameters
    assert count(meta(dict(entry.config), num_hidden_layers=1)) + left_out == entry.parameters


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, True)])
def test_every_architecture_with_tied_heads_and_biases(kind: str, tied: bool, bias: bool):
    config = {"model_type": kind, **TINY, "tie_word_embeddings": tied, "attention_bias": bias}
    config |= {"mlp_bias": bias, "head_dim": 8}
    if KNOWN[kind].experts:
        config |= {str(KNOWN[kind].experts): 4, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": 24}
    if kind == "mixtral":
        del config["moe_intermediate_size"]
    shape = read_shape(config, "tiny")
    assert shape.parameters == count(meta(config))
    assert shape.tied == tied


@pytest.mark.parametrize("kind", [kind for kind in KNOWN if not KNOWN[kind].experts])
def test_linears_by_name_and_size(kind: str):
    config = {"model_type": kind, **TINY, "head_dim": 8}
    found = {
        name.rpartition(".")[2]: (module.out_features, module.in_features)
        for name, module in meta(config).named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    }
    assert {m.name: (m.out, m.inp) for m in read_shape(config, "tiny").linears} == found


def test_active_parameters_of_a_mixture():
    shape = read_shape(CATALOGUE["qwen3-30b-a3b"].config, "moe")
    assert shape.active_parameters == pytest.approx(3.35e9, rel=0.01)  # "A3B", embeddings included


def test_the_language_part_of_a_model_that_sees():
    config = {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34}}  # fmt: skip
    shape = read_shape(config, "gemma-3-4b-pt")
    assert shape.parameters == CATALOGUE["gemma-3-4b"].parameters
    assert shape.images


def test_the_head_dimension_is_not_in_every_file():
    """Qwen2.5's config.json lacks it: it is hidden size over heads."""
    assert read_shape(CATALOGUE["qwen2.5-7b"].config, "q").head_dim == 128


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llamma", **TINY}, "nearest known one is llama"),
        ({"model_type": "mamba2", **TINY}, "mamba2"),
        (TINY, "does not name"),
        ({"model_type": "llama", **TINY, "hidden_size": "wide"}, "hidden_size 'wide'"),
        ({"model_type": "llama", **TINY, "vocab_size": 0}, "vocab_size 0"),
        ({"model_type": "llama"}, "num_hidden_layers None"),
        ({"model_type": "mixtral", **TINY, "num_local_experts": True}, "num_local_experts True"),
    ],
)
def test_what_cannot_be_counted_is_refused(config: dict[str, Any], said: str):
    with pytest.raises(HirankError, match=said):
        read_shape(config, "some model")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen2.5-7b", "num_key_value_heads", -1),
        ("qwen2.5-7b", "num_key_value_heads", "4"),
        ("qwen2.5-7b", "head_dim", [128]),
        ("qwen2.5-7b", "hidden_size", 10**30),
        ("qwen3-30b-a3b", "moe_intermediate_size", 0),
        ("gemma-2-2b", "sliding_window", "4k"),
        ("gemma-3-1b", "sliding_window_pattern", "six"),
    ],
)
def test_a_field_that_is_no_count_is_named(name: str, key: str, value: Any):
    config = {**CATALOGUE[name].config, key: value}
    if key == "sliding_window_pattern":
        config.pop("layer_types", None)
    with pytest.raises(HirankError, match=f"{key} .* no count"):
        read_shape(config, name)

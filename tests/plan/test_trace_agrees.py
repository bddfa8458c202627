"""The two engines agree on peaks, phase by phase where it matters: 3 % are an error in one."""

import pytest
from transformers import MixtralConfig, Qwen2Config, Qwen3MoeConfig

from hirank.plan.closed import closed_form
from hirank.plan.inventory import read_shape
from hirank.plan.setting import Setting
from hirank.plan.trace import trace

SMALL = Qwen2Config(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=32000,
    tie_word_embeddings=False,
)

SETTINGS = [
    {"method": "full", "loss": "plain"},
    {"method": "full", "step": "foreach", "sequence": 64},
    {"method": "full", "base_dtype": "fp32", "checkpointing": True},
    {"method": "lora", "attention": "eager"},
    {"method": "lora", "autocast": False, "loss": "plain", "checkpointing": True},
    {"method": "dora"},
    {"method": "qlora", "checkpointing": True},
    {"method": "qdora", "eval_batch": 1, "targets": ("q_proj", "down_proj")},
    {"method": "dora-peft"},
    {"method": "dora-peft", "checkpointing": True},
    {"method": "dora-peft", "checkpointing": True, "autocast": False},
    {"method": "qlora", "kbit_upcast": True},
    {"method": "full", "base_dtype": "fp32", "accumulation": 2, "sequence": 64},
    {"method": "lora", "eval_batch": 24},
    {"method": "lora", "eval_batch": 24, "attention": "eager"},
    {"method": "dora-peft", "eval_batch": 24},
    {"method": "full", "eval_batch": 32, "base_dtype": "fp32", "loss": "plain"},
    {"method": "galore", "checkpointing": True, "sequence": 64},
    {"method": "galore", "step_in_backward": True, "rank": 64},
    {"method": "galore", "step_in_backward": True, "sequence": 64, "checkpointing": True},
    {"method": "qgalore", "rank": 64, "sequence": 64},
    {"method": "apollo", "rank": 64, "sequence": 64, "state_dtype": "bf16"},
]


EXPERTS = {
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 4000,
    "tie_word_embeddings": False,
}
MIXTURES = {
    "qwen3": Qwen3MoeConfig(
        **EXPERTS, intermediate_size=1536, moe_intermediate_size=384, num_experts=8, head_dim=64
    ),
    "mixtral": MixtralConfig(**EXPERTS, intermediate_size=1024, num_local_experts=4),
}


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_closed_form_and_trace_agree(changes):
    setting = Setting(**{"model": "small", "sequence": 512, "batch": 2} | changes)
    closed = closed_form(setting, read_shape(SMALL.to_dict(), "small"))
    traced = trace(setting, SMALL)
    assert closed.allocated == pytest.approx(traced.allocated, rel=0.03)


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora"},
        {"method": "lora", "checkpointing": True},
        {"method": "dora", "targets": ("q_proj", "v_proj")},
        {"method": "full", "autocast": False, "checkpointing": True},
    ],
    ids=str,
)
def test_they_agree_on_mixtures_of_experts(kind, changes):
    setting = Setting(**{"model": "small", "sequence": 512, "batch": 2} | changes)
    closed = closed_form(setting, read_shape(MIXTURES[kind].to_dict(), "small"))
    traced = trace(setting, MIXTURES[kind])
    assert closed.allocated == pytest.approx(traced.allocated, rel=0.03)


def test_evaluation_of_a_deep_model_keeps_no_block():
    setting = Setting("small", method="lora", sequence=512, eval_batch=24)
    deep = Qwen2Config(**SMALL.to_dict() | {"num_hidden_layers": 12, "layer_types": None})
    closed = closed_form(setting, read_shape(deep.to_dict(), "small"))
    traced = trace(setting, deep)
    assert closed.total("evaluation") == pytest.approx(traced.total("evaluation"), rel=0.01)


@pytest.mark.parametrize("method", ["lora", "qdora"])
def test_what_is_loaded_is_counted_once(method):
    """Each quantised weight is taken over by itself; none counts as what it was made from."""
    setting = Setting("small", method=method, sequence=64)
    deep = Qwen2Config(**SMALL.to_dict() | {"num_hidden_layers": 12, "layer_types": None})
    closed = closed_form(setting, read_shape(deep.to_dict(), "small"))
    adapters = closed.phases["save"]["adapters"]
    traced = trace(setting, deep)
    loaded = closed.total("load") + adapters
    assert traced.total("load") == pytest.approx(loaded, rel=0.01)

"""The two engines agree on peaks, phase by phase where it matters: 3 % are an error in one."""

import pytest
from transformers import Qwen2Config

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
    {"method": "galore", "checkpointing": True, "sequence": 64},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_closed_form_and_trace_agree(changes):
    setting = Setting(**{"model": "small", "sequence": 512, "batch": 2} | changes)
    closed = closed_form(setting, read_shape(SMALL.to_dict(), "small"))
    traced = trace(setting, SMALL)
    assert closed.allocated == pytest.approx(traced.allocated, rel=0.03)

"""Tiny models of several architectures, and what a plan of them is."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hirank.plan.inventory import Shape, read_shape
from hirank.plan.setting import BYTES, Setting

TINY: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config(kind: str, **changes: Any) -> dict[str, Any]:
    """A tiny config.json."""
    return {"model_type": kind, **TINY, **changes}


def shape_of(kind: str, **changes: Any) -> Shape:
    return read_shape(config(kind, **changes), f"tiny-{kind}")


def transformers_config(kind: str, **changes: Any) -> Any:
    settings = config(kind, **changes)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def model_of(setting: Setting, kind: str, *, device: str = "cpu", **changes: Any) -> Any:
    """Transformers' model with what the setting trains: PEFT's adapters, or hirank's."""
    made = transformers_config(kind, **changes)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(
            made, dtype=FLOATS[setting.base_dtype], attn_implementation=setting.attention
        )
    return adapted(base, setting).train() if setting.is_adapter else base.train()


def adapted(base: Any, setting: Setting) -> Any:
    from peft import LoraConfig, get_peft_model

    from hirank import accelerate

    targets = setting.targets if isinstance(setting.targets, str) else list(setting.targets)
    wanted = LoraConfig(r=setting.rank, target_modules=targets, use_dora=setting.has_gains)
    model = get_peft_model(base, wanted)
    return model if setting.method == "dora-peft" else accelerate(model)


def trained_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def width(setting: Setting) -> int:
    return BYTES[setting.base_dtype]

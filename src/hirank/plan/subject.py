"""The model and the optimiser of a setting, by the code that would train them.

Everything is made on the meta device; `faked.give_fakes` or `to_empty` gives it tensors.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from hirank.errors import HirankError
from hirank.plan.setting import Setting

__all__ = [
    "DTYPES",
    "build",
    "check_traceable",
    "depth_of",
    "in_nf4",
    "optimizer_for",
    "states_of",
    "with_depth",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_PRESETS = {
    "galore": "GaLoreAdamW",
    "qgalore": "QGaLoreAdamW",
    "fira": "Fira",
    "apollo": "Apollo",
    "apollo-mini": "ApolloMini",
}


def check_traceable(setting: Setting) -> None:
    """Raise HirankError for what one process without a GPU cannot show."""
    if setting.sharding != "none":
        raise HirankError(
            f"A trace sees one process, and sharding is {setting.sharding}; use the closed form."
        )


# Depth.


def depth_of(config: Any) -> int:
    """How many blocks the model has."""
    return int(config.get_text_config().num_hidden_layers)


def with_depth(config: Any, depth: int) -> Any:
    """The same model with `depth` blocks; what its config says of each block is cut to them."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    old = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == old:
            setattr(text, name, (value * depth)[:depth])
    text.num_hidden_layers = depth
    return made


# The model.


def build(setting: Setting, config: Any) -> nn.Module:
    """The model on meta, with adapters or with all weights to train, in training mode."""
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM
    attention = "sdpa" if setting.attention == "flash" else setting.attention
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = base.from_config(
                config, dtype=DTYPES[setting.base_dtype], attn_implementation=attention
            )
        except ValueError as error:
            raise HirankError(
                f"Transformers does not build this model with attention {attention}; try eager "
                f"({str(error).partition('. ')[0]})."
            ) from error
    if setting.is_adapter:
        model = _adapted(model, setting)
    return model.train()  # type: ignore[no-any-return]


def _adapted(model: Any, setting: Setting) -> Any:
    from peft import LoraConfig, get_peft_model

    from hirank.adapters.peft import accelerate

    targets = setting.targets if isinstance(setting.targets, str) else list(setting.targets)
    config = LoraConfig(
        r=setting.rank,
        lora_alpha=2 * setting.rank,
        target_modules=targets,
        use_dora=setting.has_gains,
        use_rslora=setting.method == "rslora",
        task_type="CAUSAL_LM",
    )
    wide = setting.adapter_dtype == "fp32"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(model, config, autocast_adapter_dtype=wide)
        if setting.method != "dora-peft":
            made = accelerate(made)
    for name, p in made.named_parameters():
        if "lora_magnitude_vector" in name:
            p.data = p.data.float()
    if setting.kbit_upcast:
        _upcast(made)
    return made


def _upcast(model: nn.Module) -> None:
    packed = {id(p) for p in in_nf4(model)}
    for p in model.parameters():
        if not p.requires_grad and id(p) not in packed:
            p.data = p.data.float()


def in_nf4(model: Any) -> list[Tensor]:
    """The weights that bitsandbytes would quantise: of all linears but the output head."""
    head = model.get_output_embeddings()
    linears = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    return [linear.weight for linear in linears if not linear.weight.requires_grad]


# The optimiser.


def optimizer_for(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """As `hirank train` makes it; with int8 weights it changes the model."""
    if setting.is_low_rank:
        return _low_rank(setting, model)
    params = [p for p in model.parameters() if p.requires_grad]
    if setting.optimizer == "sgd":
        return torch.optim.SGD(params, lr=1e-3, **_ways(setting))
    if setting.state_dtype == "int8":
        return _adamw_8bit(params)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0, **_ways(setting))


def _ways(setting: Setting) -> dict[str, Any]:
    return {"fused": setting.step == "fused", "foreach": setting.step == "foreach"}


def _adamw_8bit(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        optim: Any = importlib.import_module("bitsandbytes.optim")
    except ImportError as error:
        raise HirankError(
            "state_dtype int8 is bitsandbytes' AdamW8bit, which is not installed; install "
            "hirank[quant], or use the closed form."
        ) from error
    made: torch.optim.Optimizer = optim.AdamW8bit(params, lr=1e-3)
    return made


def _low_rank(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    from hirank.optim import presets
    from hirank.optim.groups import EXCLUDED, model_groups

    preset: Any = getattr(presets, _PRESETS[setting.method])
    hyper = replace(preset.settings, rank=setting.rank)
    if setting.state_dtype != "fp32":
        hyper = replace(hyper, state=setting.state_dtype)
    if setting.base_dtype == "bf16":
        hyper = replace(hyper, weight_rounding="stochastic")
    outside = [*EXCLUDED, *_not_meant(model, setting.targets)]
    made: torch.optim.Optimizer = preset(model_groups(model, hyper, outside), **asdict(hyper))
    return made


def _not_meant(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Names of matrices that no target is part of."""
    if isinstance(targets, str):
        return []
    names = (name for name, p in model.named_parameters() if p.dim() > 1)
    return [name for name in names if not any(t in name.rpartition(".")[0] for t in targets)]


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that an optimiser keeps."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in kept if isinstance(value, Tensor)]

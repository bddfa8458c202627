"""Small models with several adapters, and what one of them means in fp64."""

from peft import LoraConfig
from torch import nn
from transformers.pytorch_utils import Conv1D

import hirank
from adapters.layer_kinds import apply, effective, kernel, parts_of
from adapters.setups import layer_of, perturb, stock


def config_of(base, **config):
    turned = isinstance(base.lin, Conv1D)
    return {"target_modules": ["lin"], "fan_in_fan_out": turned, "use_dora": True, **config}


def several(base):
    """A model with adapters `default`, `b`, `c`: DoRA of ranks 4 and 8, LoRA of rank 4."""
    model = stock(base, **config_of(base))
    for name, r, dora in (("b", 8, True), ("c", 4, False)):
        model.add_adapter(name, LoraConfig(r=r, lora_alpha=5, **config_of(base, use_dora=dora)))
    return hirank.accelerate(perturb(model)).eval()


def meaning(model, name, x):
    """Samples with one adapter, or with none, in fp64."""
    layer = layer_of(model)
    parts = parts_of(layer, "default" if name == "__base__" else name)
    if isinstance(parts.base, nn.Linear):
        bias = parts.bias.double()
        if name == "__base__":
            return x.double() @ parts.weight.T + bias
        full = parts.weight + parts.scale * parts.B @ parts.A
        gain = 1.0 if parts.m is None else (parts.m / full.norm(dim=1))[:, None]
        return x.double() @ (gain * full).T + bias
    return apply(parts, kernel(parts) if name == "__base__" else effective(parts), x)

"""The small models of the adapter tests."""

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import hirank


class Lin(nn.Module):
    """One linear layer named `lin`."""

    def __init__(self, i: int, o: int, bias: bool = True) -> None:
        super().__init__()
        self.lin = nn.Linear(i, o, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def stock(base: nn.Module, **config: Any) -> PeftModel:
    """PEFT's own model; r = 4, alpha = 8, DoRA on `lin` unless told otherwise."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["lin"], "use_dora": True}
    return get_peft_model(base, LoraConfig(**(settings | config)))


def wrap(base: nn.Module, **config: Any) -> PeftModel:
    """The same, converted."""
    return hirank.accelerate(stock(base, **config))


def perturb(model: nn.Module, size: float = 0.05, seed: int = 7) -> nn.Module:
    """Move A, B and m off their initial values, so that B is not 0 and g is not 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(size * torch.randn(p.shape, generator=draw).to(p))
    return model


def pair(base: nn.Module, **config: Any) -> tuple[PeftModel, PeftModel]:
    """Stock PEFT and its converted twin, perturbed alike."""
    ours = perturb(stock(base, **config))
    return copy.deepcopy(ours), hirank.accelerate(ours)


def layer_of(model: nn.Module) -> Any:
    """The first adapted layer."""
    from peft.tuners.lora import LoraLayer

    return next(m for m in model.modules() if isinstance(m, LoraLayer))


def factors(layer: Any, name: str = "default") -> tuple[Tensor, Tensor, Tensor, float]:
    """A, B, m in fp64 and s."""
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    m = layer.lora_magnitude_vector[name].weight
    return A.detach().double(), B.detach().double(), m.detach().double(), layer.scaling[name]


def merged_weight(layer: Any, name: str = "default", base: Tensor | None = None) -> Tensor:
    """REF: m (W + s BA) / ||W + s BA||, in fp64."""
    A, B, m, s = factors(layer, name)
    weight = (layer.get_base_layer().weight if base is None else base).detach().double()
    full = weight + s * B @ A
    return m[:, None] * full / full.norm(dim=1, keepdim=True)


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """REF applied to the input, in fp64."""
    layer = layer_of(model)
    bias = layer.get_base_layer().bias
    out = x.double() @ merged_weight(layer).T
    return out if bias is None else out + bias.detach().double()


def norm_in_use(layer: Any, name: str = "default") -> Tensor:
    """The norm the layer's next forward would use."""
    base = layer.base_layer.weight
    return layer._hirank_norms[name].norm(
        base, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], base.dtype
    )


def fresh_norm(layer: Any, name: str = "default") -> Tensor:
    """The norm by its definition, in fp64."""
    A, B, _, s = factors(layer, name)
    return (layer.base_layer.weight.detach().double() + s * B @ A).norm(dim=1)


def checkpoint(model, use_reentrant):
    """By the name Transformers 5.24 has for it, or by that of 5.17."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": use_reentrant})

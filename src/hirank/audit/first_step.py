"""The first step of an adapter, measured on a model with one batch instead of computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hirank.adapters.merge import Increment, merge_into
from hirank.audit.scaling import Setting, power_of

__all__ = ["first_steps", "increment_norm"]


def first_steps(
    model: nn.Module,
    settings: Sequence[Setting],
    batch: Mapping[str, Tensor],
    *,
    optimizer: str = "adamw",
    seed: int = 0,
) -> list[float]:
    """|dW| over all adapted layers after one step, in the Frobenius norm, one for each setting.

    Args:
        model: a Transformers model; `model(**batch).loss` is what is trained. Adapters are put on
            all its linear layers and taken off again, its weights stay as they are.
        settings: with their learning rates.
        batch: on the model's device.
        optimizer: SGD is torch's; every other is stood in for by torch's AdamW.
        seed: of A.
    """
    return [_first_step(model, setting, batch, optimizer, seed) for setting in settings]


def _first_step(
    model: Any, setting: Setting, batch: Mapping[str, Tensor], optimizer: str, seed: int
) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = _adapted(model, setting)
        try:
            adapted(**batch).loss.backward()
            _optimizer(adapted, setting, power_of(optimizer)).step()
            return increment_norm(adapted, setting.scale)
        finally:
            adapted.unload()


def _adapted(model: Any, setting: Setting) -> Any:
    """With hirank's layers, whose magnitudes are the norms to the last bit: g is 1 at the start."""
    from peft import LoraConfig, get_peft_model

    from hirank.adapters.peft import accelerate, patch_peft

    config = LoraConfig(
        r=setting.rank,
        lora_alpha=cast("int", setting.alpha),  # PEFT takes any number
        use_rslora=setting.rslora,
        use_dora=setting.dora,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with patch_peft():
        return accelerate(get_peft_model(model, config))


def _optimizer(model: nn.Module, setting: Setting, power: int) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    slow = [p for name, p in trained if "lora_A" in name]
    fast = [p for name, p in trained if "lora_A" not in name]
    groups: list[dict[str, Any]] = [
        {"params": slow},
        {"params": fast, "lr": setting.lr * setting.b_ratio},
    ]
    if power == 2:
        return torch.optim.SGD(groups, lr=setting.lr)
    return torch.optim.AdamW(groups, lr=setting.lr, weight_decay=0)


@torch.no_grad()
def increment_norm(model: nn.Module, scale: float) -> float:
    """Frobenius norm of g (W + s B A) - W over all adapted layers, in fp64."""
    from hirank.adapters.peft.operands import magnitude_of, norm_inputs, present

    total = 0.0
    for layer in _layers(model):
        for name in present(layer):
            weight, A, B = (part.detach().double() for part in norm_inputs(layer, name))
            part = Increment(A, B, magnitude_of(layer, name), scale)
            merged = merge_into(torch.empty_like(weight), weight, [part])
            total += float((merged - weight).square().sum())
    return math.sqrt(total)


def _layers(model: nn.Module) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]

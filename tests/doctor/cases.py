"""What the doctor's tests share: tiny adapters, and the register of cases.

A case walks into one trap, yields, does what the trap's fix says, and yields again.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import tiny_llama

Case = Callable[[Path], Iterator[dict[str, Any]]]
CASES: dict[str, tuple[Case, str, frozenset[str]]] = {}


def case(says: str, *, along: tuple[str, ...] = ()) -> Callable[[Case], Case]:
    """Register a case under its function's name: part of the evidence, other traps met with it."""

    def keep(function: Case) -> Case:
        name = function.__name__.replace("_", "-")
        CASES[name] = (function, says, frozenset(along))
        return function

    return keep


def wrap(base: nn.Module | None = None, **config: Any) -> PeftModel:
    """A two-layer Llama with an adapter on all linear layers, as PEFT makes it."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(tiny_llama() if base is None else base, LoraConfig(**settings | config))


def adamw(model: nn.Module, lr: float = 2e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def rows(count: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """A batch without padding, all of it learnt."""
    ids = torch.randint(3, 300, (count, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def named(model: nn.Module, part: str) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if part in name]


class Idle(nn.Module):
    """Two linear layers, of which one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.pooler = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def checkpointed(model: PeftModel, *, reentrant: bool) -> PeftModel:
    """Gradient checkpointing switched on, by the name that Transformers has for it."""
    base = model.base_model.model
    name = "activation_checkpointing_enable"
    enable = getattr(base, name, base.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    return model


def reentrant() -> PeftModel:
    model = checkpointed(wrap(), reentrant=True)
    model.disable_input_require_grads()
    return model


def trained(**config: Any) -> PeftModel:
    """An adapter whose B is not zero."""
    model = wrap(**config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in named(model, "lora_"):
            p.add_(0.02 * torch.randn(p.shape, generator=draw))
    return model


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({key: change(key, weight) for key, weight in load_file(path).items()}, path)

"""GaLore and its kind as methods of a run: their settings, their optimiser, int8 weights on disk.

All weights are trained. Matrices are projected, but for embeddings, the output head and what
method.target_modules leaves out; those, norms and biases get plain AdamW with the same `optim.lr`,
which `method.scale` does not multiply.

bf16 weights are rounded stochastically: to the nearest, most steps of fine-tuning would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError
from hirank.optim.hyper import Hyper

if TYPE_CHECKING:
    from hirank.optim.optimizer import LowRankAdamW
    from hirank.train.method import MethodConfig
    from hirank.train.optim import OptimConfig

__all__ = [
    "CHOICES",
    "INT8_FILE",
    "build",
    "check",
    "choices",
    "facts",
    "load_int8",
    "plain_weights",
    "refuse_processes",
    "save_int8",
    "skipped",
]

CHOICES = (
    "gap", "scale", "sides", "basis", "basis_store", "moments", "state", "weights", "scale_by",
    "limiter", "lazy", "lazy_patience", "lazy_growth", "stagger",
)  # fmt: skip
"""Settings under `method` that are fields of `Hyper`."""

INT8_FILE = "int8_weights.safetensors"

# Settings.


def choices(config: MethodConfig) -> dict[str, Any]:
    """Every one of CHOICES with its value: what is set, else what the method's paper has."""
    hyper = _hyper(config)
    return {name: getattr(hyper, name) for name in CHOICES if _is_open(config, name)}


def _is_open(config: MethodConfig, name: str) -> bool:
    """scale_by has a meaning for apollo only; elsewhere its value is no setting."""
    return name != "scale_by" or _preset(config).settings.scale_by != "element"


def _hyper(config: MethodConfig) -> Hyper:
    usual = _preset(config).settings
    given = {name: value for name in CHOICES if (value := getattr(config, name)) is not None}
    if given.get("basis", "random") not in ("random", "gaussian"):
        given.setdefault(
            "basis_store", "fp32" if usual.basis_store == "seed" else usual.basis_store
        )
    return replace(usual, rank=config.r, **given)


def _preset(config: MethodConfig) -> type[LowRankAdamW]:
    from hirank.optim import presets

    found: type[LowRankAdamW] = getattr(presets, str(config.method.optimizer))
    return found


# Checks.


def check(model: Any, config: MethodConfig) -> None:
    """Raise HirankError if settings exclude each other or nothing of the model is projected."""
    from hirank.optim.groups import model_groups

    _hyper(config)
    names = [name for name, _ in model.named_modules() if name]
    targets = config.target_modules
    for target in targets if isinstance(targets, list) else []:
        if not target or not any(target in name for name in names):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1)
            hint = f"; the nearest known one is {near[0]}" if near else ""
            raise HirankError(
                f"method.target_modules names {target!r}, which is part of no layer's name{hint}."
            )
    groups = model_groups(model, Hyper(rank=config.r), _excluded(model, targets))
    if not any(group["rank"] for group in groups):
        raise HirankError(
            f"method.target_modules {targets!r} leaves no matrix to project; use all-linear, or "
            "method.name=full for plain AdamW."
        )


def refuse_processes(args: Any, config: MethodConfig) -> None:
    """Raise HirankError for DeepSpeed ZeRO, and for several processes if it steps in backward.

    Args:
        args: Transformers' TrainingArguments.
    """
    if getattr(args, "deepspeed_plugin", None) is not None or getattr(args, "deepspeed", None):
        raise HirankError(
            f"method.name={config.name} cannot run under DeepSpeed ZeRO, which flattens the "
            "matrices it projects; start the run without DeepSpeed."
        )
    if config.step_in_backward and args.world_size > 1:
        raise HirankError(
            f"method.step_in_backward moves weights before {args.world_size} processes have shared "
            "their gradients; set it to false, or use one process."
        )


# The optimiser.


def build(model: Any, method: MethodConfig, optim: OptimConfig) -> LowRankAdamW:
    """The optimiser of a (resolved) configuration; with int8 weights it changes the model."""
    import torch

    from hirank.optim.groups import model_groups

    hyper = replace(
        _hyper(method),
        lr=optim.lr or method.method.learning_rate,
        betas=(optim.beta1, optim.beta2),
        weight_decay=optim.weight_decay,
        seed=optim.seed,
    )
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        hyper = replace(hyper, weight_rounding="stochastic")
    groups = model_groups(model, hyper, _excluded(model, method.target_modules))
    return _preset(method)(groups, **asdict(hyper))


def _excluded(model: Any, targets: str | list[str]) -> list[str]:
    """Parts of the names of matrices that get plain AdamW."""
    from hirank.optim.groups import EXCLUDED

    if targets == "all-linear":
        return list(EXCLUDED)
    names = (name for name, p in model.named_parameters() if p.dim() > 1)
    return [*EXCLUDED, *(n for n in names if not _is_meant(n.rpartition(".")[0], targets))]


def _is_meant(layer: str, targets: str | Iterable[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(target in layer for target in targets)


def facts(optimizer: LowRankAdamW) -> dict[str, Any]:
    """What a log should know of it: class, parameters projected and not, bytes of state."""
    projected = optimizer.projected()
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "class": type(optimizer).__name__,
        "text": optimizer.describe(),
        "projected": len(projected),
        "plain": len(every) - len(projected),
        "projected_params": sum(p.numel() for p in projected),
        "plain_params": sum(p.numel() for p in every) - sum(p.numel() for p in projected),
        "state_bytes": optimizer.cost(),
    }


def skipped(optimizer: LowRankAdamW) -> int:
    """Steps of single parameters that were left out for a gradient that was not finite."""
    return sum(group["skipped"] for group in optimizer.param_groups)


# int8 weights on disk.


def plain_weights(model: Any) -> dict[str, Any] | None:
    """The state dict with int8 weights widened, on the CPU; None if there are none."""
    from hirank.optim.weights import Int8Weight

    # a state dict detaches, which leaves them int8
    found = model.state_dict()
    if not any(isinstance(value, Int8Weight) for value in found.values()):
        return None
    return {
        name: value.widened().cpu() if isinstance(value, Int8Weight) else value
        for name, value in found.items()
    }


def save_int8(model: Any, folder: Path) -> None:
    """Write the exact codes of int8 weights beside the plain weights, if there are any."""
    from safetensors.torch import save_file

    from hirank.optim.weights import int8_weights

    codes = int8_weights(model)
    if codes:
        save_file(codes, folder / INT8_FILE)


def load_int8(model: Any, folder: Path) -> None:
    """Put the codes that `save_int8` wrote back into the model, bit for bit."""
    from safetensors.torch import load_file

    from hirank.optim.weights import int8_weights

    codes = int8_weights(model)
    kept = load_file(folder / INT8_FILE) if codes else {}
    for name, part in codes.items():
        part.copy_(kept[name])

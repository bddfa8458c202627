"""Which linear layers a setting means, and what they are in when they compute."""

from __future__ import annotations

import re
from difflib import get_close_matches

from hirank.errors import HirankError
from hirank.plan.inventory import Matrix, Shape
from hirank.plan.setting import BYTES, Setting

__all__ = [
    "adapted",
    "adapts_experts",
    "compute_bytes",
    "recasts",
    "stream_bytes",
    "trained_bytes",
    "whole_bytes",
]


def adapted(setting: Setting, shape: Shape) -> tuple[Matrix, ...]:
    """The linears of a block that get an adapter, or whose gradients are projected.

    Raises:
        HirankError: the targets name a layer that there is not, or leave none.
    """
    targets = setting.targets
    if targets == "all-linear":
        return shape.linears
    names = [matrix.name for matrix in shape.linears]
    if isinstance(targets, str):
        found = tuple(m for m in shape.linears if _fits(targets, m.name))
    else:
        _check_known(targets, names, shape)
        found = tuple(m for m in shape.linears if m.name in {t.split(".")[-1] for t in targets})
    if not found:
        raise HirankError(
            f"The targets {targets!r} match no linear layer of {shape.name}, which has "
            f"{', '.join(names)}."
        )
    return found


def _fits(pattern: str, name: str) -> bool:
    part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return any(
        re.fullmatch(pattern, one)
        for one in (name, f"model.layers.0.{part}.{name}", f"layers.0.{part}.{name}")
    )


def _check_known(targets: tuple[str, ...], names: list[str], shape: Shape) -> None:
    for target in targets:
        if target.split(".")[-1] not in names:
            near = get_close_matches(target, names, n=1)
            hint = f"; the nearest known one is {near[0]}" if near else ""
            raise HirankError(
                f"The target {target!r} is no linear layer of {shape.name}, which has "
                f"{', '.join(names)}{hint}."
            )


def adapts_experts(setting: Setting, shape: Shape) -> bool:
    """Whether PEFT adapts experts and router too: under all-linear, and not for DoRA."""
    wanted = setting.targets == "all-linear" and setting.is_adapter and not setting.has_gains
    return bool(shape.experts) and wanted


def compute_bytes(setting: Setting) -> int:
    """Of a number that a linear layer puts out."""
    return 2 if setting.autocast or setting.is_quantised else BYTES[setting.base_dtype]


def stream_bytes(setting: Setting) -> int:
    """Of a number of the residual stream, which begins with the embedding."""
    return 4 if setting.kbit_upcast else whole_bytes(setting)


def whole_bytes(setting: Setting) -> int:
    """Of a base weight where it computes: weights that are split are put together in 16 bits."""
    return 2 if setting.shards > 1 and setting.autocast else trained_bytes(setting)


def recasts(setting: Setting) -> bool:
    """Whether autocast makes 16-bit copies of base weights."""
    return setting.autocast and whole_bytes(setting) == 4


def trained_bytes(setting: Setting) -> int:
    """Of a base weight that is not quantised, and of its gradient where it is trained."""
    return 2 if setting.is_quantised else BYTES[setting.base_dtype]

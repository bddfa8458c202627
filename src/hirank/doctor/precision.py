"""Traps of half precision: steps too small to be stored, and where numbers must not be narrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hirank.doctor.gradients import peak
from hirank.doctor.layers import Adapted, is_quantised
from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap

__all__ = [
    "fp16_weights_with_scaler",
    "half_magnitude",
    "half_magnitude_on_quantised_base",
    "lost_share",
    "updates_round_away",
    "weights_not_finite",
    "zero_rows",
]

HALF = (torch.bfloat16, torch.float16)
SAMPLED = 2**20  # entries of a weight looked at
TOO_MANY = 0.1  # of the entries


def lost_share(weight: Tensor, step: float) -> float:
    """Share of the entries of `weight` that a step up or down of this size would not change."""
    flat = weight.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLED)]
    stays = [(flat.float() + move).to(flat.dtype) == flat for move in (step, -step)]
    return sum(float(same.float().mean()) for same in stays) / 2


@trap(
    "error",
    "Updates are too small for the precision of the weights and round to nothing",
    fix="Keep trained weights in float32: .float() on them, or autocast_adapter_dtype=True.",
    source="trl#7268, trl#7272, trl#7273, trl#7286, trl#7296",
)
def updates_round_away(subject: Subject) -> str | None:
    """Adam moves an entry by about the learning rate, whatever its gradient.

    In bf16 an entry x is stored to 8 bits, so a step below x / 512 leaves it as it was. Judged by
    adding that step to each entry. Optimizers with weights of their own are not judged.
    """
    shares: dict[str, list[tuple[float, int]]] = {}
    lr = 0.0
    for name, weight, step in _adam_steps(subject):
        if weight.dtype in HALF and not weight.is_meta and weight.numel():
            shares.setdefault(_kind(name), []).append((lost_share(weight, step), weight.numel()))
            lr = max(lr, step)
    told = [f"{share:.0%} of the entries of {kind}" for kind, share in _lost(shares)]
    return f"a step of {lr:g} changes nothing in {', '.join(told)}" if told else None


def _lost(shares: dict[str, list[tuple[float, int]]]) -> Iterator[tuple[str, float]]:
    for kind, found in shares.items():
        share = sum(lost * n for lost, n in found) / sum(n for _, n in found)
        if share > TOO_MANY:
            yield kind, share


def _kind(name: str) -> str:
    kinds = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    return next((kind for kind in kinds if f".{kind}" in name), "the other trained weights")


def _adam_steps(subject: Subject) -> Iterator[tuple[str, Tensor, float]]:
    """(name, weight, size of a step) of all that an Adam without weights of its own will move."""
    optimizer, settings = subject.optimizer, subject.settings
    if optimizer is None:
        if settings.lr and not settings.deepspeed:
            weights = {**subject.trainable, **subject.samples}
            yield from ((name, p, settings.lr) for name, p in weights.items())
        return
    if not type(optimizer).__module__.startswith(("torch.optim", "bitsandbytes")):
        return
    names = {id(p): name for name, p in subject.trainable.items()}
    for group in optimizer.param_groups:
        for p in group["params"] if "betas" in group else ():
            if id(p) in names:
                yield names[id(p)], p, peak(group)


@trap(
    "warning",
    "DoRA magnitudes are in half precision",
    fix="Make them float32 again: .float() on every lora_magnitude_vector weight.",
    source="trl#7268, trl#7272, trl#7273, trl#7286, trl#7296",
)
def half_magnitude(subject: Subject) -> str | None:
    """m is near the norm of a row and moves by small fractions of itself."""
    found = [e for e in _half_magnitudes(subject) if not is_quantised(e.base)]
    return _spacing(found) if found else None


@trap(
    "error",
    "DoRA magnitudes on a quantised base are in half precision and hardly move",
    fix="Leave magnitudes out when casting the adapter, or .float() them afterwards.",
    source="trl#7268, trl#7286 (QLoRA scripts cast all trainable weights to bf16)",
)
def half_magnitude_on_quantised_base(subject: Subject) -> str | None:
    """QLoRA recipes cast everything trainable; with DoRA that includes m."""
    found = [e for e in _half_magnitudes(subject) if is_quantised(e.base)]
    return _spacing(found) if found else None


def _half_magnitudes(subject: Subject) -> list[Adapted]:
    return [e for e in subject.adapted if e.dora and _magnitude(e).dtype in HALF]


def _magnitude(entry: Adapted) -> Tensor:
    return entry.parts["lora_magnitude_vector"]


def _spacing(found: list[Adapted]) -> str:
    dtype = _magnitude(found[0]).dtype
    least = torch.finfo(dtype).eps
    return (
        f"{len(found)} layers store it as {str(dtype).removeprefix('torch.')}, whose neighbouring "
        f"numbers are up to {least:.2%} apart: {several(e.name for e in found)}"
    )


@trap(
    "error",
    "A gradient scaler refuses fp16 weights: 'Attempting to unscale FP16 gradients'",
    fix="Keep trained weights in float32 and let autocast do fp16, or train in bf16.",
    source="peft#341, axolotl#1031, diffusers#6442",
)
def fp16_weights_with_scaler(subject: Subject) -> str | None:
    """GradScaler works with float32 weights under autocast; fp16 weights have fp16 gradients."""
    scaling = subject.scaler is not None and subject.scaler.is_enabled()
    if not (scaling or subject.settings.fp16):
        return None
    found = [name for name, p in subject.trainable.items() if p.dtype == torch.float16]
    return f"{len(found)} trained weights are float16: {several(found)}" if found else None


@trap(
    "error",
    "Adapter weights hold NaN or infinity",
    fix="Load a checkpoint from before the training diverged.",
    source="peft#2049",
)
def weights_not_finite(subject: Subject) -> str | None:
    """One NaN in A, B or m makes each output NaN."""
    bad = [
        f"{entry.name}.{part}"
        for entry in subject.adapted
        for part, weight in entry.parts.items()
        if not weight.is_meta and not bool(torch.isfinite(weight).all())
    ]
    return f"{len(bad)} weights: {several(bad)}" if bad else None


@trap(
    "error",
    "PEFT's DoRA divides by zero: the base weight has rows that are all zero",
    fix="Call hirank.accelerate(model), or leave these layers out of target_modules.",
    source="peft#2049, peft#3237 (Llama-3.1 o_proj, Qwen3.5-MoE in_proj_qkv)",
)
def zero_rows(subject: Subject) -> str | None:
    """With B = 0 the norm of such a row is 0, and its gain 0 / 0. hirank's layers define it."""
    rows = {e.name: _zero_rows(e) for e in subject.active if e.dora and not e.ours}
    bad = {name: count for name, count in rows.items() if count}
    if not bad:
        return None
    return f"{sum(bad.values())} rows in {len(bad)} layers: {several(bad)}"


def _zero_rows(entry: Adapted) -> int:
    """Rows of a linear layer where base and B are both zero, and so the norm is."""
    base: Any = entry.base
    B = entry.parts["lora_B"]
    if type(base) is not nn.Linear or is_quantised(base) or base.weight.is_meta or B.is_meta:
        return 0
    if base.weight.dim() != 2 or base.weight.shape[0] != B.shape[0]:
        return 0  # sharded
    moved = base.weight.any(dim=1) | B.any(dim=1)
    return int((~moved).sum())

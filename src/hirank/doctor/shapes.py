"""Traps of rank and scale."""

from __future__ import annotations

from hirank.doctor.layers import Adapted
from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap

__all__ = ["adapter_larger_than_layer", "rank_above_layer", "scale_disagrees", "scale_far_off"]

USUAL_SCALES = (1 / 16, 8)


def _size(entry: Adapted) -> str:
    return f"{entry.name} {entry.rows}x{entry.columns}"


@trap(
    "warning",
    "The rank is above what a layer can use",
    fix="Set r to the smaller side of these layers with rank_pattern, or leave them out.",
    source="linear algebra: a matrix has no more rank than its smaller side; k_proj of GQA models",
)
def rank_above_layer(subject: Subject) -> str | None:
    """B A of an out x in layer cannot have more rank than min(out, in)."""
    over = [e for e in subject.active if e.whole and e.rank > min(e.rows, e.columns)]
    if not over:
        return None
    least = min(min(e.rows, e.columns) for e in over)
    return (
        f"rank {max(e.rank for e in over)} on {len(over)} layers whose smaller side is {least} "
        f"or more: {several(map(_size, over))}"
    )


@trap(
    "warning",
    "The adapter has more numbers than the layer it adapts",
    fix="Lower r for these layers (rank_pattern), or train them whole (modules_to_save).",
    source="arithmetic: r (in + out) against in x out",
)
def adapter_larger_than_layer(subject: Subject) -> str | None:
    """Above r = in out / (in + out) full training of the layer is smaller."""
    over = [
        e
        for e in subject.active
        if e.whole
        and e.rank <= min(e.rows, e.columns)
        and e.rank * (e.rows + e.columns) > e.rows * e.columns
    ]
    if not over:
        return None
    worst = max(over, key=lambda e: e.rank * (e.rows + e.columns) / (e.rows * e.columns))
    adapter, layer = worst.rank * (worst.rows + worst.columns), worst.rows * worst.columns
    return f"{len(over)} layers, such as {_size(worst)}: {adapter:,} numbers for {layer:,}"


@trap(
    "warning",
    "The scale of the adapter is far from any usual one",
    fix="Set lora_alpha to about 2 r (LoRA, DoRA), or to about 2 sqrt(r) with use_rslora.",
    source="surogate#173, adapters#770, mlx-vlm#841, mflux#449 (alpha taken for alpha / r)",
)
def scale_far_off(subject: Subject) -> str | None:
    """The scale is alpha / r, with rsLoRA alpha / sqrt(r); usual are 1/16 to 8."""
    least, most = USUAL_SCALES
    off = [e for e in subject.active if not least <= e.scale <= most]
    if not off:
        return None
    entry = off[0]
    root = subject.adapter_settings.get(entry.adapter)
    form = "alpha / sqrt(r)" if getattr(root, "use_rslora", False) else "alpha / r"
    return (
        f"{form} is {entry.scale:.4g} on {len(off)} layers, with alpha {entry.alpha:g} and "
        f"r {entry.rank}: {several(e.name for e in off)}"
    )


@trap(
    "error",
    "The scale in use is not what the adapter's settings say",
    fix="Load the adapter again, or call set_scale(adapter, 1); settings do not follow set_scale.",
    source="peft#2733, mlx-vlm#986, diffusers#14409",
)
def scale_disagrees(subject: Subject) -> str | None:
    """set_scale, or use_rslora changed after loading; what is saved will compute another thing."""
    off = []
    for entry in subject.adapted:
        config = subject.adapter_settings.get(entry.adapter)
        if config is not None:
            power = 0.5 if config.use_rslora else 1.0
            meant = entry.alpha / entry.rank**power
            if abs(entry.scale - meant) > 1e-6 * abs(meant):
                off.append((entry, meant))
    if not off:
        return None
    entry, meant = off[0]
    return (
        f"{len(off)} layers, such as {entry.name}: {entry.scale:.4g} in use, {meant:.4g} by alpha "
        f"{entry.alpha:g} and r {entry.rank}"
    )

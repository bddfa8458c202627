"""Traps in the state an adapter is left in: merged, switched, cached, not loaded."""

from __future__ import annotations

import torch

from hirank.doctor.layers import dora_caching
from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap

__all__ = [
    "adapter_on_meta",
    "dora_without_magnitude",
    "dropout_in_eval",
    "dropout_second_gemm",
    "factors_both_zero",
    "inactive_trainable",
    "magnitude_frozen",
    "merged_while_training",
    "several_trained_at_once",
    "stale_dora_cache",
]


@trap(
    "error",
    "Adapters are merged: they take no part in the forward and get no gradient",
    fix="Call model.unmerge_adapter() before training.",
    source="PEFT: a merged layer runs its base layer alone",
)
def merged_while_training(subject: Subject) -> str | None:
    """Left over from an evaluation or an export."""
    merged = [entry.name for entry in subject.adapted if entry.merged]
    return f"{len(merged)} layers: {several(merged)}" if merged else None


@trap(
    "warning",
    "Several adapters are trained at once",
    fix="Call model.set_adapter(NAME): it freezes the others.",
    source="peft#2749, peft#2759",
)
def several_trained_at_once(subject: Subject) -> str | None:
    """All active adapters shape the output and get gradients, also those of other tenants."""
    names = dict.fromkeys(entry.adapter for entry in subject.active if entry.trained)
    return f"active and trainable: {', '.join(names)}" if len(names) > 1 else None


@trap(
    "warning",
    "Adapters that are switched off are still trainable",
    fix="Freeze them: model.set_requires_grad(NAME, requires_grad=False).",
    source="peft#899, peft#2759, peft#3580",
)
def inactive_trainable(subject: Subject) -> str | None:
    """They get no gradient, but weight decay moves them, and DDP waits for them."""
    idle = [entry for entry in subject.adapted if entry.trained and not entry.active]
    if not idle:
        return None
    where = several(entry.name for entry in idle)
    return f"{several(entry.adapter for entry in idle)} on {len(idle)} layers: {where}"


@trap(
    "warning",
    "PEFT's DoraCaching is on: in eval mode it keeps norms of weights that have changed since",
    fix="Train and evaluate outside of peft.helpers.DoraCaching.",
    source="peft#2661; PEFT 0.21: nothing but another call clears the cache",
)
def stale_dora_cache(subject: Subject) -> str | None:
    """It knows nothing of set_scale, loading, or steps taken in eval mode. hirank's layers do."""
    layers = [e.name for e in subject.adapted if e.dora and not e.ours]
    if not layers or not dora_caching():
        return None
    return f"{len(layers)} layers of PEFT's use it: {several(layers)}"


@trap(
    "error",
    "Adapter weights are on the meta device: they have shapes and no values",
    fix="Load the adapter's weights, or create it with low_cpu_mem_usage=False.",
    source="peft#1961, peft#2113, peft#2156",
)
def adapter_on_meta(subject: Subject) -> str | None:
    """low_cpu_mem_usage promises that a checkpoint follows; here it did not."""
    if all(p.is_meta for p in subject.parameters.values()):
        return None  # a model without values, to look at shapes
    held = [entry for entry in subject.adapted if not entry.offloaded]
    ghosts = [entry.name for entry in held if any(p.is_meta for p in entry.parts.values())]
    return f"{len(ghosts)} of {len(subject.adapted)} layers: {several(ghosts)}" if ghosts else None


@trap(
    "error",
    "A and B are both zero: neither will ever get a gradient",
    fix="Initialise one of them (init_lora_weights=True), or load the checkpoint again.",
    source="arithmetic: the gradient of A holds a factor B, that of B a factor A",
)
def factors_both_zero(subject: Subject) -> str | None:
    """A checkpoint that was saved empty, or weights made by torch.zeros."""
    dead = [
        entry.name
        for entry in subject.adapted
        if entry.whole
        and not any(p.is_meta for p in entry.parts.values())
        and not entry.parts["lora_A"].any()
        and not entry.parts["lora_B"].any()
    ]
    return f"{len(dead)} of {len(subject.adapted)} layers: {several(dead)}" if dead else None


# DoRA.


@trap(
    "error",
    "The settings ask for DoRA, but layers have no magnitude",
    fix="Make the adapter with use_dora=True from the start; plain LoRA is trained now.",
    source="ludwig#3984, Megatron-Bridge#6031",
)
def dora_without_magnitude(subject: Subject) -> str | None:
    """use_dora was set after the layers were made, or somebody ignored it."""
    asked = [name for name, config in subject.adapter_settings.items() if config.use_dora]
    plain = [e.name for e in subject.adapted if e.adapter in asked and not e.dora]
    return f"{len(plain)} layers: {several(plain)}" if plain else None


@trap(
    "warning",
    "DoRA magnitudes are frozen while A and B are trained",
    fix="Set requires_grad on every lora_magnitude_vector weight.",
    source="torchtune#2250, torchtune#1903, torchtune#1909, torchtune#2139",
)
def magnitude_frozen(subject: Subject) -> str | None:
    """Loss curves of LoRA and DoRA look the same then."""
    frozen = [
        entry.name
        for entry in subject.adapted
        if entry.dora and entry.trained and not entry.parts["lora_magnitude_vector"].requires_grad
    ]
    return f"{len(frozen)} layers: {several(frozen)}" if frozen else None


# Dropout.


@trap(
    "warning",
    "Dropout makes PEFT's DoRA run the frozen layer twice",
    fix="Set lora_dropout to 0, or call hirank.accelerate(model, dropout='single-gemm').",
    source="peft#1474, peft#2153, peft#2371",
)
def dropout_second_gemm(subject: Subject) -> str | None:
    """With PEFT's meaning of dropout the frozen branch of DoRA sees the dropped input as well."""
    slow = [e for e in subject.active if e.dora and e.dropout[0] > 0 and not e.single_gemm]
    if not slow:
        return None
    work = sum(e.rows * e.columns for e in slow)
    return (
        f"lora_dropout {slow[0].dropout[0]:g} on {len(slow)} layers: {2 * work:,} more operations "
        "for each token"
    )


@trap(
    "warning",
    "Dropout is set, but the model is in eval mode",
    fix="Call model.train() before the first step.",
    source="transformers: from_pretrained returns a model in eval mode; transformers#24463",
)
def dropout_in_eval(subject: Subject) -> str | None:
    """Trainers switch to train mode by themselves, a loop of one's own does not."""
    if subject.optimizer is None or subject.settings.trainer or subject.model is None:
        return None
    dropouts = [m for m in subject.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    idle = [module for module in dropouts if not module.training]
    if not idle:
        return None
    return f"{len(idle)} of {len(dropouts)} dropouts do nothing, the first with p = {idle[0].p:g}"

"""Traps between the loss and the weights: who gets a gradient, and who is moved by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hirank.doctor.layers import is_adapter_weight, own_weight
from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap

__all__ = [
    "adapter_never_runs",
    "base_weights_trainable",
    "learning_rate_zero",
    "no_input_gradients",
    "nothing_trainable",
    "optimizer_holds_frozen",
    "optimizer_holds_strangers",
    "optimizer_misses_trainable",
    "unused_under_ddp",
]


@trap(
    "error",
    "Reentrant gradient checkpointing over frozen embeddings: no adapter gets a gradient",
    fix="Call model.enable_input_require_grads(), or checkpoint with use_reentrant=False.",
    source="peft#742, peft#313, trl#3089, optimum-neuron#634",
)
def no_input_gradients(subject: Subject) -> str | None:
    """A reentrant checkpoint whose inputs need no gradient returns outputs that need none.

    Whether they need one is tried out: one token goes through the embedding and its hooks.
    """
    reentrant = sum(map(_reentrant, subject.model.modules())) if subject.model else 0
    embedding: Any = _input_embedding(subject.model) if reentrant else None
    weight = own_weight(embedding)
    if weight is None or weight.dim() != 2 or type(weight.data) is not torch.Tensor:
        return None  # none, or sharded, and then it cannot be called on its own
    with torch.enable_grad():
        out = embedding(torch.zeros(1, 1, dtype=torch.long, device=weight.device))
    if out.requires_grad:
        return None
    return (
        f"{reentrant} modules checkpoint reentrantly, and what {type(embedding).__name__} returns "
        "for a token needs no gradient"
    )


def _input_embedding(model: nn.Module | None) -> Any:
    get = getattr(model, "get_input_embeddings", None)
    try:
        return None if get is None else get()
    except NotImplementedError:
        return None


def _reentrant(module: nn.Module) -> bool:
    """Whether a module is checkpointed by torch.utils.checkpoint without use_reentrant=False."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if function is None or not getattr(module, "gradient_checkpointing", False):
        return False
    asked = getattr(function, "keywords", {}).get("use_reentrant", True)
    return asked is not False


@trap(
    "error",
    "Nothing is trainable",
    fix="Load with PeftModel.from_pretrained(..., is_trainable=True), or call set_adapter.",
    source="peft#282, peft#1340, trl#6700",
)
def nothing_trainable(subject: Subject) -> str | None:
    """PEFT loads an adapter for inference unless it is told otherwise."""
    if subject.model is None or subject.trainable:
        return None
    return f"none of {len(subject.parameters)} parameters requires a gradient"


@trap(
    "error",
    "Base weights are trained beside the adapter, and will not be saved with it",
    fix="Freeze them before training, or name their modules in modules_to_save.",
    source="peft#282; PEFT saves adapter weights and modules_to_save only",
)
def base_weights_trainable(subject: Subject) -> str | None:
    """Somebody set requires_grad on the whole model after wrapping it.

    Biases are meant if the adapter's `bias` setting says so.
    """
    if not subject.adapted:
        return None
    biases = any(c.bias != "none" for c in subject.adapter_settings.values())
    stray = [
        name
        for name in subject.trainable
        if not is_adapter_weight(name) and not (biases and name.endswith("bias"))
    ]
    if not stray:
        return None
    count = sum(subject.trainable[name].numel() for name in stray)
    return f"{count:,} numbers in {len(stray)} weights: {several(stray)}"


# The optimizer.


def _held(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


@trap(
    "error",
    "Trainable weights are not in the optimizer",
    fix="Make the optimizer after the adapter, from [p for p in model.parameters() if "
    "p.requires_grad].",
    source="torchtune#2250, torchtune#1903 (magnitudes left out), peft#1303",
)
def optimizer_misses_trainable(subject: Subject) -> str | None:
    """What no parameter group holds keeps its first value, such as DoRA's magnitudes."""
    if subject.optimizer is None or subject.model is None:
        return None
    held = set(map(id, _held(subject.optimizer)))
    missing = [name for name, p in subject.trainable.items() if id(p) not in held]
    if not missing:
        return None
    return f"{len(missing)} of {len(subject.trainable)} trainable weights: {several(missing)}"


@trap(
    "error",
    "The optimizer moves weights that the model no longer has",
    fix="Make the optimizer last: after get_peft_model, .to(), and loading.",
    source="peft#3614 (PEFT 0.21 replaces parameters when it casts an adapter to fp32)",
)
def optimizer_holds_strangers(subject: Subject) -> str | None:
    """Wrapping, casting and loading may replace Parameter objects; the optimizer keeps the old."""
    if subject.optimizer is None or subject.model is None:
        return None
    known = {id(p) for p in subject.model.parameters()}
    held = list(_held(subject.optimizer))
    strange = [tuple(p.shape) for p in held if id(p) not in known]
    if not strange:
        return None
    return f"{len(strange)} of {len(held)} weights, of shapes {several(map(str, strange))}"


@trap(
    "warning",
    "The optimizer holds frozen weights",
    fix="Give it only weights that require gradients.",
    source="peft#1303 (an optimizer made before the adapters were switched)",
)
def optimizer_holds_frozen(subject: Subject) -> str | None:
    """Often a sign that something was frozen by accident after the optimizer was made."""
    if subject.optimizer is None or subject.model is None:
        return None
    held = set(map(id, _held(subject.optimizer)))
    frozen = [n for n, p in subject.parameters.items() if id(p) in held and not p.requires_grad]
    return f"{len(frozen)} weights: {several(frozen)}" if frozen else None


@trap(
    "error",
    "The learning rate is zero",
    fix="Set a learning rate; 2e-4 is usual for adapters.",
    source="torch.optim: param_groups[i]['lr'], initial_lr",
)
def learning_rate_zero(subject: Subject) -> str | None:
    """A schedule that starts at zero is fine: its peak is in the group's initial_lr."""
    if subject.settings.lr == 0:
        return "the configuration says 0"
    if subject.optimizer is None:
        return None
    groups = subject.optimizer.param_groups
    still = [g for g in groups if peak(g) == 0 and any(p.requires_grad for p in g["params"])]
    if not still:
        return None
    return f"{len(still)} of {len(groups)} parameter groups, {_count(still):,} numbers in them"


def peak(group: dict[str, Any]) -> float:
    """The learning rate of a parameter group that its schedule scales."""
    return float(group.get("initial_lr", group["lr"]))


def _count(groups: list[dict[str, Any]]) -> int:
    return sum(p.numel() for group in groups for p in group["params"])


# Weights without a gradient.


@trap(
    "error",
    "DistributedDataParallel waits for gradients that never come",
    fix="Freeze what is not used (model.set_adapter), or find_unused_parameters=True.",
    source="peft#899, peft#951, peft#393",
)
def unused_under_ddp(subject: Subject) -> str | None:
    """Each trainable weight must take part in each step, unless DDP is told to look."""
    if subject.processes < 2 or _ddp_looks(subject):
        return None
    idle = [f"{e.name} ({e.adapter})" for e in subject.adapted if e.trained and not e.active]
    ran = subject.ran
    idle += [e.name for e in subject.active if ran is not None and e.trained and e.name not in ran]
    if not idle:
        return None
    return f"{subject.processes} processes, {len(idle)} adapters without gradients: {several(idle)}"


def _ddp_looks(subject: Subject) -> bool:
    said = subject.settings.find_unused_parameters
    told = getattr(subject.wrapped, "find_unused_parameters", said)
    return bool(told) or (told is None and subject.settings.trainer)  # trainers look, for PEFT


@trap(
    "warning",
    "Adapters sit on layers that never run",
    fix="Name only the layers that run in target_modules, or exclude the others.",
    source="peft#951 (a pooler whose output nobody uses)",
)
def adapter_never_runs(subject: Subject) -> str | None:
    """They are saved as they were initialised, and cost memory in the optimizer."""
    ran = subject.ran
    if ran is None:
        return None
    idle = [e.name for e in subject.active if e.trained and e.name not in ran]
    return f"{len(idle)} of {len(subject.active)} for this batch: {several(idle)}" if idle else None

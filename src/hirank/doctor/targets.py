"""Traps in the choice of layers: what is adapted, trained whole, or missed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hirank.doctor.layers import own_weight, plain_name, saved_modules, targeted
from hirank.doctor.subject import Subject
from hirank.doctor.trap import several, trap

__all__ = [
    "pattern_matches_nothing",
    "saved_and_targeted",
    "target_matches_nothing",
    "targets_reach_other_towers",
    "targets_skip_blocks",
    "tied_embeddings",
]

TOWER = re.compile(r"(^|[._])(vision|visual|image|audio|speech)", re.IGNORECASE)


def _adapted_by(subject: Subject, adapter: str) -> list[str]:
    """Names that patterns may mean: of layers, or of the parameters that are adapted in them."""
    mine = [entry for entry in subject.adapted if entry.adapter == adapter]
    return [name for entry in mine for name in (entry.name, entry.parameter) if name]


@trap(
    "error",
    "A name in target_modules matches no layer",
    fix="Correct or remove the name; model.named_modules() lists them.",
    source="peft: get_peft_model raises only if no name matches at all",
)
def target_matches_nothing(subject: Subject) -> str | None:
    """A slip of the pen leaves a kind of layer out, without a word."""
    dead = []
    for adapter, config in subject.adapter_settings.items():
        endings = config.target_modules
        names = _adapted_by(subject, adapter) + [s.name for s in saved_modules_of(subject)]
        for ending in sorted(endings) if isinstance(endings, list | set | tuple) else ():
            if not any(targeted(name, [ending]) for name in names):
                dead.append(ending)
    return f"no adapted layer's name ends in {several(dead)}" if dead else None


def saved_modules_of(subject: Subject) -> list[Any]:
    """modules_to_save of the model; none without one."""
    return [] if subject.model is None else list(saved_modules(subject.model))


@trap(
    "warning",
    "A key of rank_pattern or alpha_pattern matches no adapted layer",
    fix="Correct the pattern: it is matched against the end of a layer's full name.",
    source="PEFT: a RuntimeWarning when the adapter is made, easily lost in a log",
)
def pattern_matches_nothing(subject: Subject) -> str | None:
    """The layers meant keep the general rank and alpha."""
    dead = []
    for adapter, config in subject.adapter_settings.items():
        names = _adapted_by(subject, adapter)
        for setting in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(config, setting) or ():
                if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                    dead.append(f"{setting} {pattern!r}")
    return several(dead) if dead else None


@trap(
    "warning",
    "A module is in modules_to_save and in target_modules",
    fix="Name it in one of the two: trained whole, or with an adapter.",
    source="peft#1689, unsloth#9331",
)
def saved_and_targeted(subject: Subject) -> str | None:
    """PEFT trains it whole then; the adapter that was asked for is not there."""
    both = []
    for saved in saved_modules_of(subject):
        for config in subject.adapter_settings.values():
            inside = saved.inside()
            both += [name for name in inside if targeted(name, config.target_modules)]
    return f"{len(set(both))} modules: {several(both)}" if both else None


@trap(
    "warning",
    "target_modules reaches into a vision or audio tower as well",
    fix="Give target_modules as a regex for one of the towers, or use exclude_modules.",
    source="peft#2044, whitecircle/halo#35 (a list for the text model hits vision modules)",
)
def targets_reach_other_towers(subject: Subject) -> str | None:
    """The towers of a multimodal model often share names such as q_proj."""
    names = [entry.name for entry in subject.active]
    tower = [name for name in names if TOWER.search(name)]
    if not tower or len(tower) == len(names):
        return None
    return f"{len(tower)} of {len(names)} adapted layers: {several(tower)}"


@trap(
    "warning",
    "Some blocks have no adapter at all",
    fix="Add the names of their layers to target_modules, or use all-linear.",
    source="hybrid models: only some blocks have q_proj, k_proj, v_proj (Qwen3.5, Jamba)",
)
def targets_skip_blocks(subject: Subject) -> str | None:
    """A list of names may fit some of a stack's blocks only; a regex is taken as meant."""
    if subject.model is None or any(map(_chosen, subject.adapter_settings.values())):
        return None
    names = [entry.name for entry in subject.adapted] + [s.name for s in saved_modules_of(subject)]
    for stack, blocks in _stacks(subject.model):
        without = [b for b in blocks if not any(n.startswith(f"{b}.") for n in names)]
        if 0 < len(without) < len(blocks):
            return f"{len(without)} of {len(blocks)} blocks of {stack}: {several(without)}"
    return None


def _chosen(config: Any) -> bool:
    """Whether the layers of an adapter were picked on purpose."""
    picked = config.layers_to_transform is not None or config.exclude_modules
    return bool(picked) or isinstance(config.target_modules, str)


def _stacks(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """(name, names of its blocks) of every list of blocks of one class with linear layers."""
    for name, module in model.named_modules():
        alike = isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
        if alike and all(map(_linear, module.children())):
            plain = plain_name(name)
            yield plain, [f"{plain}.{key}" for key, _ in module.named_children()]


def _linear(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


@trap(
    "error",
    "Embedding and output head share one weight, and one of them is adapted",
    fix="Leave both out, set ensure_weight_tying=True, or untie the model and save it first.",
    source="peft#2777, peft#2803, peft#2018, unsloth#9331",
)
def tied_embeddings(subject: Subject) -> str | None:
    """Merging changes both ends, or unties them while the config says they are tied."""
    ends = _ends(subject.model)
    if ends is None or any(_ties(c) for c in subject.adapter_settings.values()):
        return None
    weights = [own_weight(module) for module in ends.values()]
    if not _same(*weights):
        return None
    touched = [name for name, module in ends.items() if _touched(module)]
    if not touched:
        return None
    shape = "x".join(map(str, weights[0].shape)) if weights[0] is not None else "?"
    return f"{' and '.join(ends)} share a weight {shape}, adapted is {' and '.join(touched)}"


def _ends(model: nn.Module | None) -> dict[str, Any] | None:
    """Input embedding and output head by name, if the model has both."""
    found = {}
    for ask in ("get_input_embeddings", "get_output_embeddings"):
        module = _asked(model, ask)
        name = next((n for n, m in model.named_modules() if m is module), "") if model else ""
        if module is None:
            return None
        found[plain_name(name) or ask] = module
    return found


def _asked(model: nn.Module | None, what: str) -> Any:
    try:
        return getattr(model, what)()
    except (AttributeError, NotImplementedError):
        return None


def _ties(config: Any) -> bool:
    return bool(getattr(config, "ensure_weight_tying", False))


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return False
    if first is second:
        return True
    real = not first.is_meta and first.numel() > 0
    return real and first.data_ptr() == second.data_ptr()


def _touched(module: Any) -> bool:
    """Whether an adapter, or a copy that is trained whole, sits on a module."""
    return hasattr(module, "original_module") or hasattr(module, "base_layer")

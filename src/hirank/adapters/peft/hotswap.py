"""Exchanging the weights of a loaded adapter for those of another, in place.

Everything is looked at before the first weight changes. The settings go with the weights: rank,
alpha, rsLoRA, by layer, also those in `peft_config`, so that saving and `set_scale` stay right. A
layer that the new adapter has no weights for becomes its base: B is zero and m the base's norm.

Compiled code must not see a new shape or scale. `prepare_hotswap` makes room for a rank and takes
the scale into B; what is swapped in later is padded with zeros and multiplied likewise, which
changes no output but by one rounding of B.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from peft.tuners.lora import layer as peft_lora
from safetensors.torch import load_file
from torch import Tensor, nn

from hirank.adapters.export import WEIGHTS_FILE, check_adapter
from hirank.adapters.peft.converted import Converted, fresh_norm
from hirank.adapters.peft.saving import rank_and_alpha
from hirank.errors import HirankError

__all__ = ["hotswap_adapter", "prepare_hotswap", "swap_weights", "swapping"]


def hotswap_adapter(model: nn.Module, folder: str | Path, adapter_name: str = "default") -> None:
    """Replace the weights of a loaded LoRA or DoRA adapter by those in `folder`, in place.

    For a server that changes adapters between requests: parameters of the same shape keep their
    memory, and no kept norm outlives the change. A compiled model follows without compiling again
    if its ranks and scales stay, or after `prepare_hotswap`. No call may run meanwhile.

    Args:
        model: what PEFT made, converted or not, compiled or not.
        folder: an adapter in PEFT's format, on disk.
        adapter_name: the adapter of `model` to fill; it keeps its name and its dropout.

    Raises:
        HirankError: files that are incomplete, or do not fit the adapter; a merged adapter. The
            model is then as it was.
    """
    folder = Path(folder)
    settings = check_adapter(folder)
    if settings["peft_type"] != "LORA":
        raise HirankError(f"{folder} holds a {settings['peft_type']}, not LoRA or DoRA: load it.")
    config = PeftConfig.from_pretrained(str(folder))
    swap_weights(model, load_file(folder / WEIGHTS_FILE), config, adapter_name, str(folder))


def swap_weights(
    model: nn.Module, weights: Mapping[str, Tensor], config: Any, name: str, source: str
) -> None:
    """`hotswap_adapter` from what a folder holds: weights under the names that files use."""
    inner: Any = getattr(model, "_orig_mod", model)
    layers = _layers(inner, name)
    _check_unmerged(layers, name)
    unused = dict(weights)
    plans = [_plan(where, layer, name, config, unused, source) for where, layer in layers]
    if unused:
        raise HirankError(
            f"{source} holds {next(iter(unused))}, for which adapter {name!r} has no place "
            f"({len(unused)} weights): load it as an adapter of its own."
        )
    with torch.no_grad():
        for plan in plans:
            _apply(plan, name)
    if not any(plan.slot for plan in plans):
        _tell(getattr(inner, "peft_config", {}).get(name), config)


def swapping(original: Callable[..., None]) -> Callable[..., None]:
    """PEFT's function for it: hirank's where layers are converted, `original` elsewhere."""

    @functools.wraps(original)
    def swap(
        model: nn.Module,
        state_dict: dict[str, Tensor],
        adapter_name: str,
        config: Any,
        parameter_prefix: str = "lora_",
    ) -> None:
        if not any(isinstance(module, Converted) for module in model.modules()):
            original(model, state_dict, adapter_name, config, parameter_prefix)
            return
        suffix = re.compile(rf"\.{re.escape(adapter_name)}(?=\.weight$|$)")
        weights = {suffix.sub("", key): value for key, value in state_dict.items()}
        swap_weights(model, weights, config, adapter_name, "the new adapter")

    return swap


def prepare_hotswap(model: nn.Module, rank: int, adapter_name: str = "default") -> None:
    """Make room in a loaded adapter for all that will be swapped in, before compiling.

    Every layer gets A and B of this rank, padded with zeros, and scale 1, its own taken into B, so
    that later swaps change nothing but values. The output stays as it is, but for one rounding.

    Args:
        model: what PEFT made, not yet compiled.
        rank: the largest rank of the adapters to come.
        adapter_name: the adapter of `model` that they will replace.

    Raises:
        HirankError: the model is compiled or merged, or an adapter has a larger rank.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise HirankError("prepare_hotswap got a compiled model: call it before torch.compile.")
    layers = _layers(model, adapter_name)
    _check_unmerged(layers, adapter_name)
    plans = []
    for where, layer in layers:
        A, B = (_tensor(part[adapter_name]) for part in _parts(layer))
        _check_room(where, layer, A.shape[0], rank, "adapter")
        m = _magnitude(layer, adapter_name)
        plans.append(_Plan(layer, A, B, m, rank, rank, layer.scaling[adapter_name], rank))
    with torch.no_grad():
        for plan in plans:
            slots = {**plan.layer.__dict__.get(_SLOTS, {}), adapter_name: rank}
            plan.layer.__dict__[_SLOTS] = slots
            _apply(plan, adapter_name)
    config = getattr(model, "peft_config", {}).get(adapter_name)
    if config is not None:
        config.r, config.lora_alpha, config.use_rslora = rank, rank, False
        config.rank_pattern, config.alpha_pattern = {}, {}


_SLOTS = "_hirank_slots"  # of a layer: the rank that is reserved, by adapter


class _Plan(NamedTuple):
    """What one layer is to get."""

    layer: Any
    A: Tensor
    B: Tensor
    magnitude: Tensor | None
    rank: int
    alpha: float
    scale: float
    slot: int | None
    """The rank that is reserved; None: A and B come as they are."""
    rslora: bool = False


def _layers(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    found = [
        (where, module)
        for where, module in model.named_modules()
        if isinstance(module, peft_lora.LoraLayer) and name in module.scaling
    ]
    if not found:
        raise HirankError(f"The model has no adapter {name!r} to swap: load one under that name.")
    return found


def _check_unmerged(layers: list[tuple[str, Any]], name: str) -> None:
    if any(name in layer.merged_adapters for _, layer in layers):
        raise HirankError(
            f"Adapter {name!r} is merged into the base weights: call unmerge_adapter() before "
            "swapping it."
        )


def _parts(layer: Any) -> tuple[Any, Any]:
    if isinstance(layer, peft_lora.Embedding):
        return layer.lora_embedding_A, layer.lora_embedding_B
    return layer.lora_A, layer.lora_B


def _tensor(part: Any) -> Tensor:
    found: Tensor = part if isinstance(part, Tensor) else part.weight
    return found


def _magnitude(layer: Any, name: str) -> Tensor | None:
    held = layer.lora_magnitude_vector
    return _tensor(held[name]) if name in held else None


def _plan(
    where: str, layer: Any, name: str, config: Any, unused: dict[str, Tensor], source: str
) -> _Plan:
    keys = _keys(where, layer)
    if isinstance(layer, peft_lora.ParamWrapper) or layer.lora_bias.get(name):
        raise HirankError(f"{where} adapts no plain weight: load {source} as another adapter.")
    A, B, m = (unused.pop(key, None) for key in keys)
    old_A, old_B = (_tensor(part[name]) for part in _parts(layer))
    old_m, slot = _magnitude(layer, name), _slot(layer, name)
    if A is None and B is None and m is None:
        m = None if old_m is None else _base_norm(where, layer, name)
        scale = 1.0 if slot is not None else layer.scaling[name]
        held = (layer.r[name], layer.lora_alpha[name], scale, slot, layer.use_rslora[name])
        return _Plan(layer, old_A, torch.zeros_like(old_B), m, *held)
    lacks = [key for key, part in zip(keys, (A, B), strict=False) if part is None]
    if A is None or B is None or (m is None) != (old_m is None):
        raise HirankError(
            f"{source} lacks {lacks[0]}: take it from the run again."
            if lacks
            else f"{source} and adapter {name!r} of {where} do not agree on whether there are "
            "magnitudes: load it as an adapter of its own."
        )
    rank, alpha = rank_and_alpha(config, where)
    _check_fit(where, source, {"A": (A, old_A, 0), "B": (B, old_B, 1), "magnitude": (m, old_m, -1)})
    if A.shape[0] != rank or B.shape[1] * _groups(layer) != rank:
        raise HirankError(
            f"{source} has rank {A.shape[0]} for {where} and {rank} in its settings: take it from "
            "the run again."
        )
    if slot is not None:
        _check_room(where, layer, rank, slot, source)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    return _Plan(layer, A, B, m, rank, alpha, scale, slot, bool(config.use_rslora))


def _keys(where: str, layer: Any) -> list[str]:
    where = where if where.startswith("base_model.model.") else f"base_model.model.{where}"
    if isinstance(layer, peft_lora.Embedding):
        names = ["lora_embedding_A", "lora_embedding_B"]
    else:
        names = ["lora_A.weight", "lora_B.weight"]
    return [f"{where}.{name}" for name in (*names, "lora_magnitude_vector")]


def _groups(layer: Any) -> int:
    return int(getattr(layer.get_base_layer(), "groups", 1))


def _slot(layer: Any, name: str) -> int | None:
    found: int | None = layer.__dict__.get(_SLOTS, {}).get(name)
    if found is None and isinstance(layer.scaling[name], Tensor):  # made ready by PEFT
        return _tensor(_parts(layer)[0][name]).shape[0]
    return found


def _base_norm(where: str, layer: Any, name: str) -> Tensor:
    if not isinstance(layer, Converted):
        raise HirankError(
            f"{where} would become its base, whose norm hirank does not compute there: load the "
            "adapter under another name."
        )
    return fresh_norm(layer, name)


def _check_fit(where: str, source: str, parts: dict[str, Any]) -> None:
    """Whether shapes agree but for the rank, and all is finite."""
    for what, (new, old, free) in parts.items():
        if new is None:
            continue
        shapes = [list(t.shape) for t in (new, old)]
        if free >= 0 and len(shapes[0]) == len(shapes[1]):
            del shapes[0][free], shapes[1][free]
        if shapes[0] != shapes[1]:
            raise HirankError(
                f"{source} has {what} of shape {list(new.shape)} for {where}, where "
                f"{list(old.shape)} is: it belongs to another base model."
            )
        if not torch.isfinite(new).all():
            raise HirankError(
                f"{source} has NaN or infinity in {what} for {where}: take a checkpoint from "
                "before the training diverged."
            )


def _check_room(where: str, layer: Any, rank: int, slot: int, what: str) -> None:
    if rank > slot:
        raise HirankError(
            f"{where} has room for rank {slot} and {what} has {rank}: prepare_hotswap with the "
            "largest rank."
        )
    if rank != slot and _groups(layer) > 1:
        raise HirankError(
            f"{where} is a grouped convolution, in which ranks {rank} and {slot} do not fit into "
            "each other: swap adapters of one rank."
        )


def _apply(plan: _Plan, name: str) -> None:
    layer, B, scale = plan.layer, plan.B, plan.layer.scaling[name]
    parts = _parts(layer)
    if plan.slot is not None and not isinstance(scale, Tensor):
        B = B.to(torch.promote_types(B.dtype, torch.float32)) * plan.scale
        layer.r[name] = layer.lora_alpha[name] = plan.slot
        layer.scaling[name], layer.use_rslora[name] = 1.0, False
    else:
        layer.r[name], layer.lora_alpha[name] = plan.rank, plan.alpha
        layer.use_rslora[name] = plan.rslora
        if isinstance(scale, Tensor):
            scale.fill_(plan.scale)
        else:
            layer.scaling[name] = plan.scale
    _place(parts[0], name, plan.A, 0, plan.slot)
    _place(parts[1], name, B, 1, plan.slot)
    if plan.magnitude is not None:
        held = _magnitude(layer, name)
        assert held is not None
        held.copy_(plan.magnitude.view_as(held))
    _forget(layer, name)


def _place(parts: Any, name: str, new: Tensor, dim: int, slot: int | None) -> None:
    old = _tensor(parts[name])
    if slot is not None and new.shape[dim] < slot:
        shape = list(new.shape)
        shape[dim] = slot
        padded = new.new_zeros(shape)
        padded.narrow(dim, 0, new.shape[dim]).copy_(new)
        new = padded
    if old.shape == new.shape:
        old.copy_(new)
        return
    made = nn.Parameter(new.to(old, copy=True).contiguous(), requires_grad=old.requires_grad)
    if isinstance(parts[name], Tensor):
        parts[name] = made
        return
    parts[name].weight = made
    kind = "out" if dim == 0 else "in"
    for what in (f"{kind}_features", f"{kind}_channels"):
        if hasattr(parts[name], what):
            setattr(parts[name], what, made.shape[dim] * (_groups_of(parts[name]) if dim else 1))


def _groups_of(module: Any) -> int:
    return int(getattr(module, "groups", 1))


def _forget(layer: Any, name: str) -> None:
    norms = layer.__dict__.get("_hirank_norms", {}).get(name)
    if norms is not None:
        norms.clear()
    if name in layer.lora_magnitude_vector:
        layer.lora_magnitude_vector[name].__dict__.get("_dora_cache", {}).clear()


def _tell(ours: Any, new: Any) -> None:
    """Let the settings of the model say what its weights are now."""
    if ours is not None:
        for field in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"):
            setattr(ours, field, getattr(new, field))

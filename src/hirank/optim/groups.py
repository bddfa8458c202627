"""Which parameters are projected, which get plain AdamW, and which cannot be trained so.

Given a model: matrices are projected, but for embeddings, the output head and whatever `exclude`
names; 1-D parameters (norms, biases) get plain AdamW without weight decay. Frozen parameters are
left out, tied ones appear once.

Given parameter groups: a group that names a `rank` is projected, any other is plain, as with
galore_torch. Given bare parameters: every matrix is projected.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hirank.errors import HirankError
from hirank.optim import bases
from hirank.optim.hyper import Hyper
from hirank.optim.weights import Int8Weight, quantize_weights

__all__ = ["EXCLUDED", "groups_of", "model_groups", "refuse", "refuse_sparse", "report_rank"]

Group = dict[str, Any]

EXCLUDED = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of parameters that are matrices but not projected by default."""

log = logging.getLogger("hirank.optim")


def groups_of(params: Any, hyper: Hyper) -> list[Group]:
    """Parameter groups of a model, of parameters (named or not), or of groups."""
    if isinstance(params, nn.Module):
        return model_groups(params, hyper)
    if isinstance(params, Tensor | dict):
        kind = "one tensor" if isinstance(params, Tensor) else "one group"
        raise HirankError(f"params is {kind}; give a model, or a list of tensors or of groups.")
    items = list(params)
    if items and isinstance(items[0], dict):
        return [{"rank": None, **group} if not _names_rank(group) else group for group in items]
    return [{"params": items, "rank": hyper.rank}]


def _names_rank(group: Group) -> bool:
    return "rank" in group or "galore_rank" in group


def model_groups(model: nn.Module, hyper: Hyper, exclude: Sequence[str] = EXCLUDED) -> list[Group]:
    """Three groups: projected, plain matrices, plain without decay; empty ones are left out.

    With `hyper.weights == "int8"` the projected weights of linear layers become Int8Weight first.
    """
    if hyper.weights == "int8":
        quantize_weights(model, _linear_names(model, exclude))
    outside = _not_projected(model)
    sorted_out: dict[str, list[tuple[str, Tensor]]] = {"projected": [], "plain": [], "no_decay": []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            sorted_out[_kind(name, p, outside, exclude)].append((name, p))
    settings: dict[str, Group] = {
        "projected": {"rank": hyper.rank},
        "plain": {"rank": None},
        "no_decay": {"rank": None, "weight_decay": 0.0},
    }
    groups = [{"params": named, **settings[kind]} for kind, named in sorted_out.items() if named]
    if not groups:
        raise HirankError(
            f"{type(model).__name__} has no parameter with requires_grad; unfreeze what is to be "
            "trained before the optimiser is built."
        )
    return groups


def _kind(name: str, p: Tensor, outside: set[int], exclude: Sequence[str]) -> str:
    if p.dim() < 2:
        return "no_decay"
    listed = id(p) in outside or any(part in name for part in exclude)
    return "plain" if listed or bases.matrix_shape(p.shape) is None else "projected"


def _not_projected(model: nn.Module) -> set[int]:
    """Weights of embeddings, and of the output head where the model can name it."""
    found = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return found | ({id(head.weight)} if head is not None else set())


def _linear_names(model: nn.Module, exclude: Sequence[str]) -> list[str]:
    outside = _not_projected(model)
    weights = {
        id(m.weight): m.weight
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.weight.requires_grad
    }
    named = ((n, p) for n, p in model.named_parameters(remove_duplicate=False) if id(p) in weights)
    return [
        name
        for name, p in named
        if not isinstance(p, Int8Weight) and _kind(name, p, outside, exclude) == "projected"
    ]


# What is refused, what is said.


def refuse(p: Any) -> None:
    """Raise HirankError for a parameter that cannot be trained by a low-rank optimiser."""
    if getattr(p, "_is_flat_param", False) or hasattr(p, "ds_id") or hasattr(p, "_hp_mapping"):
        raise HirankError(
            f"A parameter of shape {tuple(p.shape)} is flattened or partitioned, as DeepSpeed ZeRO "
            "and FSDP1 do, so its matrix cannot be projected; use FSDP2 (fully_shard) or one "
            "process per whole model instead."
        )
    if p.is_complex() or p.is_sparse or not p.is_floating_point():
        raise HirankError(
            f"A parameter of shape {tuple(p.shape)} is {p.dtype}, {p.layout}; give dense "
            "floating-point parameters."
        )


def refuse_sparse(grad: Tensor) -> None:
    """Raise HirankError for a gradient of nn.Embedding(sparse=True) and its like."""
    if grad.layout is not torch.strided:
        raise HirankError(
            f"A gradient of shape {tuple(grad.shape)} is sparse, and decay and moments need all of "
            "it; build the embedding with sparse=False."
        )


def report_rank(params: Iterable[Tensor], rank: int | None) -> None:
    """Say how many parameters are too small for the rank they are asked for."""
    shapes = [shape for p in params if (shape := bases.matrix_shape(p.shape))]
    small = sum(rank > min(shape) for shape in shapes) if rank is not None else 0
    if small:
        plural = "s, which keep" if small > 1 else ", which keeps"
        log.warning(f"rank {rank} is above the shorter side of {small} parameter{plural} full rank")

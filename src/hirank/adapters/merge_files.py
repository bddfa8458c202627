"""An adapter merged into the files of its base model, shard by shard.

    BaseFolder, AdapterFolder  ->  MergePlan (all that can be refused)  ->  a new model folder

Only one tensor is in memory, and a block of rows of it in fp32. The new folder has the shards of
the old one; a head or an embedding that shared its weight and no longer does gets one of its own,
and the config says so. Everything that is no weight is copied.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.base_files import (
    CONFIG,
    INDEX,
    SINGLE,
    Entry,
    ShardWriter,
    is_weights,
    new_folder,
)
from hirank.adapters.few_bits import as_trained
from hirank.adapters.files import AdapterLayer
from hirank.adapters.merge import Block, Increment, merged_blocks
from hirank.adapters.merge_plan import MergePlan
from hirank.errors import HirankError
from hirank.files import atomic_folder, need_space
from hirank.kernels.blockquant import round_to_bf16

__all__ = ["Watch", "base_tensor", "merge_matrix", "trained_tensor", "write_merged"]

Watch = Callable[[str, Block, Tensor], None]
"""Sees the name of a parameter, a block of it before and after, and that block as it is stored."""
SLACK = 64 * 2**20
"""Bytes for headers and the small files, asked for beside the weights."""


def write_merged(
    plan: MergePlan,
    target: Path | None,
    watch: Watch | None = None,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write the merged model into `target`, whole or not at all; None: only let `watch` look.

    `finish` gets the folder when all is in it and before it takes its place: it may add to it, and
    if it raises, nothing is left.

    Raises:
        HirankError: `target` holds something or its disk has no room (before anything is
            written); numbers that are not finite; a write that failed.
    """
    if target is None:
        for entry in (entry for held in plan.shards.values() for entry in held):
            if entry.key in plan.layers:
                _tensor(plan, entry, watch)
        return
    place = new_folder(target)
    need_space(place, plan.nbytes + SLACK)
    with atomic_folder(place) as draft:
        _copy_rest(plan, draft)
        for name, held in plan.shards.items():
            with ShardWriter(draft / name, held) as writer:
                for entry in held:
                    writer.write(_tensor(plan, entry, watch))  # held by no name behind this line
        if finish is not None:
            finish(draft)


def _tensor(plan: MergePlan, entry: Entry, watch: Watch | None) -> Tensor:
    """The tensor to be stored under a key."""
    if entry.key in plan.replaced:
        new = plan.adapter.tensor(plan.replaced[entry.key])
    else:
        new = base_tensor(plan, entry.key)
    name = plan.layers.get(entry.key)
    if name is not None:
        layer = plan.adapter.layer(name)
        turned = entry.key in plan.turned
        return merge_matrix(new, layer, entry.dtype, plan.rounding.seed, turned, watch)
    if entry.key in plan.biases:
        layer = plan.adapter.layer(plan.biases[entry.key])
        assert layer.bias is not None
        new = new.float() + layer.scale * layer.bias.float()
    return _need_room(entry.key, new, new.to(entry.dtype))


def _need_room(name: str, wide: Tensor, stored: Tensor) -> Tensor:
    """`stored`. Raises HirankError if its dtype made infinities of numbers, as fp16 does."""
    if wide.dtype == stored.dtype or not stored.is_floating_point():
        return stored
    most = torch.finfo(stored.dtype).max
    # Their norm is quick to look at, and bounds each of them.
    if torch.linalg.vector_norm(wide.float()) <= most or not (stored.isinf() > wide.isinf()).any():
        return stored
    raise HirankError(
        f"{name} holds numbers above {most:.4g}, which {str(stored.dtype).removeprefix('torch.')} "
        "has not: give --dtype bfloat16 or float32."
    )


def base_tensor(plan: MergePlan, key: str) -> Tensor:
    """What is merged into, in the dtype that the base stores it in."""
    return trained_tensor(plan, key) if plan.dequantised else _stored(plan, key)


def trained_tensor(plan: MergePlan, key: str) -> Tensor:
    """What the adapter was trained beside."""
    tensor = _stored(plan, key)
    if plan.trained_on is None or plan.sources.get(key, key) not in plan.requantised:
        return tensor
    return as_trained(tensor, plan.trained_on)


def _stored(plan: MergePlan, key: str) -> Tensor:
    return plan.base.tensor(plan.sources.get(key, key))


def merge_matrix(
    weight: Tensor,
    layer: AdapterLayer,
    dtype: torch.dtype,
    seed: int | None = None,
    turned: bool = False,
    watch: Watch | None = None,
) -> Tensor:
    """The merged weight of one layer, as its base weight lies, rounded to `dtype` once.

    Args:
        weight: of the base; [N, K], [K, N] if `turned`, [N, C, *k] of a convolution.
        layer: its adapter.
        dtype: of the result.
        seed: of stochastic rounding, for bf16.
        turned: whether the weight lies as [K, N].
        watch: sees every block.

    Raises:
        HirankError: the merged weight is not finite.
    """
    out = torch.empty(weight.shape, dtype=dtype)
    rows_in = weight.T if turned else weight.flatten(1)
    rows_out = out.T if turned else out.view(out.shape[0], -1)
    dice = None if seed is None else _dice(seed, layer.name)
    part = Increment(layer.A, layer.B, layer.magnitude, layer.scale)
    for block in merged_blocks(rows_in, [part]):
        # Unlike the numbers themselves, their norm is quick to look at; it is not finite if they
        # are not, or if they are huge.
        quick = torch.linalg.vector_norm(block.after)
        if not quick.isfinite() and not block.after.isfinite().all():
            raise HirankError(
                f"{layer.name} would hold numbers that are not finite: the adapter or the base "
                "is broken there."
            )
        stored = _rounded(block.after, dtype, dice)
        if not quick <= torch.finfo(dtype).max:
            _need_room(layer.name, block.after, stored)
        rows_out[block.rows] = stored
        if watch is not None:
            watch(layer.name, block, stored)
    return out


def _rounded(block: Tensor, dtype: torch.dtype, dice: torch.Generator | None) -> Tensor:
    if dice is None or dtype != torch.bfloat16:
        return block.to(dtype)
    bits = torch.randint(0, 2**16, block.shape, generator=dice, dtype=torch.int32)
    return round_to_bf16(block.float(), bits)


def _dice(seed: int, name: str) -> torch.Generator:
    """A stream for each layer, whatever the order in which they are merged."""
    return torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))


def _copy_rest(plan: MergePlan, draft: Path) -> None:
    """Config, tokenizer and the like; the index as it will be."""
    for path in sorted(plan.base.folder.iterdir()):
        if path.is_file() and not is_weights(path) and path.name != CONFIG:
            shutil.copyfile(path, draft / path.name)
    (draft / CONFIG).write_text(
        json.dumps(_new_config(plan), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if list(plan.shards) == [SINGLE]:
        return
    where = {entry.key: name for name, held in plan.shards.items() for entry in held}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(where.items()))}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _new_config(plan: MergePlan) -> dict[str, Any]:
    config = dict(plan.base.config)
    parts = [config]
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), dict):
            config[name] = dict(config[name])
            parts.append(config[name])
    for part in parts:
        if plan.unties and ("tie_word_embeddings" in part or part is config):
            part["tie_word_embeddings"] = False
        for key in ("dtype", "torch_dtype"):
            if plan.rounding.dtype is not None and key in part:
                part[key] = str(plan.rounding.dtype).removeprefix("torch.")
    return config

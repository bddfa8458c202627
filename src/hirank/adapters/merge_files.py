"""An adapter merged into the files of its base model, shard by shard.

    BaseFolder, AdapterFolder  ->  MergePlan (all that can be refused)  ->  a new model folder

Only one tensor is in memory, and a block of rows of it in fp32. The new folder has the shards of
the old one; a head or an embedding that shared its weight and no longer does gets one of its own,
and the config says so. Everything that is no weight is copied.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hirank.adapters.base_files import CONFIG, INDEX, SINGLE, BaseFolder, Entry, ShardWriter
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.adapters.merge import Block, Increment, merged_blocks
from hirank.errors import HirankError
from hirank.files import atomic_folder, need_new, need_space
from hirank.kernels.blockquant import round_to_bf16

__all__ = ["MergePlan", "Rounding", "Watch", "merge_matrix", "plan_merge", "write_merged"]

Watch = Callable[[str, Block, Tensor], None]
"""Sees the name of a parameter, a block of it before and after, and that block as it is stored."""
SLACK = 64 * 2**20
"""Bytes for headers and the small files, asked for beside the weights."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


class Rounding(NamedTuple):
    """How a merged number becomes one that is stored."""

    dtype: torch.dtype | None = None
    """Of all floating tensors; None: as the base has them."""
    seed: int | None = None
    """Of stochastic rounding to bf16, up or down so that the mean is exact; None: to nearest."""


@dataclass(frozen=True)
class MergePlan:
    """What will be written, checked against both folders."""

    base: BaseFolder
    adapter: AdapterFolder
    rounding: Rounding
    layers: dict[str, str]
    """Key that an adapted layer's weight is written under: name of the layer."""
    turned: frozenset[str]
    """Keys of weights that lie as [K, N]."""
    replaced: dict[str, str]
    """Key: that of the adapter's file whose tensor takes its place."""
    biases: dict[str, str]
    """Key of a bias that `lora_bias` adds to: name of the layer."""
    sources: dict[str, str]
    """Key that is new because a shared weight parts: key of the base it starts from."""
    shards: dict[str, list[Entry]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for held in self.shards.values() for entry in held)

    @property
    def unties(self) -> bool:
        return bool(self.sources)


def plan_merge(base: BaseFolder, adapter: AdapterFolder, rounding: Rounding) -> MergePlan:
    """Everything that can be refused, before a byte is written. Reads no weight.

    Raises:
        HirankError: names or shapes that do not fit, a base of few bits, an adapter whose files do
            not say all that its layers compute, a layer that no plain weight can hold.
    """
    if (obstacle := adapter.obstacle()) is not None:
        raise HirankError(f"{adapter.folder} cannot be merged from its files: {obstacle}.")
    if "quantization_config" in base.config:
        raise HirankError(
            f"{base.folder} holds weights of few bits, which no merged weight fits into: give the "
            "base in a floating dtype, or let it be dequantised with --in-memory."
        )
    return _Planner(base, adapter, rounding).plan()


class _Planner:
    def __init__(self, base: BaseFolder, adapter: AdapterFolder, rounding: Rounding) -> None:
        self.base, self.adapter, self.rounding = base, adapter, rounding
        self.model = _meta_model(base)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.layers: dict[str, str] = {}
        self.turned: set[str] = set()
        self.replaced: dict[str, str] = {}
        self.biases: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def plan(self) -> MergePlan:
        for name in self.adapter.names:
            self._add_layer(name)
        for name, key in self.adapter.others.items():
            self.replaced[self._key(name)] = key
        return MergePlan(
            self.base,
            self.adapter,
            self.rounding,
            self.layers,
            frozenset(self.turned),
            self.replaced,
            self.biases,
            self.sources,
            self._checked(self._shards()),
        )

    def _checked(self, shards: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        merged = [e for held in shards.values() for e in held if e.key in self.layers]
        odd = next((e for e in merged if not _floats(e.dtype)), None)
        if odd is not None:
            raise HirankError(
                f"{self.base.folder} stores {odd.key} as {odd.dtype}, which no merged weight fits "
                "into: give the base in a floating dtype, or merge with --in-memory."
            )
        narrow = next((e for e in merged if e.dtype != torch.bfloat16), None)
        if self.rounding.seed is not None and narrow is not None:
            raise HirankError(
                f"Stochastic rounding is to bfloat16, and {narrow.key} is written as "
                f"{str(narrow.dtype).removeprefix('torch.')}: give --dtype bfloat16."
            )
        return shards

    def _add_layer(self, name: str) -> None:
        from hirank.adapters.peft.operands import turned

        module = self._module(name)
        layer = self.adapter.layer(name)
        key = self._key(f"{name}.weight")
        _check_fit(layer, module, self.parameters[f"{name}.weight"])
        self.layers[key] = name
        if turned(module):
            self.turned.add(key)
        if layer.bias is not None:
            if f"{name}.bias" not in self.parameters:
                raise HirankError(
                    f"{name} has no bias that the adapter's lora_bias could be added to: serve the "
                    "adapter unmerged."
                )
            self.biases[self._key(f"{name}.bias")] = name

    def _module(self, name: str) -> nn.Module:
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            raise HirankError(
                f"{self.base.folder} ({type(self.model).__name__}) has no layer {name}: is it the "
                "base of this adapter?"
            ) from None

    def _key(self, name: str) -> str:
        """Where parameter `name` is stored; a shared weight that is changed parts here."""
        if name not in self.parameters:
            raise HirankError(
                f"{self.base.folder} ({type(self.model).__name__}) has no parameter {name}: is it "
                "the base of this adapter?"
            )
        stored = self.base.key_of(name)
        twins = self._twins(name)
        if not twins:
            if stored is None:
                raise HirankError(
                    f"{self.base.folder} stores {name} under another name: merge with --in-memory."
                )
            return stored
        for each in (name, *twins):
            self._part(each, (name, *twins))
        return stored if stored is not None else name

    def _twins(self, name: str) -> list[str]:
        """Other names of the same weight."""
        own = self.parameters[name]
        return [other for other, p in self.parameters.items() if p is own and other != name]

    def _part(self, name: str, shared: tuple[str, ...]) -> None:
        if self.base.key_of(name) is not None:
            return
        source = next((k for n in shared if (k := self.base.key_of(n)) is not None), None)
        if source is None:
            raise HirankError(
                f"{self.base.folder} stores {name} under another name: merge with --in-memory."
            )
        self.sources[name] = source

    def _shards(self) -> dict[str, list[Entry]]:
        shards = {name: [self._written(e) for e in held] for name, held in self.base.shards.items()}
        last = shards[next(reversed(shards))]
        last += [
            self._written(replace(self.base.entries[source], key=key))
            for key, source in self.sources.items()
        ]
        # Wider numbers first, so that each tensor begins at a multiple of its dtype's size.
        return {
            name: sorted(held, key=lambda entry: -entry.dtype.itemsize)
            for name, held in shards.items()
        }

    def _written(self, entry: Entry) -> Entry:
        wanted = self.rounding.dtype
        return entry if wanted is None or not _floats(entry.dtype) else replace(entry, dtype=wanted)


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _meta_model(base: BaseFolder) -> Any:
    """The architecture without weights, its shared weights tied."""
    import transformers

    names = base.config.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        known = f"{names[0]}, which this Transformers lacks" if names else "no architectures"
        raise HirankError(f"{base.folder / CONFIG} names {known}: give a model it can load.")
    try:
        config = kind.config_class.from_pretrained(base.folder)
        with torch.device("meta"):
            model = kind(config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HirankError(f"{base.folder / CONFIG} describes no model ({reason}).") from None
    model.tie_weights()
    return model


def _check_fit(layer: AdapterLayer, module: nn.Module, weight: Tensor) -> None:
    from hirank.adapters.peft.operands import turned

    if getattr(module, "groups", 1) != 1:
        raise HirankError(
            f"{layer.name} is a grouped convolution, whose adapter mixes all groups so that no "
            "grouped weight can hold it: serve the adapter unmerged."
        )
    rows, columns = weight.flatten(1).shape
    if turned(module):
        rows, columns = columns, rows
    found = (layer.B.shape[0], layer.A.shape[1])
    if found != (rows, columns) or layer.B.shape[1] != layer.rank:
        raise HirankError(
            f"{layer.name} has a weight [{rows}, {columns}] in the base and an adapter for "
            f"[{found[0]}, {found[1]}]: is it the base of this adapter?"
        )
    if layer.magnitude is not None and layer.magnitude.numel() != rows:
        raise HirankError(
            f"{layer.name} has {rows} rows and {layer.magnitude.numel()} magnitudes: take the "
            "adapter from the run again."
        )


def write_merged(plan: MergePlan, target: Path | None, watch: Watch | None = None) -> None:
    """Write the merged model into `target`, whole or not at all; None: only let `watch` look.

    Raises:
        HirankError: `target` holds something or its disk has no room (before anything is
            written); numbers that are not finite; a write that failed.
    """
    if target is None:
        for name, held in plan.shards.items():
            for _ in _tensors(plan, name, held, watch, look_only=True):
                pass
        return
    need_new(target)
    need_space(target, plan.nbytes + SLACK)
    if target.is_dir():
        target.rmdir()
    with atomic_folder(target) as draft:
        _copy_rest(plan, draft)
        for name, held in plan.shards.items():
            with ShardWriter(draft / name, held) as writer:
                for tensor in _tensors(plan, name, held, watch):
                    writer.write(tensor)


def _tensors(
    plan: MergePlan, shard: str, held: list[Entry], watch: Watch | None, look_only: bool = False
) -> Iterator[Tensor]:
    for entry in held:
        if look_only and entry.key not in plan.layers:
            continue
        yield _tensor(plan, entry, watch)


def _tensor(plan: MergePlan, entry: Entry, watch: Watch | None) -> Tensor:
    """The tensor to be stored under a key."""
    if entry.key in plan.replaced:
        new = plan.adapter.tensor(plan.replaced[entry.key])
        if tuple(new.shape) != entry.shape:
            raise HirankError(
                f"{entry.key} is {list(entry.shape)} in the base and {list(new.shape)} in the "
                "adapter: is it the base of this adapter?"
            )
    else:
        new = plan.base.tensor(plan.sources.get(entry.key, entry.key))
    name = plan.layers.get(entry.key)
    if name is not None:
        layer = plan.adapter.layer(name)
        turned = entry.key in plan.turned
        return merge_matrix(new, layer, entry.dtype, plan.rounding.seed, turned, watch)
    if entry.key in plan.biases:
        layer = plan.adapter.layer(plan.biases[entry.key])
        assert layer.bias is not None
        new = new.float() + layer.scale * layer.bias.float()
    return new.to(entry.dtype)


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
        if not torch.isfinite(block.after).all():
            raise HirankError(
                f"{layer.name} would hold numbers that are not finite: the adapter or the base "
                "is broken there."
            )
        stored = _rounded(block.after, dtype, dice)
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
        if path.is_file() and not _is_weights(path) and path.name != CONFIG:
            shutil.copyfile(path, draft / path.name)
    (draft / CONFIG).write_text(
        json.dumps(_new_config(plan), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if list(plan.shards) == [SINGLE]:
        return
    where = {entry.key: name for name, held in plan.shards.items() for entry in held}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(where.items()))}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHTS or path.name.endswith(".index.json")


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

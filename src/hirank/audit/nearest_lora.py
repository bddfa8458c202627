"""The LoRA of a given rank that is nearest to what was trained: for engines that serve no DoRA.

    D = g (W + s B A) - W   of a DoRA adapter on its base
    D = W' - W              of a model whose weights were all trained, or merged

No matrix of rank r is nearer to D than its r largest singular triples (Eckart-Young), and a DoRA's
D has full rank: the rows are stretched. So there is an error, told for each layer as stored.
Large matrices are sketched (`partial`), so another LoRA may be nearer, by very little.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hirank.adapters.base_files import BaseFolder, new_folder
from hirank.adapters.export import CONFIG_FILE, WEIGHTS_FILE
from hirank.adapters.files import PREFIX, AdapterFolder
from hirank.adapters.merge_plan import meta_model
from hirank.audit.base_weights import BaseWeights
from hirank.audit.factors import groups_of
from hirank.audit.increment import BLOCK, adapted_rows, gain_of
from hirank.audit.partial import Blocks, largest_triples
from hirank.audit.rank import rank_settings
from hirank.errors import HirankError
from hirank.files import atomic_folder

__all__ = ["Nearest", "NearestLayer", "lora_of_adapter", "lora_of_model"]

Tick = Callable[[str], None]
Finish = Callable[[Path], None]
_KEEP = ("base_model_name_or_path", "task_type", "fan_in_fan_out", "revision", "modules_to_save")


@dataclass(frozen=True)
class NearestLayer:
    """One layer: |D - B A| / |D|, Frobenius, of B and A as stored, and |D|."""

    name: str
    error: float
    norm: float


@dataclass(frozen=True)
class Nearest:
    """The LoRA that was made."""

    rank: int
    layers: list[NearestLayer]
    left_out: list[str]
    """What changed and no LoRA reaches: norms, biases, layers of other kinds."""

    @property
    def error(self) -> float:
        """Of all layers together."""
        missed = math.fsum((layer.error * layer.norm) ** 2 for layer in self.layers)
        whole = math.fsum(layer.norm**2 for layer in self.layers)
        return math.sqrt(missed / whole) if whole else 0.0

    @property
    def worst(self) -> NearestLayer:
        return max(self.layers, key=lambda layer: layer.error)

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True)
class _Job:
    """A layer to be approximated: its increment [N, K], and the keys of its factors."""

    name: str
    increment: Blocks
    shape_A: tuple[int, ...]  # behind the rank
    ones_B: int  # sizes of one behind B's rank, as a convolution has
    embeds: bool


def lora_of_adapter(
    source: Path,
    base: Path,
    out: Path,
    *,
    rank: int,
    max_error: float | None = None,
    tick: Tick = lambda name: None,
    finish: Finish | None = None,
) -> Nearest:
    """Write the plain LoRA of rank `rank` nearest to the DoRA adapter `source` on `base`.

    Args:
        source: an adapter folder.
        base: the folder of its base model.
        out: a new folder; it appears whole at the end, or not at all.
        rank: of the new adapter; layers with smaller sides get less.
        max_error: refuse, naming the worst layer, if any layer misses more of its increment.
        tick: hears the name of each layer.
        finish: gets the folder before it takes its place, see `write_merged`.

    Raises:
        HirankError: bad input (nothing is written then), or a layer above `max_error`.
    """
    folder = AdapterFolder(source)
    _check(folder, rank)
    place = new_folder(out)
    weights = BaseWeights(BaseFolder(base), folder)
    jobs = [_adapter_job(folder, weights, name) for name in folder.names]
    settings = {key: folder.settings.get(key) for key in _KEEP}
    tensors = {key: folder.tensor(key) for key in folder.others.values()}
    return _write(jobs, place, rank, max_error, settings, tensors, [], tick, finish)


def _check(folder: AdapterFolder, rank: int) -> None:
    if not folder.dora:
        raise HirankError(
            f"{folder.folder} is a plain LoRA already: serve it, or use 'hirank audit truncate' "
            "for a smaller rank."
        )
    if (obstacle := folder.obstacle()) is not None:
        raise HirankError(f"{folder.folder} cannot be exported from its files: {obstacle}.")
    _check_rank(rank)


def _check_rank(rank: int) -> None:
    if rank < 1:
        raise HirankError(f"Rank {rank} is none: give 1 or more.")


def _adapter_job(folder: AdapterFolder, weights: BaseWeights, name: str) -> _Job:
    layer = folder.layer(name)
    if groups_of(layer) > 1:
        raise HirankError(
            f"{name} is a grouped convolution, which has no LoRA of one rank: merge the adapter."
        )
    weight_shape = (layer.B.shape[0], layer.A.shape[1])

    def read() -> Iterator[Tensor]:
        held = folder.layer(name)
        weight = weights.of(held)
        gain, _ = gain_of(held, weight)
        return (rows.adapted - rows.base for rows in adapted_rows(held, weight, gain))

    return _Job(
        name,
        Blocks(weight_shape, read),
        tuple(layer.lora_A.shape[1:]),
        layer.lora_B.dim() - 2,
        layer.kind == "embedding",
    )


def lora_of_model(
    tuned: Path,
    base: Path,
    out: Path,
    *,
    rank: int,
    max_error: float | None = None,
    tick: Tick = lambda name: None,
    finish: Finish | None = None,
) -> Nearest:
    """Write the LoRA nearest to a model whose weights were all trained, or merged.

    Linears, GPT-2's Conv1D and embeddings that changed become layers of the adapter; what else
    changed is told in `left_out`. Arguments and errors as of `lora_of_adapter`.
    """
    _check_rank(rank)
    before, after = BaseFolder(base), BaseFolder(tuned)
    place = new_folder(out)
    model = meta_model(before)
    names = _Names(model)
    jobs, left_out = [], []
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{part}" if name else part
            pair = names.key_in(before, full), names.key_in(after, full)
            if not _changed(before, after, full, pair, tuple(parameter.shape)):
                continue
            if part == "weight" and _takes_lora(module):
                jobs.append(_model_job(before, after, name, pair, module))
            else:
                left_out.append(full)
    if not jobs:
        raise HirankError(f"{tuned} has the linears of {base}: there is nothing to export.")
    settings: dict[str, Any] = {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM"}
    settings |= {"fan_in_fan_out": all(_is_turned(model.get_submodule(j.name)) for j in jobs)}
    return _write(jobs, place, rank, max_error, settings, {}, left_out, tick, finish)


_Pair = tuple[str | None, str | None]
"""Keys of one parameter in the files of two models."""


class _Names:
    """Where a parameter is stored, which may be under the name of one that shares its weight.

    A LoRA of one end of a shared weight leaves the other end alone: so both ends get one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def key_in(self, folder: BaseFolder, name: str) -> str | None:
        own = self._parameters[name]
        twins = [other for other, parameter in self._parameters.items() if parameter is own]
        found = (folder.key_of(each) for each in (name, *twins))
        return next((key for key in found if key is not None), None)


def _changed(
    before: BaseFolder, after: BaseFolder, name: str, keys: _Pair, shape: tuple[int, ...]
) -> bool:
    if keys[0] is None or keys[1] is None:
        lacks = before.folder if keys[0] is None else after.folder
        raise HirankError(f"{lacks} has no {name}: give two models of one architecture.")
    one, other = before.tensor(keys[0]), after.tensor(keys[1])
    if one.shape != other.shape or tuple(one.shape) != shape:
        raise HirankError(
            f"{name} is {list(one.shape)} in {before.folder} and {list(other.shape)} in "
            f"{after.folder}: give two models of one architecture."
        )
    return not torch.equal(one.float(), other.float())


def _takes_lora(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, nn.Embedding, Conv1D)


def _is_turned(module: nn.Module) -> bool:
    """Whether its weight lies as [K, N] and PEFT wants to hear of it."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _model_job(
    before: BaseFolder, after: BaseFolder, name: str, keys: _Pair, module: nn.Module
) -> _Job:
    turned = _is_turned(module) or isinstance(module, nn.Embedding)
    shape = tuple(module.get_parameter("weight").shape)
    rows, columns = shape[::-1] if turned else shape
    height = max(1, BLOCK // columns)

    def read() -> Iterator[Tensor]:
        old, new = (f.tensor(str(key)) for f, key in zip((before, after), keys, strict=True))
        if turned:
            old, new = old.T, new.T
        starts = range(0, rows, height)
        return (new[i : i + height].float() - old[i : i + height].float() for i in starts)

    increment = Blocks((rows, columns), read)
    return _Job(name, increment, (columns,), 0, isinstance(module, nn.Embedding))


def _write(
    jobs: list[_Job],
    out: Path,
    rank: int,
    max_error: float | None,
    settings: dict[str, Any],
    tensors: dict[str, Tensor],
    left_out: list[str],
    tick: Tick,
    finish: Finish | None,
) -> Nearest:
    layers, ranks = [], {}
    for job in jobs:
        tick(job.name)
        factors = _best(job, min(rank, *job.increment.shape))
        layers.append(_error(job, *factors))
        ranks[job.name] = factors[0].shape[1]
        tensors |= _stored(job, *factors)
    found = Nearest(rank, layers, left_out)
    if max_error is not None and found.worst.error > max_error:
        raise HirankError(
            f"A LoRA of rank {rank} misses {100 * found.worst.error:.3g} % of what was trained in "
            f"{found.worst.name}, more than the {100 * max_error:.3g} % allowed: give a larger "
            "rank, or merge the adapter."
        )
    with atomic_folder(out) as draft:
        save_file(tensors, draft / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(_settings(settings, ranks), indent=2, sort_keys=True)
        (draft / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        if finish is not None:
            finish(draft)
    return found


def _best(job: _Job, rank: int) -> tuple[Tensor, Tensor]:
    """B [N, r] and A [r, K] in fp32."""
    if not math.isfinite(math.fsum(map(_squares, job.increment.read()))):
        raise HirankError(
            f"What was trained in {job.name} holds numbers that are not finite or too large for "
            "fp32: take an earlier checkpoint."
        )
    factors = largest_triples(job.increment, rank).cut(rank)
    return factors.B.float().contiguous(), factors.A.float().contiguous()


def _error(job: _Job, B: Tensor, A: Tensor) -> NearestLayer:
    missed = whole = 0.0
    row = 0
    for block in job.increment.read():
        rows = slice(row, row + block.shape[0])
        row = rows.stop
        whole += _squares(block)
        missed += _squares(block - B[rows] @ A)
    error = math.sqrt(missed / whole) if whole else 0.0
    return NearestLayer(job.name, error, math.sqrt(whole))


def _squares(block: Tensor) -> float:
    return float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2


def _stored(job: _Job, B: Tensor, A: Tensor) -> dict[str, Tensor]:
    where = f"{PREFIX}{job.name}."
    if job.embeds:
        return {f"{where}lora_embedding_A": A, f"{where}lora_embedding_B": B}
    return {
        f"{where}lora_A.weight": A.reshape(A.shape[0], *job.shape_A).contiguous(),
        f"{where}lora_B.weight": B.reshape(*B.shape, *(1,) * job.ones_B).contiguous(),
    }


def _settings(given: dict[str, Any], ranks: dict[str, int]) -> dict[str, Any]:
    """Of a plain LoRA whose alphas are its ranks: the factors hold all of it."""
    return {key: value for key, value in given.items() if value is not None} | {
        "peft_type": "LORA",
        **rank_settings(ranks, {name: float(rank) for name, rank in ranks.items()}),
        "target_modules": sorted(ranks),
        "use_dora": False,
        "bias": "none",
        "inference_mode": True,
    }

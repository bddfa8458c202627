"""The spectrum of what a full fine-tune changed, W' - W, and the floor under any adapter of it.

Both models are read in blocks of rows, side by side; memory is a few layers' worth. The floor of a
rank is what the best product of that rank misses of W' - W (Eckart-Young): no LoRA gets below it,
however it is trained. Large matrices are sketched (`partial`), so the floors told are upper bounds,
near the true ones, and of ranks above the values that were computed nothing but "at most" is known.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hirank.adapters.base_files import BaseFolder, Entry
from hirank.adapters.merge_plan import meta_model
from hirank.audit.increment import BLOCK
from hirank.audit.partial import Blocks, PartialSpectrum, largest_values
from hirank.errors import HirankError

__all__ = ["Change", "Finetune", "compare_models"]

RANK = 64
_BUFFERS = (torch.int64, torch.bool)
"""Of positions and masks, which nothing trains."""


@dataclass(frozen=True)
class Change:
    """What became of one matrix, convolutions flattened."""

    name: str
    shape: tuple[int, int]
    spectrum: PartialSpectrum
    """Of W' - W."""

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        found = self.spectrum
        return {
            "name": self.name, "shape": list(self.shape), "norm": found.norm,
            "rank_for_energy": {str(share): found.rank_for(share) for share in (0.9, 0.99)},
            "complete": found.complete, "singular_values": list(found.known.values),
        }  # fmt: skip


@dataclass(frozen=True)
class Finetune:
    """All that differs between two models of one architecture."""

    changes: list[Change]
    """Of matrices that changed, in the order of the files."""
    unchanged: list[str]
    others: list[str]
    """Vectors that changed: norms and biases, which no LoRA reaches."""
    rank: int
    """The largest one that was asked about."""

    def floor(self, rank: int) -> float:
        """What adapters of that rank on every matrix miss at best, relative to all W' - W."""
        squares = [(c.spectrum.residual(rank) ** 2, c.spectrum.energy) for c in self.changes]
        total = math.fsum(energy for _, energy in squares)
        return math.sqrt(math.fsum(s * e for s, e in squares) / total) if total else 0.0

    def ranks(self) -> list[int]:
        """Powers of two and the largest."""
        return sorted({2**i for i in range(self.rank.bit_length())} | {self.rank})

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "floor": {str(rank): self.floor(rank) for rank in self.ranks()},
            "layers": [change.as_dict() for change in self.changes],
            "unchanged": self.unchanged, "changed_vectors": self.others,
        }  # fmt: skip


def compare_models(
    base: Path, tuned: Path, *, rank: int = RANK, tick: Callable[[str], None] = lambda name: None
) -> Finetune:
    """The spectra of all that a fine-tune of all weights changed.

    Args:
        base, tuned: model folders with safetensors.
        rank: how many singular values of a large matrix are computed.
        tick: hears the name of each weight.

    Raises:
        HirankError: folders that cannot be read, names or shapes that differ, weights in few bits,
            numbers that are not finite.
    """
    before, after = BaseFolder(base), BaseFolder(tuned)
    pairs = [
        (entry, _partner(entry, before, after))
        for entry in before.entries.values()
        if entry.dtype not in _BUFFERS
    ]
    pairs += _parted(before, after, {partner.key for _, partner in pairs})
    changes, unchanged, others = [], [], []
    for entry, partner in pairs:
        tick(partner.key)
        found = _change(partner, _difference(before, entry, after, partner), rank)
        if found.spectrum.energy == 0:
            unchanged.append(found.name)
        elif len(entry.shape) < 2:
            others.append(found.name)
        else:
            changes.append(found)
    return Finetune(changes, unchanged, others, rank)


def _parted(before: BaseFolder, after: BaseFolder, paired: set[str]) -> list[tuple[Entry, Entry]]:
    """Weights of `after` alone, each with the one that it shared before, as a head that parted."""
    left = [e for e in after.entries.values() if e.key not in paired and e.dtype not in _BUFFERS]
    if not left:
        return []
    parameters = dict(meta_model(before).named_parameters(remove_duplicate=False))
    return [(_shared(entry, before, after, parameters), entry) for entry in left]


def _shared(
    entry: Entry, before: BaseFolder, after: BaseFolder, parameters: dict[str, Any]
) -> Entry:
    own = parameters.get(entry.key)
    twins = [name for name, parameter in parameters.items() if parameter is own]
    found = [key for name in twins if (key := before.key_of(name)) is not None]
    if not found or before.entries[found[0]].shape != entry.shape:
        raise HirankError(
            f"{after.folder} has {entry.key}, which {before.folder} has not: give two models of "
            "one architecture."
        )
    return before.entries[found[0]]


def _partner(entry: Entry, before: BaseFolder, after: BaseFolder) -> Entry:
    """The same weight in the other model."""
    key = after.key_of(entry.key)
    if key is None:
        raise HirankError(
            f"{after.folder} has no {entry.key}: give two models of one architecture, the base "
            "first."
        )
    other = after.entries[key]
    if other.shape != entry.shape:
        raise HirankError(
            f"{entry.key} has shape {list(entry.shape)} in {before.folder} and "
            f"{list(other.shape)} in {after.folder}: give two models of one architecture."
        )
    for folder, one in ((before, entry), (after, other)):
        if not one.dtype.is_floating_point or one.dtype.itemsize < 2:
            raise HirankError(
                f"{folder.folder} holds {one.key} as {one.dtype}: give models in bf16, fp16 or "
                "fp32."
            )
    return other


def _change(entry: Entry, blocks: Blocks, rank: int) -> Change:
    spectrum = largest_values(blocks, rank)
    if not math.isfinite(spectrum.energy):
        raise HirankError(
            f"{entry.key} holds numbers that are not finite in one of the two models: fetch it "
            "again, or take an earlier checkpoint."
        )
    return Change(entry.key.removesuffix(".weight"), blocks.shape, spectrum)


def _difference(before: BaseFolder, one: Entry, after: BaseFolder, other: Entry) -> Blocks:
    """W' - W in blocks of rows, [N, K]; of a vector [1, K]."""
    shape = _flat(one.shape)

    def read() -> Iterator[Tensor]:
        pairs = zip(_rows(before, one, shape), _rows(after, other, shape), strict=True)
        return (new.float() - old.float() for old, new in pairs)

    return Blocks(shape, read)


def _flat(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _rows(folder: BaseFolder, entry: Entry, shape: tuple[int, int]) -> Iterator[Tensor]:
    with safe_open(folder.folder / folder.where[entry.key], framework="pt") as file:
        if len(entry.shape) < 2:
            yield file.get_tensor(entry.key).reshape(shape)
            return
        rows, height = file.get_slice(entry.key), max(1, BLOCK // max(1, shape[1]))
        for start in range(0, shape[0], height):
            yield rows[start : start + height].flatten(1)

"""An adapter brought to a smaller rank by a truncated SVD, and what that costs, exactly.

    s B A  ->  s' B' A'      the r' largest singular triples: no product of that rank is nearer

s' follows from the new rank and a whole alpha near that which keeps s; what rounding alpha does is
made up for in B' and A', so s' B' A' is right to the rounding of the dtype they are stored in. The
error that is told is that of the numbers as stored.

DoRA keeps its magnitudes. The norm of W + s B A changes with B A, so the rows of the weight keep
their length, m, and lose some of their direction; with the base, the error of g (W + s B A) is told
too. A grouped convolution is cut group by group, to equal ranks, as PEFT's layer needs it.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hirank.adapters.base_files import BaseFolder, new_folder
from hirank.adapters.export import CONFIG_FILE, WEIGHTS_FILE
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.audit.base_weights import BaseWeights
from hirank.audit.factors import blocks
from hirank.audit.increment import adapted_rows, gain_of
from hirank.audit.rank import rank_settings, whole_alpha
from hirank.audit.spectrum import Factors, Spectrum, Triples, difference_norm, product_triples
from hirank.errors import HirankError
from hirank.files import atomic_folder, need_space

__all__ = ["Cut", "Truncation", "truncate"]

PREFIX = "base_model.model."
_SETTINGS_BYTES = 2**20  # more than any settings take


@dataclass(frozen=True)
class Cut:
    """What truncation did to one layer."""

    name: str
    rank: tuple[int, int]
    """Before and after."""
    norm: float
    """Frobenius, of s B A as it was."""
    error: float
    """Frobenius norm of s B A - s' B' A', as stored."""
    step_norm: float | None = None
    """Of g (W + s B A) - W, where the base is known."""
    step_error: float | None = None
    """What changes in g (W + s B A)."""

    def as_dict(self) -> dict[str, Any]:
        told = {
            "name": self.name, "rank_before": self.rank[0], "rank": self.rank[1],
            "relative_error": _ratio(self.error, self.norm),
        }  # fmt: skip
        if self.step_norm is not None and self.step_error is not None:
            told["relative_error_of_increment"] = _ratio(self.step_error, self.step_norm)
        return told


@dataclass(frozen=True)
class Truncation:
    """A truncated adapter and its errors."""

    folder: Path
    cuts: list[Cut]
    nbytes: tuple[int, int]
    """Of the weights file: before and after."""

    @property
    def error(self) -> float:
        """Of all layers together, relative to s B A."""
        return _ratio(_norm(c.error for c in self.cuts), _norm(c.norm for c in self.cuts))

    @property
    def step_error(self) -> float | None:
        """Of all layers together, relative to g (W + s B A) - W; None without a base."""
        pairs = [(c.step_error, c.step_norm) for c in self.cuts]
        if any(error is None or norm is None for error, norm in pairs):
            return None
        return _ratio(_norm(e for e, _ in pairs if e), _norm(n for _, n in pairs if n))

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "folder": str(self.folder), "relative_error": self.error,
            "relative_error_of_increment": self.step_error,
            "bytes_before": self.nbytes[0], "bytes": self.nbytes[1],
            "layers": [cut.as_dict() for cut in self.cuts],
        }  # fmt: skip


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _norm(values: Iterable[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


@dataclass(frozen=True)
class _Wish:
    """What is to be kept: one of rank and energy."""

    rank: int | None
    energy: float | None
    rslora: bool


def truncate(
    source: Path,
    out: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    base: Path | None = None,
    tick: Callable[[str], None] = lambda name: None,
) -> Truncation:
    """Write the adapter in `source`, truncated, to the folder `out`.

    Args:
        source: a LoRA or DoRA adapter in PEFT's format.
        out: a folder that is new or empty; it appears whole at the end, or not at all.
        rank: of every layer; layers that have less keep what they have, bit for bit.
        energy: instead, the least rank of each layer that keeps this share of |s B A|^2.
        base: the base model's folder, to tell the error of the adapted weight as well.
        tick: hears the name of each layer.

    The truncated adapter is held in memory until it is written; of the source, one layer.

    Raises:
        HirankError: bad input (files, rank, energy, target, base, disk); nothing is written then.
    """
    folder = AdapterFolder(source)
    wish = _Wish(rank, energy, bool(folder.settings.get("use_rslora")))
    _check(folder, wish)
    place = new_folder(out)
    weights = None if base is None else BaseWeights(BaseFolder(base), folder)
    new, cuts = {}, []
    for layer in folder:
        tick(layer.name)
        new[layer.name], cut = _shortened(layer, wish, weights)
        cuts.append(cut)
    _write(place, folder, new)
    sizes = folder.path.stat().st_size, (place / WEIGHTS_FILE).stat().st_size
    return Truncation(out, cuts, sizes)


def _check(folder: AdapterFolder, wish: _Wish) -> None:
    if (wish.rank is None) == (wish.energy is None):
        raise HirankError("Give a rank or an energy to keep, and not both.")
    if wish.energy is not None and not 0 < wish.energy < 1:
        raise HirankError(f"The energy to keep is {wish.energy:g}: give a share between 0 and 1.")
    if wish.rank is not None and wish.rank < 1:
        raise HirankError(f"Rank {wish.rank} is none: give 1 or more.")
    if (obstacle := folder.obstacle()) is not None:
        raise HirankError(f"{folder.folder} cannot be truncated: {obstacle}.")
    highest = max(layer.rank for layer in folder)  # reads everything: what is not finite is found
    if wish.rank is not None and wish.rank >= highest:
        raise HirankError(
            f"{folder.folder} has rank {highest} at most, so there is nothing to truncate to rank "
            f"{wish.rank}: give a smaller one."
        )


# One layer.


def _shortened(
    layer: AdapterLayer, wish: _Wish, base: BaseWeights | None
) -> tuple[AdapterLayer, Cut]:
    parts = blocks(layer)
    triples = [product_triples(part) for part in parts]
    pooled = _pooled(triples)
    least = pooled.rank_for(wish.energy) if wish.energy else -(-(wish.rank or 0) // len(parts))
    kept = min(max(1, least), len(pooled.values))
    new = layer if kept * len(parts) >= layer.rank else _cut(layer, triples, kept, wish.rslora)
    norm, ranks = abs(layer.scale) * pooled.norm, (layer.rank, new.rank)
    cut = Cut(layer.name, ranks, norm, _error(layer, new))
    cut = cut if base is None else _with_base(cut, layer, new, base.of(layer))
    return new, _finite(cut)


def _finite(cut: Cut) -> Cut:
    """Raises HirankError if numbers were too large for the dtype that they are in."""
    found = (cut.norm, cut.error, cut.step_norm or 0.0, cut.step_error or 0.0)
    if not all(map(math.isfinite, found)):
        raise HirankError(
            f"{cut.name} has numbers too large to be computed with: take an earlier checkpoint."
        )
    return cut


def _pooled(triples: Sequence[Triples]) -> Spectrum:
    """Values whose squares are those of all groups at that rank together."""
    squares = torch.stack([part.values.square() for part in triples]).sum(0)
    return Spectrum(tuple(squares.sqrt().tolist()))


def _error(old: AdapterLayer, new: AdapterLayer) -> float:
    """|s B A - s' B' A'|, all groups together; exactly 0 where nothing changed."""
    if new is old:
        return 0.0
    pairs = zip(blocks(old), blocks(new), strict=True)
    return math.hypot(*(difference_norm(_of(a, old), _of(b, new)) for a, b in pairs))


def _of(factors: Factors, layer: AdapterLayer) -> Factors:
    return Factors(factors.B.double() * layer.scale, factors.A)


def _cut(layer: AdapterLayer, triples: Sequence[Triples], kept: int, rslora: bool) -> AdapterLayer:
    rank = kept * len(triples)
    alpha = whole_alpha(layer.scale, rank, rslora=rslora)
    scale = alpha / math.sqrt(rank) if rslora else alpha / rank
    ratio = layer.scale / scale
    cuts = [_best(*pair, kept) for pair in zip(blocks(layer), triples, strict=True)]
    B = torch.cat([cut.B for cut in cuts]) * ratio
    A = torch.cat([cut.A for cut in cuts])
    return replace(
        layer,
        lora_A=A.reshape(rank, *layer.lora_A.shape[1:]).to(layer.lora_A.dtype),
        lora_B=B.reshape(B.shape[0], kept, *layer.lora_B.shape[2:]).to(layer.lora_B.dtype),
        bias=None if layer.bias is None else (layer.bias.double() * ratio).to(layer.bias.dtype),
        alpha=alpha,
        scale=scale,
    )


def _best(factors: Factors, triples: Triples, kept: int) -> Factors:
    """A product of zero keeps rows of A: with both factors zero it could never learn again."""
    if triples.values[0] > 0:
        return triples.cut(kept)
    return Factors(torch.zeros_like(factors.B[:, :kept]), factors.A[:kept])


def _with_base(cut: Cut, old: AdapterLayer, new: AdapterLayer, weight: Tensor) -> Cut:
    gains = gain_of(old, weight)[0], gain_of(new, weight)[0]
    step = error = 0.0
    pairs = (adapted_rows(old, weight, gains[0]), adapted_rows(new, weight, gains[1]))
    for before, after in zip(*pairs, strict=True):
        step += float((before.adapted - before.base).double().square().sum())
        error += float((after.adapted - before.adapted).double().square().sum())
    return replace(cut, step_norm=math.sqrt(step), step_error=math.sqrt(error))


# The files.


def _write(out: Path, folder: AdapterFolder, new: dict[str, AdapterLayer]) -> None:
    ranks = {name: layer.rank for name, layer in new.items()}
    alphas = {name: _plain(layer.alpha) for name, layer in new.items()}
    settings = folder.settings | rank_settings(ranks, alphas)
    tensors = _tensors(folder, new)
    need_space(out, sum(tensor.nbytes for tensor in tensors.values()) + _SETTINGS_BYTES)
    with atomic_folder(out) as draft:
        save_file(tensors, draft / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(settings, indent=2, sort_keys=True)
        (draft / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _plain(alpha: float) -> float:
    """A whole number is written as one."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _tensors(folder: AdapterFolder, new: dict[str, AdapterLayer]) -> dict[str, Tensor]:
    """All tensors of the file, those of A, B and their bias replaced."""
    with safe_open(folder.path, framework="pt") as file:
        keys = list(file.keys())
    return {key: _replaced(folder, key, new).contiguous() for key in keys}


_PART = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(\.weight|\.bias)?")


def _replaced(folder: AdapterFolder, key: str, new: dict[str, AdapterLayer]) -> Tensor:
    match = _PART.fullmatch(key.removeprefix(PREFIX))
    if match is None or match[1] not in new:
        return folder.tensor(key)
    layer = new[match[1]]
    if match[3] == ".bias" and layer.bias is not None:
        return layer.bias
    return layer.lora_A if match[2] == "A" else layer.lora_B

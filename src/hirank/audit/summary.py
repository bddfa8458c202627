"""Everything an audit found out about one adapter, and how it is grouped to be read.

AdapterFolder (, BaseFolder)  ->  audit_adapter  ->  Audit  ->  table, page, JSON
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.adapters.base_files import BaseFolder
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.adapters.merge_files import merge_matrix
from hirank.audit.base_weights import BaseWeights
from hirank.audit.factors import groups_of
from hirank.audit.gains import LayerGains, layer_gains
from hirank.audit.increment import adapted_rows, gain_of
from hirank.audit.merge import Fidelity, FidelityMeter
from hirank.audit.partial import Blocks, PartialSpectrum, largest_values
from hirank.audit.rank import LayerRank, Suggestion, layer_rank, suggest
from hirank.audit.threads import in_threads
from hirank.audit.verdicts import Verdict, gain_verdicts, merge_verdict, rank_verdicts
from hirank.errors import HirankError

__all__ = ["VALUES", "Audit", "Group", "audit_adapter", "kind_of"]

VALUES = 64
"""Singular values of the full increment that are computed."""


@dataclass(frozen=True)
class Audit:
    """An adapter's ranks and, where its base was given, gains and increments."""

    folder: Path
    settings: dict[str, Any]
    ranks: list[LayerRank]
    gains: dict[str, LayerGains] = field(default_factory=dict)
    """By layer; empty without the base."""
    increments: dict[str, PartialSpectrum] = field(default_factory=dict)
    """Spectra of g (W + s B A) - W by layer, for DoRA with its base: the largest values."""
    merge: Fidelity | None = None
    """What a merge would lose, where the base was given."""
    magnitudes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest m of each DoRA layer."""
    obstacle: str | None = None
    """Why A, B, m and the scale do not say all."""

    @property
    def dora(self) -> bool:
        return bool(self.settings.get("use_dora"))

    @property
    def norm(self) -> float:
        """Frobenius, of s B A in all layers."""
        return math.sqrt(math.fsum(layer.spectrum.energy for layer in self.ranks))

    @property
    def parameters(self) -> int:
        """In A and B."""
        return sum(layer.rank * sum(layer.shape) for layer in self.ranks)

    @property
    def step(self) -> float | None:
        """|g (W + s B A) - W| over |W|, all adapted layers; None without the base."""
        base = math.fsum(g.base_norm**2 for g in self.gains.values())
        step = math.fsum(g.step_norm**2 for g in self.gains.values())
        return math.sqrt(step / base) if base else None

    @property
    def distortions(self) -> dict[str, float]:
        """What rounding does to each layer's increment in a merge, relative; with the base."""
        return {} if self.merge is None else {x.name: x.distortion for x in self.merge.layers}

    def kept(self, rank: int) -> float:
        """Share of the energy of s B A in all layers that truncation to `rank` would keep."""
        total = self.norm**2
        kept = math.fsum(x.spectrum.kept(rank) * x.spectrum.energy for x in self.ranks)
        return kept / total if total else 1.0

    def verdicts(self) -> list[Verdict]:
        """The worst first."""
        found = rank_verdicts(self.ranks)
        if self.dora and self.gains:
            found += gain_verdicts(list(self.gains.values()))
        if self.merge is not None:
            found.append(merge_verdict(self.merge))
        if self.obstacle is not None:
            found.append(Verdict("look", "The files do not say all", f"{self.obstacle}."))
        return sorted(found, key=lambda verdict: ("bad", "look", "good").index(verdict.level))

    def suggestion(self) -> Suggestion:
        return suggest(self.ranks, self.settings)

    def groups(self) -> list["Group"]:
        """Layers of the same kind, as all q_proj, in the order of their first one."""
        found: dict[str, list[LayerRank]] = {}
        for layer in self.ranks:
            found.setdefault(kind_of(layer.name), []).append(layer)
        return [Group(kind, layers, self) for kind, layers in found.items()]

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "adapter": str(self.folder), "dora": self.dora, "parameters": self.parameters,
            "norm": self.norm, "relative_step": self.step, "obstacle": self.obstacle,
            "spectrum_of": "s B A, the direction's part" if self.dora else "s B A",
            "verdicts": [vars(verdict) for verdict in self.verdicts()],
            "suggestion": self.suggestion().as_dict(),
            "layers": [self._layer(layer) for layer in self.ranks],
        }  # fmt: skip

    def _layer(self, layer: LayerRank) -> dict[str, Any]:
        told = layer.as_dict()
        if layer.name in self.magnitudes:
            told["magnitudes"] = list(self.magnitudes[layer.name])
        if layer.name in self.gains:
            told["gains"] = self.gains[layer.name].as_dict()
        if layer.name in self.increments:
            whole = self.increments[layer.name]
            told["increment"] = {
                "norm": whole.norm,
                "residual_at_rank": whole.residual(layer.rank),
                "singular_values": list(whole.known.values),
            }
        if (distortion := self.distortions.get(layer.name)) is not None:
            told["merge_distortion"] = distortion
        return told


@dataclass(frozen=True)
class Group:
    """Layers of one kind, in medians."""

    kind: str
    layers: list[LayerRank]
    audit: Audit

    @property
    def ranks(self) -> str:
        low, high = min(x.rank for x in self.layers), max(x.rank for x in self.layers)
        return f"{low}" if low == high else f"{low}-{high}"

    @property
    def effective_rank(self) -> float:
        return statistics.median(x.spectrum.effective_rank for x in self.layers)

    @property
    def rank_for_99(self) -> float:
        return statistics.median(x.spectrum.rank_for(0.99) for x in self.layers)

    @property
    def norm(self) -> float:
        return statistics.median(x.spectrum.norm for x in self.layers)

    @property
    def uses(self) -> str:
        """`12 starved, 20 used`."""
        counted = [(use, sum(x.use == use for x in self.layers)) for use in _ORDER]
        if len(found := [pair for pair in counted if pair[1]]) == 1:
            return found[0][0]
        return ", ".join(f"{count} {use}" for use, count in found)

    @property
    def gains(self) -> list[LayerGains]:
        return [self.audit.gains[x.name] for x in self.layers if x.name in self.audit.gains]

    @property
    def step(self) -> float | None:
        """Median of |g (W + s B A) - W| over |W|."""
        found = [g.step_norm / g.base_norm for g in self.gains if g.base_norm]
        return statistics.median(found) if found else None

    @property
    def gain_span(self) -> tuple[float, float] | None:
        """The first and the last percent of all rows' gains."""
        if not self.gains:
            return None
        rows = torch.cat([g.gain for g in self.gains]).double().sort().values
        low, high = int(0.01 * (len(rows) - 1)), round(0.99 * (len(rows) - 1))
        return float(rows[low]), float(rows[high])

    def swallowed(self, dtype: torch.dtype) -> float | None:
        """Share of all rows whose gain is 1 in `dtype`."""
        found = self.gains
        rows = sum(g.rows for g in found)
        return sum(g.share(dtype) * g.rows for g in found) / rows if rows else None


_ORDER = ("untrained", "starved", "used", "idle")


def kind_of(name: str) -> str:
    """The last word of a layer's name: `q_proj` of `model.layers.0.self_attn.q_proj`."""
    words = [word for word in re.split(r"\.", name) if not word.isdigit()]
    return words[-1] if words else name


def audit_adapter(
    adapter: Path,
    base: Path | None = None,
    *,
    increments: bool = True,
    merge_dtype: torch.dtype = torch.bfloat16,
    tick: Callable[[str], None] = lambda name: None,
) -> Audit:
    """Look at every layer of an adapter, as many at a time as there are threads.

    Args:
        adapter: a LoRA or DoRA adapter in PEFT's format.
        base: the folder of its base model, for gains and the size of the step.
        increments: with a base and DoRA, compute the spectra of g (W + s B A) - W, too.
        merge_dtype: of the merge whose losses are told, where there is a base.
        tick: hears the name of each layer.

    Raises:
        HirankError: files that cannot be read or do not match, numbers that are not finite.
    """
    folder = AdapterFolder(adapter)
    if folder.settings.get("target_parameters"):
        raise HirankError(
            f"{adapter} adapts parameters (target_parameters), one product for each expert, which "
            "hirank audit does not read: give an adapter of layers (target_modules)."
        )
    weights = None if base is None else BaseWeights(BaseFolder(base), folder)
    whole = weights is not None and increments and folder.dora
    audit = Audit(
        folder=adapter,
        settings=folder.settings,
        ranks=[],
        obstacle=folder.obstacle(),
    )
    meters: list[FidelityMeter] = []

    def look(name: str) -> _Seen:
        return _look(folder.layer(name), weights, whole, merge_dtype)

    for seen in in_threads(look, folder.names):
        tick(seen.rank.name)
        _add(audit, seen)
        meters += [] if seen.merge is None else [seen.merge]
    return replace(audit, merge=FidelityMeter.joined(meters).result()) if meters else audit


class _Seen(NamedTuple):
    """What there is to know about one layer."""

    rank: LayerRank
    magnitudes: tuple[float, float] | None
    gains: LayerGains | None
    increment: PartialSpectrum | None
    merge: FidelityMeter | None


def _look(
    layer: AdapterLayer, weights: BaseWeights | None, whole: bool, merge_dtype: torch.dtype
) -> _Seen:
    rank, m = layer_rank(layer), layer.magnitude
    span = None if m is None else (float(m.min()), float(m.max()))
    if weights is None:
        return _Seen(rank, span, None, None, None)
    weight = weights.of(layer)
    increment = _increment(layer, weight, rank) if whole else None
    merge = _merged(layer, weight, merge_dtype)
    return _Seen(rank, span, layer_gains(layer, weight), increment, merge)


def _merged(layer: AdapterLayer, weight: Tensor, dtype: torch.dtype) -> FidelityMeter | None:
    """What a merge would round away; None of a grouped convolution, which takes no merge."""
    if groups_of(layer) > 1:
        return None
    meter = FidelityMeter()
    merge_matrix(weight, layer, dtype, watch=meter)
    return meter


def _increment(layer: AdapterLayer, weight: Tensor, rank: LayerRank) -> PartialSpectrum:
    gain = gain_of(layer, weight)[0]

    def rows() -> Iterator[Tensor]:
        return (part.adapted - part.base for part in adapted_rows(layer, weight, gain))

    return largest_values(Blocks(rank.shape, rows), min(VALUES, layer.rank))


def _add(audit: Audit, seen: _Seen) -> None:
    name = seen.rank.name
    audit.ranks.append(seen.rank)
    if seen.magnitudes is not None:
        audit.magnitudes[name] = seen.magnitudes
    if seen.gains is not None:
        audit.gains[name] = seen.gains
    if seen.increment is not None:
        audit.increments[name] = seen.increment

"""How much of its rank each layer of an adapter uses, and what rank it would have needed.

The spectrum is that of s B A. For LoRA that is the whole increment; for DoRA it is the direction's
part of it, and the gains are looked at apart (`gains`, and `increment` where the base is at hand).

Verdicts, from the energy (the squares of the singular values):

    untrained   B A is zero: the layer does nothing (a DoRA magnitude may still have moved)
    starved     the last tenth of the ranks holds at least half of its even share: the spectrum is
                flat to its end, so there is nothing that says where it would have stopped
    idle        a quarter of the ranks holds 99 % of the energy: three of four ranks are spare
    used        in between

A flat spectrum is what noise looks like, too. Starved says that rank was spent to the last; whether
more would help is for a run with more to tell (`hirank audit compare`).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from hirank.adapters.files import AdapterFolder, AdapterLayer, Kind
from hirank.audit.factors import whole
from hirank.audit.spectrum import Spectrum, product_values

__all__ = ["ENERGY", "LayerRank", "Suggestion", "Use", "all_ranks", "layer_rank"]
__all__ += ["rank_settings", "suggest", "whole_alpha"]

Number = TypeVar("Number", int, float)
Use = Literal["untrained", "starved", "used", "idle"]
ENERGY = 0.99
"""What is kept by default where a smaller rank is looked for: 10 % of the norm is given up."""
TAIL, EVEN = 0.1, 0.5
IDLE = 0.25


@dataclass(frozen=True)
class LayerRank:
    """What the spectrum of one layer says."""

    name: str
    kind: Kind
    shape: tuple[int, int]
    """N, K."""
    rank: int
    scale: float
    alpha: float
    spectrum: Spectrum
    dtype: str
    factors: tuple[float, float]
    """Frobenius norms of A and B."""

    @property
    def limit(self) -> int:
        """The highest rank that s B A can have."""
        return min(*self.shape, self.rank)

    @property
    def use(self) -> Use:
        found = self.spectrum
        if found.energy == 0:
            return "untrained"
        tail = max(1, round(TAIL * self.limit))
        if self.limit > 1 and 1 - found.kept(self.limit - tail) >= EVEN * tail / self.limit:
            return "starved"
        return "idle" if found.rank_for(ENERGY) <= IDLE * self.rank else "used"

    def as_dict(self) -> dict[str, Any]:
        """For machines, with all singular values."""
        found = self.spectrum
        ranks = {str(share): found.rank_for(share) for share in (0.9, 0.99, 0.999)}
        return {
            "name": self.name, "kind": self.kind, "shape": list(self.shape), "rank": self.rank,
            "alpha": self.alpha, "scale": self.scale, "dtype": self.dtype, "use": self.use,
            "norm": found.norm, "norm_A": self.factors[0], "norm_B": self.factors[1],
            "effective_rank": found.effective_rank,
            "stable_rank": found.stable_rank, "rank_for_energy": ranks,
            "singular_values": list(found.values),
        }  # fmt: skip


def layer_rank(layer: AdapterLayer) -> LayerRank:
    """The spectrum of s B A of one layer."""
    factors = whole(layer)
    return LayerRank(
        name=layer.name,
        kind=layer.kind,
        shape=(factors.B.shape[0], factors.A.shape[1]),
        rank=layer.rank,
        scale=layer.scale,
        alpha=layer.alpha,
        spectrum=product_values(factors, layer.scale),
        dtype=str(layer.lora_A.dtype).removeprefix("torch."),
        factors=(float(layer.A.double().norm()), float(layer.B.double().norm())),
    )


# What to train with next time.


@dataclass(frozen=True)
class Suggestion:
    """Settings for `LoraConfig`, with which each layer gets a rank of its own."""

    r: int
    lora_alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    parameters: tuple[int, int]
    """In A and B: now, and with these settings."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def suggest(
    layers: Sequence[LayerRank], settings: dict[str, Any], energy: float = ENERGY
) -> Suggestion:
    """A rank for each layer: what holds `energy` of it where ranks were spare, twice where starved.

    Ranks are rounded up to multiples of 8 (of 1 below that). Alphas keep each layer's scale.
    """
    ranks = {layer.name: _wanted(layer, energy) for layer in layers}
    root = bool(settings.get("use_rslora"))
    alphas: dict[str, float] = {
        layer.name: whole_alpha(layer.scale, ranks[layer.name], rslora=root) for layer in layers
    }
    made = rank_settings(ranks, alphas)
    sizes = [(sum(layer.shape), layer.rank, ranks[layer.name]) for layer in layers]
    counts = sum(s * now for s, now, _ in sizes), sum(s * then for s, _, then in sizes)
    return Suggestion(**made, parameters=counts)


def _wanted(layer: LayerRank, energy: float) -> int:
    if layer.use == "untrained":
        return layer.rank
    if layer.use == "starved":
        return max(layer.rank, min(2 * layer.rank, *layer.shape))
    least = max(1, layer.spectrum.rank_for(energy))
    return min(layer.rank, least if least < 8 else math.ceil(least / 8) * 8)


def rank_settings(ranks: dict[str, int], alphas: dict[str, float]) -> dict[str, Any]:
    """r, lora_alpha and the patterns that give each layer its rank and its alpha."""
    r, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return {
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": _patterns(ranks, r),
        "alpha_pattern": _patterns(alphas, alpha),
    }


def whole_alpha(scale: float, rank: int, *, rslora: bool) -> int:
    """The whole alpha, as PEFT declares it, with which `rank` has nearly this scale."""
    return max(1, round(scale * (math.sqrt(rank) if rslora else rank)))


def _commonest(values: Iterable[Number]) -> Number:
    return Counter(values).most_common(1)[0][0]


def _patterns(chosen: dict[str, Number], default: Number) -> dict[str, Number]:
    """Keys PEFT matches against whole names, one for all layers that differ in one number only."""
    counts = Counter(map(_numberless, chosen))
    alike: dict[tuple[str, Number], list[str]] = {}
    for name, value in chosen.items():
        if value != default:
            alike.setdefault((_numberless(name), value), []).append(name)
    return {
        _key(names, every=counts[name] == len(names)): value
        for (name, value), names in alike.items()
    }


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _numberless(name: str) -> str:
    return _NUMBER.sub("#", name, count=1)


def _key(names: Sequence[str], *, every: bool) -> str:
    """`^` keeps PEFT from taking a longer name that ends in this one for it."""
    if len(names) == 1:
        return f"^{re.escape(names[0])}"
    found = [match[0] for name in names if (match := _NUMBER.search(name))]
    numbers = r"\d+" if every else f"(?:{'|'.join(found)})"
    first = _NUMBER.search(names[0])
    assert first is not None  # names that are alike but not equal differ in their first number
    before, after = names[0][: first.start()], names[0][first.end() :]
    return f"^{re.escape(before)}{numbers}{re.escape(after)}"


def all_ranks(
    folder: AdapterFolder, tick: Callable[[str], None] = lambda name: None
) -> list[LayerRank]:
    """The spectra of all layers, one layer in memory at a time; `tick` hears each name."""
    found = []
    for layer in folder:
        tick(layer.name)
        found.append(layer_rank(layer))
    return found

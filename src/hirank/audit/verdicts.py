"""What the numbers of an audit mean, a sentence each, the worst first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hirank.audit.gains import LayerGains, collapsed
from hirank.audit.merge import Fidelity
from hirank.audit.rank import ENERGY, LayerRank

__all__ = ["Level", "Verdict", "gain_verdicts", "merge_verdict", "rank_verdicts"]

Level = Literal["bad", "look", "good"]
MOST, FEW = 0.5, 0.05
"""Of the layers: from MOST on a verdict is about the whole adapter, below FEW it is not given."""


@dataclass(frozen=True)
class Verdict:
    """One finding: `what` in a few words, `why` with its numbers and what to do."""

    level: Level
    what: str
    why: str


def rank_verdicts(layers: Sequence[LayerRank]) -> list[Verdict]:
    """On the ranks; there is always at least one."""
    count = len(layers)
    by_use = {use: [x for x in layers if x.use == use] for use in _USES}
    if len(by_use["untrained"]) == count:
        return [
            Verdict(
                "bad",
                "The adapter adds nothing",
                "B A is zero in every layer, as before the first step: take a later checkpoint, or "
                "see with hirank doctor why nothing was learnt.",
            )
        ]
    found = [
        make(by_use[use], count)
        for use, make in _MAKERS.items()
        if by_use[use] and (use == "untrained" or len(by_use[use]) >= FEW * count)
    ]
    return found or [_fits(len(by_use["used"]), count)]


def _fits(used: int, count: int) -> Verdict:
    where = f"all {_layers(count)}" if used == count else f"{used:,} of {_layers(count)}"
    return Verdict(
        "good", "Rank fits", f"In {where} the last ranks hold little, and few are spare."
    )


def _untrained(layers: Sequence[LayerRank], count: int) -> Verdict:
    why = (
        f"B A is zero in {_of(layers, count)}, {layers[0].name} first: their ranks are for nothing."
    )
    return Verdict("look", "Some layers were not trained", why)


def _starved(layers: Sequence[LayerRank], count: int) -> Verdict:
    most = len(layers) >= MOST * count
    return Verdict(
        "look",
        "Rank is used to the last" if most else "Some layers use their rank to the last",
        f"In {_of(layers, count)} the spectrum is flat to its end, {layers[0].name} first: a "
        "higher rank might learn more, or this is noise. Rule out data and learning rate first; "
        "hirank audit compare decides it from two runs.",
    )


def _idle(layers: Sequence[LayerRank], count: int) -> Verdict:
    most = len(layers) >= MOST * count
    now = sum(layer.rank for layer in layers)
    enough = sum(max(1, layer.spectrum.rank_for(ENERGY)) for layer in layers)
    return Verdict(
        "look" if most else "good",
        "Rank to spare" if most else "Some layers have rank to spare",
        f"In {_of(layers, count)} a quarter of the ranks holds 99 % of the energy; {enough:,} of "
        f"their {now:,} ranks would do. hirank audit truncate --energy 0.99 makes the adapter "
        "smaller and tells the error.",
    )


_USES = ("untrained", "starved", "used", "idle")
_MAKERS = {"untrained": _untrained, "starved": _starved, "idle": _idle}


def gain_verdicts(layers: Sequence[LayerGains]) -> list[Verdict]:
    """On the gains of a DoRA adapter; there is always at least one."""
    rows = sum(layer.rows for layer in layers)
    gain = torch.cat([layer.gain for layer in layers])
    unmoved, dead = (sum(getattr(x, what) for x in layers) for what in ("unmoved", "dead"))
    swallowed = int(collapsed(gain, torch.bfloat16).sum())
    found = []
    if unmoved >= MOST * rows:
        found.append(_unmoved(unmoved, rows))
    if dead:
        first = next(layer.name for layer in layers if layer.dead)
        found.append(
            Verdict(
                "look",
                "Dead rows",
                f"{dead:,} of {rows:,} rows give zero whatever the input (m = 0, or a weight of "
                f"zero), in {first} first.",
            )
        )
    if swallowed >= MOST * rows:
        found.append(_swallowed(swallowed, rows))
    return found or [
        Verdict(
            "good",
            "Gains are large enough for bf16",
            f"Rounded to bf16, {swallowed:,} of {rows:,} gains are 1.",
        )
    ]


def _unmoved(unmoved: int, rows: int) -> Verdict:
    return Verdict(
        "look",
        "Magnitudes did not move",
        f"{unmoved:,} of {rows:,} are still the norm of their row of W: the adapter turned rows "
        "and kept their length. Was m frozen, or kept in a dtype that rounds its steps away?",
    )


def _swallowed(swallowed: int, rows: int) -> Verdict:
    return Verdict(
        "look",
        "Gains are too near 1 for bf16",
        f"Rounded to bf16, {swallowed:,} of {rows:,} gains are 1 and their effect is gone. hirank "
        "and PEFT keep m in fp32; anything else that serves this adapter has to do so, too.",
    )


def merge_verdict(merge: Fidelity) -> Verdict:
    """On merging the adapter into its base, from the weights alone."""
    worst = merge.worst
    why = (
        f"The increments would be off by {100 * merge.total.distortion:.3g} % RMS, most in "
        f"{worst.name} ({100 * worst.distortion:.3g} %)"
    )
    if merge.verdict == "safe":
        return Verdict("good", f"Safe to merge to {merge.dtype}", f"{why}.")
    word = "loses much" if merge.verdict == "destroyed" else "loses something"
    return Verdict(
        "look",
        f"A merge to {merge.dtype} {word}",
        f"{why}. How much of that the model feels is what hirank merge measures, with --check on "
        "your prompts.",
    )


def _layers(count: int) -> str:
    return f"{count:,} layer{'' if count == 1 else 's'}"


def _of(layers: Sequence[LayerRank], count: int) -> str:
    return f"{len(layers):,} of {_layers(count)}"

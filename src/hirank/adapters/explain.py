"""What an adapted layer does, in words: the record behind `hirank.explain`."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Explanation", "Route", "Row"]


class Route(NamedTuple):
    """Which way a layer takes, and why."""

    tier: str  # "owned", "composed" or "peft"
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One adapted layer in an `Explanation`."""

    name: str
    kind: str
    """"lora", "dora", or the name of another variant."""
    tier: str
    """"fused training", "fused inference", "eager": hirank computes the whole layer, by Triton
    kernels or plain PyTorch. "composed": the base layer's output, joined by hirank. "peft": PEFT's
    own code."""
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which way every adapted layer takes, and why; print it for a table."""

    rows: tuple[Row, ...]

    def summary(self) -> str:
        """One line: how many layers take which way."""
        tiers = [row.tier for row in self.rows]
        counts = ", ".join(f"{tiers.count(tier)} {tier}" for tier in dict.fromkeys(tiers))
        return f"{len(self.rows)} adapted layers: {counts or 'none'}"

    def __str__(self) -> str:
        width = max([len(row.name) for row in self.rows], default=0)
        tier = max([len(row.tier) for row in self.rows], default=0)
        lines = [f"{r.name:<{width}}  {r.kind:<5} {r.tier:<{tier}}  {r.reason}" for r in self.rows]
        return "\n".join([*lines, self.summary()])

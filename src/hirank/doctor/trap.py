"""One trap: a function from what is examined to the evidence that it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hirank.doctor.finding import Finding, Level
from hirank.doctor.subject import Subject

__all__ = ["Trap", "several", "trap"]

Look = Callable[[Subject], str | None]


@dataclass(frozen=True)
class Trap:
    """What is wrong, how it is seen, and what to do about it."""

    level: Level
    title: str
    fix: str
    source: str
    name: str
    look: Look
    """Returns the evidence, None where the trap is not met or cannot be judged."""

    def examine(self, subject: Subject) -> Finding | None:
        """The finding, if the trap is met."""
        evidence = self.look(subject)
        if evidence is None:
            return None
        return Finding(self.level, self.title, evidence, self.fix, self.source, self.name)


def trap(level: Level, title: str, *, fix: str, source: str) -> Callable[[Look], Trap]:
    """Make a Trap of a function; the function's name is the trap's, with hyphens."""

    def make(look: Look) -> Trap:
        return Trap(level, title, fix, source, look.__name__.replace("_", "-"), look)

    return make


def several(names: Iterable[str], shown: int = 3) -> str:
    """The first few of many names, and how many more there are."""
    listed = list(dict.fromkeys(names))
    more = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {more} more" if more > 0 else "")

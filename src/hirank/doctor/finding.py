"""What the doctor finds, and how it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "Report"]

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One trap that was met."""

    level: Level
    """error: training would not do what is meant. warning: it would, at a price."""
    title: str
    """The trap in one sentence."""
    evidence: str
    """What was computed here: numbers and names."""
    fix: str
    """What to change, in one line."""
    source: str
    """Who reported it, or where it is described."""
    name: str
    """The trap's name in docs/doctor.md."""

    def __str__(self) -> str:
        lines = (f"{self.level}: {self.title} [{self.name}]", f"  found: {self.evidence}")
        return "\n".join((*lines, f"  fix:   {self.fix}", f"  see:   {self.source}"))


@dataclass(frozen=True)
class Report:
    """All findings, errors first; true if there is any."""

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    """What could be examined, such as model, optimizer, adapter folder."""

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.findings), self._summary()])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON knows it."""
        return {
            "looked_at": list(self.looked_at),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def _summary(self) -> str:
        levels = [finding.level for finding in self.findings]
        counts = [f"{n} {level}{'s' * (n > 1)}" for level in ("error", "warning")
                  if (n := levels.count(level))]  # fmt: skip
        return f"{', '.join(counts) or 'Nothing found'}; looked at {', '.join(self.looked_at)}."

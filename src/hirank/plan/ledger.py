"""The answer of both engines: bytes by class in each phase of a step.

    Ledger = {phase: {class: bytes}}        peak = the phase whose classes add up to most

All bytes are of one GPU. `allocated` is what torch.cuda.max_memory_allocated would say, `reserved`
what the caching allocator holds for that, `process` what nvidia-smi shows: three different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = [
    "CLASSES",
    "ESTIMATED",
    "PHASES",
    "WORKSPACES",
    "Ledger",
    "Overhead",
    "Term",
    "ledger_of",
]

CLASSES = (
    "weights",
    "quantised weights",
    "adapters",
    "gradients",
    "optimizer state",
    "activations kept",
    "recomputation peak",
    "logits and loss",
    "method temporaries",
    "communication buffers",
)
"""Every byte belongs to one."""

PHASES = (
    "load",
    "forward end",
    "loss backward",
    "block backward",
    "optimizer step",
    "refresh step",
    "evaluation",
    "save",
)
"""The moments of a step at which a peak can be. `optimizer step` is one with moments made already:
the second one; `refresh step` is that of a low-rank optimiser that also replaces a basis."""

WORKSPACES = 2 * 32 * 2**20
"""cuBLAS's on Hopper, which PyTorch's allocator counts: one for each thread that multiplies, that
of the forward and that of the backward pass. Older GPUs need a quarter."""

CONTEXT = 600 * 2**20
"""Of a CUDA context with torch's kernels on a data-centre card; it is measured, and varies."""

SEGMENT = 1.03
"""Reserved over allocated: segments of 2 and 20 MiB that are not full."""


@dataclass(frozen=True)
class Overhead:
    """What comes on top of a run's own tensors."""

    segment: float = SEGMENT
    """Reserved over allocated."""
    context: int = CONTEXT
    """Bytes of CUDA and its libraries, which no allocator counts."""
    workspaces: int = WORKSPACES
    """Bytes of cuBLAS's, allocated like tensors; 0 on a CPU."""
    runs: int = 0
    """On this machine, in which it was measured; 0: it is an estimate."""
    gpu: str = ""
    """Of these runs."""


ESTIMATED = Overhead()


@dataclass(frozen=True)
class Term:
    """One summand: which class, in which phases, how many bytes, and why."""

    kind: str
    phases: tuple[str, ...]
    size: int
    formula: str
    """With its numbers, such as `28 layers x 4096 tokens x 3584 x 2 bytes`."""


@dataclass(frozen=True)
class Ledger:
    """Bytes of one GPU by phase and class; classes that are 0 may be left out."""

    phases: Mapping[str, Mapping[str, int]]
    terms: tuple[Term, ...] = ()
    """Where the bytes come from, if the engine can say so."""
    notes: tuple[str, ...] = field(default=())
    """What is assumed, and what cannot be known, with a bound."""
    overhead: Overhead = ESTIMATED
    """For `reserved` and `process`; the phases do not depend on it."""

    def total(self, phase: str) -> int:
        """Bytes allocated at the peak of a phase; 0 for one that does not happen."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def moment(self) -> str:
        """The phase of the peak."""
        return max((p for p in PHASES if p in self.phases), key=self.total)

    @property
    def allocated(self) -> int:
        """The peak: bytes in tensors."""
        return self.total(self.moment)

    @property
    def dominating(self) -> str:
        """The class that is largest at the peak."""
        at_peak = self.phases[self.moment]
        return max(at_peak, key=lambda kind: at_peak[kind])

    @property
    def reserved(self) -> int:
        """An estimate of what the caching allocator takes for it."""
        return round(self.allocated * self.overhead.segment)

    @property
    def process(self) -> int:
        """An estimate of what the GPU lacks for others: reserved, libraries and CUDA context."""
        return self.reserved + self.overhead.context

    def at_peak(self) -> dict[str, int]:
        """Bytes by class at the peak, the classes in their order, without zeros."""
        found = self.phases[self.moment]
        return {kind: found[kind] for kind in CLASSES if found.get(kind)}

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "process": self.process,
            "overhead": vars(self.overhead),
            "moment": self.moment,
            "dominating": self.dominating,
            "phases": {phase: dict(kinds) for phase, kinds in self.phases.items()},
            "terms": [vars(term) | {"phases": list(term.phases)} for term in self.terms],
            "notes": list(self.notes),
        }


def ledger_of(
    terms: Iterable[Term], notes: Iterable[str] = (), overhead: Overhead = ESTIMATED
) -> Ledger:
    """Add up terms, phase by phase."""
    kept = tuple(term for term in terms if term.size)
    phases: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        here = [term for term in kept if phase in term.phases]
        for term in here:
            found = phases.setdefault(phase, {})
            found[term.kind] = found.get(term.kind, 0) + term.size
    return Ledger(phases, kept, tuple(notes), overhead)

"""What runs on this machine really needed, beside what was planned for them.

    ~/.cache/hirank/plan-calibration.jsonl      a run a line, the newest last, KEPT lines at most

`hirank train` adds a line after a run on a GPU; `hirank plan` takes from it what comes on top of
tensors, and says how far plans were off. What is planned for tensors never changes by it. A line
has sizes, settings and versions: no path, no name of a model or of data. Lines that cannot be read
are passed over, and the file may be deleted at any time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hirank.errors import HirankError
from hirank.files import write_text
from hirank.kernels._tuning_store import _cache_folder
from hirank.plan.inventory import Shape
from hirank.plan.ledger import Overhead
from hirank.plan.setting import Setting

__all__ = [
    "ENOUGH",
    "KEPT",
    "Measured",
    "calibration_file",
    "facts_of",
    "off_line",
    "overhead_of",
    "recall",
    "remember",
]

KEPT = 200
"""Runs in the file: 0.2 MB."""

ENOUGH = 3
"""Runs from which on what they needed counts more than an estimate."""

_MOST_CONTEXT = 4 * 2**30  # more than this is another process, not CUDA


@dataclass(frozen=True)
class Measured:
    """One run on one GPU, in bytes."""

    date: str
    gpu: str
    capacity: int
    model: dict[str, Any]
    """Architecture and number of parameters."""
    setting: dict[str, Any]
    versions: dict[str, str]
    planned: int
    """In tensors at the peak."""
    allocated: int
    """The same as measured: torch.cuda.max_memory_allocated."""
    reserved: int
    """By PyTorch's allocator at its most."""
    process: int | None
    """Reserved and what CUDA and its libraries took at the end; None where it could not be told."""

    @property
    def off(self) -> float:
        """By what share more was needed than planned."""
        return self.allocated / self.planned - 1

    @property
    def context(self) -> int | None:
        """Bytes of CUDA and its libraries."""
        return None if self.process is None else self.process - self.reserved


def calibration_file() -> Path | None:
    """Where the measurements are if nothing else is said; None for a user without a home."""
    folder = _cache_folder()
    return None if folder is None else folder / "hirank" / "plan-calibration.jsonl"


def facts_of(setting: Setting, shape: Shape) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model, setting) of a line: what memory depends on, without a name of anybody's."""
    said = asdict(setting)
    del said["model"]
    said["targets"] = setting.targets if setting.targets == "all-linear" else "chosen"
    return {"kind": shape.model_type, "parameters": shape.parameters}, said


# The file.


def remember(path: Path, new: Measured) -> None:
    """Add a line and drop the oldest beyond KEPT; the file is whole at any time.

    Of two processes that end in the same instant, one line may be lost.

    Raises:
        HirankError: the file cannot be written.
    """
    lines = [*recall(path), new][-KEPT:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HirankError(
            f"{path.parent} cannot be made ({error.strerror}): name another file with "
            "run.calibration."
        ) from error
    write_text(path, "".join(json.dumps(asdict(line)) + "\n" for line in lines))


def recall(path: Path) -> list[Measured]:
    """The measurements in a file, oldest first; none if there is no file that can be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [found for line in text.splitlines() if (found := _read(line)) is not None]


def _read(line: str) -> Measured | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    names = {field.name for field in fields(Measured)}
    if not isinstance(values, dict) or set(values) != names or not _sound(values):
        return None
    return Measured(**values)


def _sound(values: dict[str, Any]) -> bool:
    sizes = [values[name] for name in ("capacity", "planned", "allocated", "reserved")]
    sizes += [] if values["process"] is None else [values["process"]]
    texts, tables = (values["date"], values["gpu"]), (values["model"], values["setting"])
    return (
        all(type(size) is int and 0 < size < 2**50 for size in sizes)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(table, dict) for table in (*tables, values["versions"]))
        and type(values["model"].get("parameters")) is int
    )


# What it says.


def overhead_of(found: Sequence[Measured]) -> Overhead | None:
    """What comes on top of tensors on the GPU of the newest run; None from fewer than ENOUGH."""
    here = [run for run in found if run.gpu == found[-1].gpu]
    contexts = [run.context for run in here if run.context is not None]
    contexts = [size for size in contexts if 0 < size < _MOST_CONTEXT]
    if min(len(here), len(contexts)) < ENOUGH:
        return None
    segment = statistics.median(run.reserved / run.allocated for run in here)
    context = round(statistics.median(contexts))
    return Overhead(segment=segment, context=context, runs=len(here), gpu=here[-1].gpu)


def off_line(found: Sequence[Measured], method: str) -> str | None:
    """`12 runs of dora on this machine: measured +0.4 % of planned (-0.1 to +1.2 %)`."""
    same = [100 * run.off for run in found if run.setting.get("method") == method]
    if not same:
        return None
    runs = f"{len(same)} run{'s' if len(same) > 1 else ''} of {method} on this machine"
    spread = f" ({min(same):+.1f} to {max(same):+.1f} %)" if len(same) > 1 else ""
    return f"{runs}: measured {statistics.median(same):+.1f} % of planned{spread}"

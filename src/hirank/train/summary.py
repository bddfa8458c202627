"""What a run folder says about its run: the facts that the report and the model card share.

Only `log.jsonl`, `config.yaml` and `versions.json` are read, and any fact may be missing: a run
may have had no evaluation, no samples, no step at all, or have been interrupted.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from hirank.errors import HirankError
from hirank.train.runlog import Event, current_events, read_events

__all__ = ["Change", "Sample", "Summary", "load_summary"]


@dataclass(frozen=True)
class Change:
    """One measure at two moments; `before` is None if it was measured only once."""

    before: float | None
    after: float
    step: int
    """Optimizer step of `after`."""


@dataclass(frozen=True)
class Sample:
    """One prompt with its expected answer and what the model wrote before and after training."""

    prompt: str
    expected: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Summary:
    """A run as its folder tells it. Bytes, seconds, tokens; shares are of 1."""

    run_dir: Path
    config_text: str
    versions: dict[str, str]
    events: list[Event]
    """Events that stand, see `hirank.train.runlog`."""
    seconds: float
    """Wall time of all sessions, interruptions between them left out."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved settings, by section."""
        loaded = yaml.safe_load(self.config_text) or {}
        return loaded if isinstance(loaded, dict) else {}

    @cached_property
    def start(self) -> Event:
        """What the start events say; the latest session has the last word."""
        return {name: value for event in self._of("start") for name, value in event.items()}

    @cached_property
    def end(self) -> Event | None:
        """The end event, or None if the run still goes on or died."""
        return next(reversed(self._of("end")), None)

    @cached_property
    def steps(self) -> list[Event]:
        """Step events in order."""
        return sorted(self._of("step"), key=_step)

    @cached_property
    def evals(self) -> list[Event]:
        """Evaluations in order."""
        return sorted(self._of("eval"), key=_step)

    @property
    def last_step(self) -> int:
        """Optimizer steps done."""
        return max((event["step"] for event in self.events), default=0)

    @property
    def began(self) -> datetime | None:
        """When the first session started."""
        starts = self._of("start")
        return _time(starts[0]) if starts else None

    def value(self, section: str, name: str, default: Any = None) -> Any:
        """A setting, `default` if the configuration does not have it."""
        part = self.config.get(section)
        return part.get(name, default) if isinstance(part, dict) else default

    @property
    def model_name(self) -> str:
        """Hub name or folder of the base model, as it was given."""
        return str(self.start.get("model") or self.value("model", "name") or "unknown model")

    @property
    def exact_match(self) -> Change | None:
        """Share of held-out answers generated exactly: first and last measurement."""
        found = _measured(self.evals, "exact_match")
        return _change(found, "exact_match", found[-1]) if found else None

    @property
    def eval_loss(self) -> Change | None:
        """Loss on held-out data: first and lowest."""
        found = _measured(self.evals, "eval_loss")
        if not found:
            return None
        return _change(found, "eval_loss", min(found, key=lambda e: float(e["eval_loss"])))

    @property
    def train_loss(self) -> Change | None:
        """Loss on the training data: first and last logged."""
        found = _measured(self.steps, "loss")
        return _change(found, "loss", found[-1]) if found else None

    @property
    def tokens_per_s(self) -> float | None:
        """Median training speed."""
        speeds = [event["tokens_per_s"] for event in _measured(self.steps, "tokens_per_s")]
        return median(speeds) if speeds else None

    @property
    def tokens(self) -> int | None:
        """Tokens trained on."""
        counts = [event["tokens"] for event in _measured(self.steps, "tokens")]
        return counts[-1] if counts else None

    @property
    def peak_memory(self) -> int | None:
        """Largest memory seen, in bytes."""
        peaks = [event["peak_memory_bytes"] for event in _measured(self.steps, "peak_memory_bytes")]
        return max(peaks, default=None)

    @property
    def nonfinite_step(self) -> int | None:
        """The first step whose loss was NaN or infinite."""
        bad = (e["step"] for e in self.steps if not math.isfinite(e.get("loss") or 0.0))
        return next(bad, None)

    @property
    def skipped(self) -> int:
        """Steps of single parameters left out because their gradient was not finite."""
        return max((event.get("skipped") or 0 for event in self.steps), default=0)

    @property
    def optimizer(self) -> str | None:
        """What the log says of a low-rank optimiser: class, projected parameters, bytes."""
        told = self.start.get("optimizer")
        return str(told["text"]) if isinstance(told, dict) and "text" in told else None

    @property
    def samples(self) -> list[Sample]:
        """Prompts in the order of the log, each with both outputs where they exist."""
        rows: dict[str, dict[str, str]] = {}
        for event in self._of("sample"):
            row = rows.setdefault(str(event.get("prompt", "")), {})
            row["expected"] = str(event.get("expected") or "")
            row[str(event.get("phase"))] = str(event.get("output") or "")
        return [
            Sample(prompt, row["expected"], row.get("before"), row.get("after"))
            for prompt, row in rows.items()
        ]

    def _of(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


def load_summary(run_dir: Path) -> Summary:
    """Read a run folder. Raises HirankError if it has no readable log."""
    written = read_events(run_dir / "log.jsonl")
    events = current_events(written)
    return Summary(
        run_dir=run_dir,
        config_text=_config_text(run_dir, events),
        versions=_versions(run_dir, events),
        events=events,
        seconds=_seconds(written),
    )


def _config_text(run_dir: Path, events: Iterable[Event]) -> str:
    path = run_dir / "config.yaml"
    if path.is_file():
        return _checked_yaml(path)
    config = _from_start(events, "config")
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""


def _checked_yaml(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HirankError(f"{path} is not valid YAML: restore the file of the run.") from error
    return text


def _versions(run_dir: Path, events: Iterable[Event]) -> dict[str, str]:
    path = run_dir / "versions.json"
    if not path.is_file():
        return _flat(_from_start(events, "versions") or {})
    try:
        return _flat(json.loads(path.read_bytes()))
    except ValueError as error:
        raise HirankError(f"{path} is not JSON: delete it to go on without versions.") from error


def _flat(versions: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(versions, dict):
        return {prefix or "version": str(versions)}
    flat: dict[str, str] = {}
    for name, value in versions.items():
        flat |= _flat(value, f"{prefix} {name}".strip())
    return flat


def _from_start(events: Iterable[Event], name: str) -> Any:
    found = [event[name] for event in events if event["event"] == "start" and name in event]
    return found[-1] if found else None


def _seconds(written: list[Event]) -> float:
    """Each session lasts from its start event to the last event before the next start."""
    total, began, last = 0.0, None, None
    for event in written:
        now = _time(event)
        if event["event"] == "start":
            total += (last - began).total_seconds() if began and last else 0.0
            began = now
        last = now or last
    return total + ((last - began).total_seconds() if began and last else 0.0)


def _time(event: Event) -> datetime | None:
    text = event.get("time")
    return datetime.fromisoformat(text) if isinstance(text, str) else None


def _measured(events: list[Event], name: str) -> list[Event]:
    """Events in which `name` is a finite number."""
    return [e for e in events if isinstance(e.get(name), int | float) and math.isfinite(e[name])]


def _change(found: list[Event], name: str, after: Event) -> Change:
    before = float(found[0][name]) if len(found) > 1 else None
    return Change(before, float(after[name]), after["step"])


def _step(event: Event) -> int:
    return int(event["step"])

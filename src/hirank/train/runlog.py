"""The log of a run: `log.jsonl`, one JSON object a line, flushed as it is written.

    {"event": "step", "time": "2026-11-29T20:11:05.120+00:00", "step": 12, "loss": 1.25, ...}

event    start, step, eval, sample, checkpoint or end
step     optimizer steps done when it was written
A resumed run appends. `read_events` gives all that was written, `read_log` what still stands.
"""

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from hirank.errors import HirankError

__all__ = ["Event", "RunLog", "current_events", "read_events", "read_log"]

Event = dict[str, Any]
EventName = Literal["start", "step", "eval", "sample", "checkpoint", "end"]


class RunLog:
    """Appends events to `log.jsonl`, each flushed as it is written.

    Opening a log that ends in a torn line (the process died while writing) drops that line.
    NaN and infinity, which JSON lacks, become null, and the event's `nonfinite` names them;
    `read_log` puts them back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error

    def append(self, event: EventName, step: int, **fields: Any) -> Event:
        """Write one event, stamped with the time (UTC, ISO 8601), and return it.

        Raises HirankError when the line cannot be written, for instance on a full disk.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row: Event = {"event": event, "time": now, "step": step, **fields}
        line = json.dumps(_without_nonfinite(row), ensure_ascii=False, default=_plain)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return row

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_log(path: Path) -> list[Event]:
    """The events that stand: what a resumed run did over replaces what it had done before."""
    return current_events(read_events(path))


def read_events(path: Path) -> list[Event]:
    """Every event of a log in the order of writing; a torn last line is left out.

    Raises HirankError when the file cannot be read or a line before the last is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HirankError(
            f"{path} cannot be read ({error.strerror}): give the folder of a run."
        ) from error
    *whole, last = lines
    events = [_parse(line, path, number) for number, line in enumerate(whole, 1) if line.strip()]
    return events if _is_torn(last) else [*events, _parse(last, path, len(lines))]


def current_events(events: Iterable[Event]) -> list[Event]:
    """Keep the last event per (event, step); a start drops all that lay beyond its step.

    Evaluations of one step are merged field by field, so that loss and exact match may be
    logged apart. Samples are told apart by phase and prompt as well.
    """
    kept: dict[tuple[object, ...], Event] = {}
    for event in events:
        if event["event"] == "start":
            kept = {key: old for key, old in kept.items() if _survives(old, event["step"])}
        key = _key(event)
        before = kept.pop(key, {})
        kept[key] = {**before, **event} if event["event"] == "eval" else event
    return list(kept.values())


def _survives(event: Event, start: int) -> bool:
    return bool(event["step"] <= start) and event["event"] != "end"


def _key(event: Event) -> tuple[object, ...]:
    if event["event"] == "sample":
        return ("sample", event.get("phase"), event.get("prompt"))
    return (event["event"], event["step"])


def _parse(line: bytes, path: Path, number: int) -> Event:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not {"event", "step"} <= row.keys():
        raise HirankError(
            f"{path}:{number} is not an event of a run: restore the file or delete that line."
        )
    names = row.pop("nonfinite", {})
    return row | {name: float(value) for name, value in names.items()}


def _is_torn(line: bytes) -> bool:
    try:
        return not isinstance(json.loads(line), dict)
    except ValueError:
        return True


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        last = data[data.rfind(b"\n") + 1 :]
        if last and _is_torn(last):
            file.truncate(len(data) - len(last))
        elif last:
            file.write(b"\n")


def _without_nonfinite(row: Event) -> Event:
    odd = {name: str(value) for name, value in row.items() if _is_nonfinite(value)}
    flat = {name: None if name in odd else _finite(value) for name, value in row.items()}
    return flat | {"nonfinite": odd} if odd else flat


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _finite(value: Any) -> Any:
    """Non-finite numbers deep inside an event (a setting, say) are written as text."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if _is_nonfinite(value) else value


def _plain(value: Any) -> Any:
    """JSON form of what json does not know: scalars of torch and NumPy, else their text."""
    return value.item() if hasattr(value, "item") else str(value)


def _unwritable(path: Path, error: OSError) -> HirankError:
    return HirankError(
        f"{path} cannot be written ({error.strerror}): free the disk or choose another run.dir."
    )

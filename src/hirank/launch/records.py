"""What was converted: written by the processes of a run, read by the parent, told in words.

A record is a JSON object: pid, rank, model (its place among the models of that process), stage
("created", "ran"), versions, layers: a list of {name, kind, tier, reason} as `hirank.explain` has.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["NOTHING", "read_records", "sentence", "table", "write_record"]

Record = dict[str, Any]
Layer = dict[str, str]

NOTHING = "hirank: no LoRA or DoRA layer was created in this run"
KINDS = {"lora": "LoRA", "dora": "DoRA"}


def write_record(folder: Path, record: Record) -> None:
    """Write a record whole or not at all. A run that is over reads no more: its folder is gone."""
    file = folder / f"{record['pid']}-{record['model']}.json"
    if not folder.is_dir():
        return
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(record), encoding="utf-8")
    os.replace(draft, file)


def read_records(folder: Path) -> list[Record]:
    """All records, by rank, process and model."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(records, key=lambda record: (record["rank"], record["pid"], record["model"]))


def sentence(layers: Iterable[Layer]) -> str:
    """One line: how many layers of which kind were converted, and why others were not."""
    layers = list(layers)
    ours = [layer for layer in layers if layer["tier"] != "peft"]
    left = [layer for layer in layers if layer["tier"] == "peft"]
    kinds = Counter(KINDS.get(layer["kind"], layer["kind"]) for layer in ours)
    ways = Counter(layer["tier"] for layer in ours)
    reasons = Counter(layer["reason"] for layer in left)
    what = " and ".join(f"{count} {kind}" for kind, count in kinds.items()) or "0 LoRA or DoRA"
    noun = "layer" if len(ours) == 1 else "layers"
    return (
        f"hirank: {what} {noun} converted{_counted(ways)}, "
        f"{len(left)} left to PEFT{_counted(reasons, always=True)}"
    )


def _counted(counts: "Counter[str]", *, always: bool = False) -> str:
    """' (3 this, 1 that)'; ' (this)' where there is only one and its number has been said."""
    if not counts:
        return ""
    if len(counts) == 1 and not always:
        return f" ({next(iter(counts))})"
    return f" ({'; '.join(f'{count}: {text}' for text, count in counts.items())})"


def table(layers: Iterable[Layer]) -> str:
    """One line a layer: name, kind, way and reason."""
    rows = [(layer["name"], layer["kind"], layer["tier"], layer["reason"]) for layer in layers]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )

"""Markdown tables made from results files, so that a number in a text cannot drift.

A text marks the place; everything between the two lines is replaced:

    <!-- results: nvidia-h200/model rank=384 checkpointing=on -->
    <!-- /results -->

The name is a results file without its ending; settings after it, and arm=..., choose among its
records. Where a measurement was repeated, the newest counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hirank.bench.record import read
from hirank.errors import HirankError

__all__ = ["filled", "table", "written"]

Records = Sequence[dict[str, Any]]
_BLOCK = re.compile(r"(<!-- results: *([^\s>]+)([^>]*?) *-->\n)(.*?)(<!-- /results -->)", re.S)


class Column(NamedTuple):
    """A heading, where its number is, and how it is written."""

    title: str
    path: str
    write: Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.3g}" if value < 0.1 else f"{value * 1e3:,.0f}"


def _times(value: float) -> str:
    return f"{value:.2f} ×"


def _number(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _scaled(unit: float) -> Callable[[float], str]:
    return lambda value: f"{value / unit:,.3g}" if value < 1000 * unit else f"{value / unit:,.0f}"


def _error(value: float) -> str:
    return f"{value:.0e}"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


COLUMNS = (
    Column("step ms", "wall_s.p50", _milliseconds),
    Column("GPU busy ms", "busy_s", _milliseconds),
    Column("of it products and attention ms", "matrix_s", _milliseconds),
    Column("launches", "launches", _number),
    Column("wall / busy", "wall_over_busy", _number),
    Column("refresh step ms", "refresh_s.p50", _milliseconds),
    Column("slowest refresh step ms", "refresh_s.max", _milliseconds),
    Column("first step ms", "first_step_s", _milliseconds),
    Column("forward + backward ms", "both_s.p50", _milliseconds),
    Column("forward ms", "forward_s.p50", _milliseconds),
    Column("backward ms", "backward_s.p50", _milliseconds),
    Column("call ms", "call_s.p50", _milliseconds),
    Column("× PEFT LoRA", "ratio.peft-lora", _times),
    Column("× PEFT DoRA", "ratio.peft-dora", _times),
    Column("× frozen base", "ratio.base", _times),
    Column("× 8-bit AdamW", "ratio.adamw-8bit", _times),
    Column("× AdamW", "ratio.adamw", _times),
    Column("× matmul", "ratio.matmul", _times),
    Column("tokens/s", "tokens_per_s.p50", _number),
    Column("TFLOP/s", "rate.p50", _scaled(1e12)),
    Column("GB/s", "bytes_per_s.p50", _scaled(1e9)),
    Column("peak GB", "peak_bytes", _scaled(1e9)),
    Column("peak without a refresh GB", "plain_peak_bytes", _scaled(1e9)),
    Column("weights GB", "weight_bytes", _scaled(1e9)),
    Column("rank of the state", "rank", _number),
    Column("state MB", "state_bytes", _scaled(1e6)),
    Column("state by formula MB", "formula_bytes", _scaled(1e6)),
    Column("saved MB", "kept_bytes", _scaled(1e6)),
    Column("working MB", "working_bytes", _scaled(1e6)),
    Column("norms per layer", "norms_per_layer", _number),
    Column("does not fit", "out_of_memory", lambda value: "out of memory" if value else ""),
    Column("outputs off fp32", "off_fp32.outputs", _percent),
    Column("gradients off fp32", "off_fp32.gradients", _percent),
    Column("steps off fp64", "off_fp64", _percent),
    Column("error", "error", _error),
    Column("difference from PEFT", "agreement.gradients", _error),
    Column("held-out loss", "eval_loss", lambda value: f"{value:.4f}"),
    Column("mean difference of loss", "loss_difference", _error),
    Column("difference of held-out loss", "eval_difference", _error),
)


def table(found: Records) -> str:
    """A markdown table: settings that vary, the arm, and every column that has a number."""
    rows = newest(found)
    names = varying([said(row) for row in rows])
    columns = [
        c for c in COLUMNS if any(value_at(row["metrics"], c.path) is not None for row in rows)
    ]
    head = [*names, "arm", *(column.title for column in columns)]
    lines = [head, ["---"] * (len(names) + 1) + ["---:"] * len(columns)]
    for row in rows:
        lead = [written(said(row)[name]) for name in names]
        lines.append([*lead, row["arm"], *(_cell(row, column) for column in columns)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def said(row: dict[str, Any]) -> dict[str, Any]:
    """The settings of a record; of a set of shapes, the one that was measured."""
    settings: dict[str, Any] = row["settings"]
    return settings | {key: row["metrics"][key] for key in ("in", "out") if key in row["metrics"]}


def newest(found: Records) -> list[dict[str, Any]]:
    """The last run of each settings: arms of different runs were not measured side by side. Of
    suites that learn and measure no times, the last row of each arm."""
    latest = {_run_of(row): row["date"] for row in found}
    return [row for row in found if row["date"] == latest[_run_of(row)]]


_APART = frozenset({"pretrain"})


def _run_of(row: dict[str, Any]) -> tuple[str, str]:
    return str(said(row)), row["arm"] if row["suite"] in _APART else ""


def varying(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the settings in which the rows differ."""
    names = settings[0] if settings else {}
    return [name for name in names if len({str(one.get(name)) for one in settings}) > 1]


def written(value: Any) -> str:
    """A setting as the command line takes it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def value_at(metrics: dict[str, Any], path: str) -> Any:
    """The number at `wall_s.p50`, or None."""
    thing: Any = metrics
    for key in path.split("."):
        thing = thing.get(key) if isinstance(thing, dict) else None
    return thing


def _cell(row: dict[str, Any], column: Column) -> str:
    if column.path == f"ratio.{row['arm']}":
        return "1"
    value = value_at(row["metrics"], column.path)
    return "" if value is None else column.write(value)


def filled(text: str, results: Path) -> str:
    """`text` with every marked block made anew from the files under `results`.

    Raises:
        HirankError: a block names a file, a setting or a value that is not there.
    """

    def block(found: re.Match[str]) -> str:
        opening, name, wanted, _, closing = found.groups()
        return f"{opening}\n{_block(results, name, wanted.split())}\n{closing}"

    return _BLOCK.sub(block, text)


def _block(results: Path, name: str, wanted: Iterable[str]) -> str:
    chosen = newest(read(results / f"{name}.jsonl"))
    for word in wanted:
        key, _, values = word.partition("=")
        chosen = [row for row in chosen if _setting(row, key) in values.split(",")]
    if not chosen:
        raise HirankError(f"No record of {name} has {' '.join(wanted)}: mend the marker.")
    return f"{table(chosen)}\n{provenance(chosen)}\n"


def _setting(row: dict[str, Any], key: str) -> str:
    return row["arm"] if key == "arm" else written(said(row).get(key))


def provenance(rows: Records) -> str:
    """One sentence: on what, with which versions, from which commit, when."""
    last = rows[-1]
    device, versions = last["device"], last["versions"]
    where = device["name"] + (f", {device['cores']} cores" if device["kind"] == "cpu" else "")
    with_ = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    common = ", ".join(
        f"{name.replace('_', ' ')} {written(value)}"
        for name, value in last["settings"].items()
        if name not in varying([said(row) for row in rows])
    )
    source = f" at commit {last['commit'][:10]}" if last.get("commit") else ""
    return f"{where}; {with_}{source}, {last['date'][:10]}. {common.capitalize()}."

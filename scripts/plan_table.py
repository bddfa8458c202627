"""Write the tables of docs/plan.md from what benchmarks/plan_h200.py found on a GPU.

    python scripts/plan_table.py [--check]

--check changes nothing and fails if a table is not what the results files give.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "plan.md"
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- (runs|rows): ([\w/-]+) -->\n)(.*?)(<!-- /\2 -->)", re.S)

Row = dict[str, Any]
GIB = 2**30


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    given = parser.parse_args(arguments)
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if new == text:
        return 0
    if given.check:
        print(f"{PAGE} differs from the results: run python scripts/plan_table.py")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """The page with every table between its marks made anew."""

    def made(found: re.Match[str]) -> str:
        opening, kind, name, _, closing = found.groups()
        rows = read(RESULTS / f"{name}.jsonl")
        if not rows:
            return f"{opening}\nNot measured yet.\n\n{closing}"
        return f"{opening}\n{runs(rows) if kind == 'runs' else newest_table(rows)}\n{closing}"

    return _BLOCK.sub(made, text)


def read(path: Path) -> list[Row]:
    """Rows of a results file, oldest first; none if there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


# How far off.


def runs(rows: list[Row]) -> str:
    """A line a run and model: how many rows, how many within 5 %, median and worst."""
    lines = [["commit", "date", "model", "rows", "within 5 %", "median off", "worst"]]
    lines.append(["---", "---", "---", "---:", "---:", "---:", "---:"])
    for key in dict.fromkeys(_run(row) for row in rows):
        of_run = [row for row in rows if _run(row) == key]
        models = list(dict.fromkeys(row["setting"]["model"] for row in of_run))
        for model in models:
            lines.append([*key, model, *_summary(r for r in of_run if _model(r) == model)])
        if len(models) > 1:
            lines.append([*key, "**all**", *_summary(of_run)])
    return _markdown(lines)


def _run(row: Row) -> tuple[str, str]:
    return str(row["commit"])[:10], row["time"][:10]


def _model(row: Row) -> str:
    return str(row["setting"]["model"])


def _summary(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    off = [abs(row["planned"] / row["measured"] - 1) for row in rows if row["measured"]]
    within = f"{sum(one <= 0.05 for one in off)} of {len(rows)}"
    if not off:
        return [str(len(rows)), within, "", ""]
    return [str(len(rows)), within, _share(statistics.median(off)), _share(max(off))]


def _share(value: float) -> str:
    return f"{100 * value:.2f} %"


# Every row.


def newest_table(rows: list[Row]) -> str:
    """The newest row of each setting: what was planned before it ran, and what it needed."""
    newest = {json.dumps(row["setting"], sort_keys=True): row for row in rows}
    head = ["model", "method", "rank", "tokens", "with", "planned GiB", "measured GiB", "off"]
    lines = [head, ["---"] * 2 + ["---:"] * 2 + ["---"] + ["---:"] * 3]
    lines += [_cells(row) for row in newest.values()]
    return f"{_markdown(lines)}\n{_provenance(rows[-1])}\n"


def _cells(row: Row) -> list[str]:
    s, measured = row["setting"], row["measured"]
    off = f"{100 * (row['planned'] / measured - 1):+.2f} %" if measured else row["reason"]
    rank = "" if s["method"] == "full" else str(s["rank"])
    sizes = [_gib(row["planned"]), _gib(measured) if measured else ""]
    tokens = f"{s['batch']} x {s['sequence']:,}"
    return [s["model"], s["method"], rank, tokens, ", ".join(_ways(s)), *sizes, off]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB else f"{size / GIB:.3g}"


def _ways(s: dict[str, Any]) -> list[str]:
    """What is not as usual."""
    said = [f"{s['sharding']} x {s['world']}"] if s["sharding"] != "none" else []
    flags = ("checkpointing", "step_in_backward", "packing", "kbit_upcast")
    said += [name.replace("_", " ") for name in flags if s[name]]
    if s["method"] == "full":
        said.append(f"{s['base_dtype']} weights")
    usual = {"loss": "trl", "attention": "sdpa", "step": "fused"}
    said += [f"{name} {s[name]}" for name, value in usual.items() if s[name] != value]
    said += [] if s["autocast"] or s["method"] == "full" else ["no autocast"]
    said += [] if s["targets"] == "all-linear" else [f"targets {' '.join(s['targets'])}"]
    said += [f"accumulation {s['accumulation']}"] if s["accumulation"] > 1 else []
    return said + ([f"evaluation of {s['eval_batch']}"] if s["eval_batch"] else [])


def _provenance(row: Row) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items() if value)
    return f"{row['device']['name']}; {versions}."


def _markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

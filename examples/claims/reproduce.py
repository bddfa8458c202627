"""Run the experiments of docs/claims.md, record them, and write the page's tables from the record.

python examples/claims/reproduce.py             two minutes on one CPU core
python examples/claims/reproduce.py --tables    the tables alone, from what is on record
python examples/claims/reproduce.py --check     changes nothing, fails if they are not current
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import experiments
import torch

from hirank.bench.record import append, device_facts, read, source_facts, version_facts

ROOT = Path(__file__).resolve().parents[2]
PAGE, RESULTS = ROOT / "docs" / "claims.md", ROOT / "benchmarks" / "results"
RANKS, WIDTHS = (4, 8, 16, 32, 64), (256, 1024, 4096)
FITS = {"ranks": (1, 2, 4, 6, 7, 8, 12, 16), "size": 64, "steps": 4000, "lr": 1e-2}
BF16 = ((16, 32), (16, 16), (64, 64), (64, 16), (256, 16))
MODELS = {"Llama-3-8B": experiments.llama_3_8b, "Qwen2.5-7B": experiments.qwen2_5_7b}
# What was published: r 16 and r 64 of q, v / attention / all linear layers.
PUBLISHED_FALL = {"SGD": 62, "Adam": 3.8}
PUBLISHED_COUNTS = {
    ("Llama-3-8B", "q, v"): (6_815_744, 27_262_976),
    ("Llama-3-8B", "attention"): (13_631_488, 54_525_952),
    ("Llama-3-8B", "all linear"): (41_943_040, 167_772_160),
    ("Qwen2.5-7B", "q, v"): (5_046_272, 20_185_088),
    ("Qwen2.5-7B", "attention"): (10_092_544, 40_370_176),
    ("Qwen2.5-7B", "all linear"): (40_370_176, 161_480_704),
}

# Running.


def first_steps() -> Iterable[dict[str, Any]]:
    for width in WIDTHS:
        for step in experiments.first_steps(RANKS, rows=256, width=width):
            yield {"width": width, **step}


def parameter_counts() -> Iterable[dict[str, Any]]:
    for model, targets in PUBLISHED_COUNTS:
        for rank in (16, 64):
            names = experiments.TARGETS[targets]
            count = experiments.parameter_counts(MODELS[model](), names, rank)
            yield {"model": model, "targets": targets, "rank": rank, "parameters": count}


EXPERIMENTS: dict[str, tuple[Callable[[], Iterable[dict[str, Any]]], dict[str, Any]]] = {
    "first-step": (first_steps, {"alpha": 16, "rows": 256, "seed": 0}),
    "adam-fits": (lambda: experiments.adam_fits(**FITS), {**FITS, "seed": 0}),
    "parameters": (parameter_counts, {}),
    "bf16": (
        lambda: [experiments.bf16_distortion(r, a, size=1024) for r, a in BF16],
        {"size": 1024, "entry": 1e-3, "seed": 0},
    ),
}


def run() -> Path:
    """Run everything and add it to the results of this device."""
    torch.set_num_threads(1)
    facts = {"device": device_facts(torch.device("cpu")), "versions": version_facts()}
    facts |= source_facts(None) | {"command": "python examples/claims/reproduce.py"}
    lines = []
    for arm, (experiment, settings) in EXPERIMENTS.items():
        print(f"{arm} ...", file=sys.stderr)
        metrics = {"rows": list(experiment())}
        date = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"suite": "claims", "arm": arm, "settings": settings, "metrics": metrics}
        lines.append(line | facts | {"date": date})
    return append(RESULTS, "claims", lines)


# The page.


def filled(text: str) -> str:
    """The page with the tables between its marks made anew."""
    records = {line["arm"]: line for file in sorted(RESULTS.glob("*/claims.jsonl"))
               for line in read(file)}  # fmt: skip
    for arm, table in TABLES.items():
        begin, end = f"<!-- claims: {arm} -->\n", f"<!-- end of {arm} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{table(records[arm]['metrics']['rows'])}{end}{after}"
    return text.replace(_provenance_of(text), _provenance(records["first-step"]))


def _provenance_of(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("Measured on "))


def _provenance(line: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {line['versions'][name]}" for name in ("torch", "peft"))
    return (
        f"Measured on {line['device']['name']}, {line['device']['cores']} core, {versions}, "
        f"commit {line['commit'][:10]}, {line['date'][:10]}."
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---:"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _first_step_table(rows: list[dict[str, Any]]) -> str:
    head = ["optimizer", "width", *(f"r {rank}" for rank in RANKS), "fall", "published"]
    lines = []
    for name, published in PUBLISHED_FALL.items():
        for width in WIDTHS:
            steps = [row for row in rows if (row["optimizer"], row["width"]) == (name, width)]
            norms = [f"{step['norm']:.3g}" if step["norm"] < 1e3 else f"{step['norm']:.0f}"
                     for step in steps if step["optimizer"] == name]  # fmt: skip
            lines.append([name, width, *norms, f"{experiments.fall(steps, name):.3g} x",
                          f"{published} x"])  # fmt: skip
    return _table(head, lines)


def _fits_table(rows: list[dict[str, Any]]) -> str:
    head = ["rank", "floor", "best of Adam", "at step", "worst after that", "at the end"]
    names = ("floor", "best", "best_step", "worst_after", "end")
    return _table(head, ([row["rank"], *(_share(row[name]) for name in names)] for row in rows))


def _share(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if value > 1e-2:
        return f"{value:.4f}"
    return f"{value:.1e}" if value > 1e-12 else "0"


def _counts_table(rows: list[dict[str, Any]]) -> str:
    head = ["model", "layers", "r", "PEFT counts", "published"]
    lines = []
    for row in rows:
        published = PUBLISHED_COUNTS[row["model"], row["targets"]][row["rank"] == 64]
        counts = f"{row['parameters']:,}", f"{published:,}"
        lines.append([row["model"], row["targets"], row["rank"], *counts])
    return _table(head, lines)


def _bf16_table(rows: list[dict[str, Any]]) -> str:
    head = ["r", "alpha", "scale", "RMS of the increment", "distortion, base in fp32",
            "distortion, base in bf16", "elements swallowed"]  # fmt: skip
    return _table(
        head,
        (
            [row["rank"], row["alpha"], f"{row['alpha'] / row['rank']:.4g}", f"{row['rms']:.1e}"]
            + [f"{100 * row[name]:.0f} %" for name in ("fp32_base", "bf16_base", "swallowed")]
            for row in rows
        ),
    )


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "first-step": _first_step_table,
    "adam-fits": _fits_table,
    "parameters": _counts_table,
    "bf16": _bf16_table,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="do not measure")
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    given = parser.parse_args(arguments)
    if not (given.tables or given.check):
        print(run())
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if given.check and new != text:
        print(f"{PAGE} differs from the record: run examples/claims/reproduce.py --tables")
        return 1
    if not given.check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

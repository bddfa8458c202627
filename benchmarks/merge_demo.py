"""Merge the demo's adapter, record the report, and show it in docs/merge.md.

    python benchmarks/merge_demo.py RUN/adapter-best --base FOLDER --prompts eval.jsonl
    python benchmarks/merge_demo.py --check     fail if the page is not what the results give

Adds a line to benchmarks/results/DEVICE/merge_demo.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hirank.bench.record import append, device_facts, read, source_facts, version_facts
from hirank.cli.merge import as_text

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "merge.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- merge: demo -->\n", "<!-- end of demo -->\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, nargs="?")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    if given.adapter is not None:
        record(given.adapter, given.base, given.prompts)
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if not given.check:
        PAGE.write_text(new, encoding="utf-8")
    return int(given.check and new != text)


def record(adapter: Path, base: Path, prompts: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        words = ["merge", str(adapter), "--base", str(base), "--check", str(prompts)]
        words += ["--dtype", "bfloat16", "--out", f"{place}/merged", "--json"]
        command = [sys.executable, "-m", "hirank", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    report |= {"base": "smollm2-135m-instruct", "adapter": "demo", "out": "merged"}
    line = {
        "suite": "merge_demo",
        "arm": "hirank",
        "settings": {"model": report["base"], "dtype": "bfloat16"},
        "metrics": report,
        "device": device_facts(torch.device("cpu")),
        "versions": version_facts(),
        **source_facts(None),
        "command": "python benchmarks/merge_demo.py RUN/adapter-best --base BASE --prompts EVAL",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    append(RESULTS, "merge_demo", [line])


def filled(text: str) -> str:
    """The page with the newest report in it."""
    lines = [line for file in sorted(RESULTS.glob("*/merge_demo.jsonl")) for line in read(file)]
    newest = max(lines, key=lambda line: str(line["date"]))
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + shown(newest) + text[end:]


def shown(line: dict[str, Any]) -> str:
    command = (
        "$ hirank merge runs/demo-1/adapter-best --dtype bfloat16 --out merged "
        "--check .cache/demo/eval.jsonl"
    )
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    return (
        f"\n```text\n{command}\n{as_text(line['metrics'])}\n```\n\n"
        f"{line['device']['name']}; {versions}; commit {line['commit'][:10]}, "
        f"{line['date'][:10]}.\n\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

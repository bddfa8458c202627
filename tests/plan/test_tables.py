"""The tables of docs/plan.md are what the results files say, and the targets hold in them."""

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
ROWS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "plan.jsonl"


@pytest.fixture
def script() -> ModuleType:
    place = ROOT / "scripts" / "plan_table.py"
    spec = importlib.util.spec_from_file_location("plan_table", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType):
    assert script.filled(PAGE) == PAGE, "run: python scripts/plan_table.py"


GRID = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b")


def test_every_row_of_the_grid_is_within_5_percent_and_the_median_within_2(script: ModuleType):
    rows = [row for row in script.read(ROWS) if row["setting"]["model"] in GRID]
    off = [abs(row["planned"] / row["measured"] - 1) for row in rows if row["measured"]]
    assert len(off) >= 80 and max(off) <= 0.05
    assert statistics.median(off) <= 0.02


def test_every_row_was_predicted_before(script: ModuleType):
    before = {
        (row["commit"], json.dumps(row["setting"], sort_keys=True)): row["planned"]
        for row in script.read(ROWS.with_name("plan_before.jsonl"))
    }
    for row in script.read(ROWS):
        key = row["commit"], json.dumps(row["setting"], sort_keys=True)
        assert before[key] == row["planned"]


def test_a_miss_is_shown(script: ModuleType):
    row = script.read(ROWS)[0]
    missed = {**row, "planned": 2 * row["measured"]}
    assert "+100.00 %" in script.newest_table([row, missed])
    assert "| 0 of 1 | 100.00 % |" in script.runs([missed])
    nothing = {**row, "measured": None, "reason": "out of memory"}
    assert "out of memory" in script.newest_table([nothing])

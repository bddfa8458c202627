"""What runs needed is written down, whole and without names, and changes what it may."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hirank.cli import app
from hirank.errors import HirankError
from hirank.plan import calibration
from hirank.plan.calibration import Measured, facts_of, off_line, overhead_of, recall, remember
from hirank.plan.closed import closed_form
from hirank.plan.setting import Setting
from plan.models import shape_of

GIB, MIB = 2**30, 2**20
SETTING = Setting("/home/somebody/secret-model", method="dora", targets=("q_proj",))


def run_of(off: float = 0.0, *, method: str = "dora", gpu: str = "card", **values: Any) -> Measured:
    model, said = facts_of(replace(SETTING, method=method), shape_of("llama"))  # type: ignore[arg-type]
    measured = round(10 * GIB * (1 + off))
    found = Measured(
        date="2026-11-30",
        gpu=gpu,
        capacity=24 * GIB,
        model=model,
        setting=said,
        versions={"torch": "2.11"},
        planned=10 * GIB,
        allocated=measured,
        reserved=round(1.1 * measured),
        process=round(1.1 * measured) + 500 * MIB,
    )
    return replace(found, **values)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "runs.jsonl"


# The file.


def test_what_is_remembered_is_recalled_in_order(file: Path):
    runs = [run_of(off) for off in (0.01, -0.02, 0.0)]
    for run in runs:
        remember(file, run)
    assert recall(file) == runs


def test_no_name_and_no_path_is_in_it(file: Path):
    remember(file, run_of())
    text = file.read_text()
    assert "secret" not in text and "/" not in text and "q_proj" not in text
    assert recall(file)[0].setting["targets"] == "chosen"


def test_the_oldest_go(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "KEPT", 3)
    for number in range(5):
        remember(file, run_of(number / 100))
    assert [round(100 * run.off) for run in recall(file)] == [2, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "\x00\xff",
        "{}",
        json.dumps(asdict(run_of()) | {"allocated": "many"}),
        json.dumps(asdict(run_of()) | {"planned": 0}),
        json.dumps(asdict(run_of()) | {"process": True}),
        json.dumps(asdict(run_of()) | {"more": 1}),
        json.dumps(asdict(run_of()) | {"model": {}}),
        "[" * 100_000,
    ],
    ids=range(10),
)
def test_lines_that_cannot_be_read_are_passed_over(file: Path, line: str):
    remember(file, run_of())
    file.write_text(f"{line}\n{file.read_text()}", encoding="utf-8")
    assert recall(file) == [run_of()]


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch):
    remember(file, run_of())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HirankError, match="No space left"):
        remember(file, run_of(0.5))
    monkeypatch.undo()
    assert recall(file) == [run_of()] and len(list(file.parent.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HirankError, match=r"name another file with run\.calibration"):
        remember(tmp_path / "file" / "runs.jsonl", run_of())


# What it says.


def test_overheads_are_medians_of_enough_runs_on_the_newest_gpu():
    other = [run_of(gpu="old card", reserved=20 * GIB, process=40 * GIB)] * 4
    few = [*other, run_of(), run_of()]
    assert overhead_of([]) is None and overhead_of(few) is None
    crowded = run_of(process=18 * GIB)  # 7 GiB of another process
    found = overhead_of([*few, crowded, run_of(0.1)])
    assert found is not None and (found.runs, found.gpu) == (4, "card")
    assert found.segment == pytest.approx(1.1) and found.context == 500 * MIB


def test_what_cannot_be_told_is_no_context():
    assert overhead_of([run_of(process=None)] * 5) is None


def test_how_far_plans_were_off():
    runs = [run_of(0.004), run_of(-0.01), run_of(0.02), run_of(0.3, method="lora")]
    said = "3 runs of dora on this machine: measured +0.4 % of planned (-1.0 to +2.0 %)"
    assert off_line(runs, "dora") == said
    assert off_line(runs, "lora") == "1 run of lora on this machine: measured +30.0 % of planned"
    assert off_line(runs, "galore") is None


def test_tensors_are_planned_as_before():
    known = overhead_of([run_of(0.4)] * 3)
    assert known is not None
    usual = closed_form(SETTING, shape_of("llama"))
    local = closed_form(SETTING, shape_of("llama"), known)
    assert local.phases == usual.phases and local.allocated == usual.allocated
    assert local.reserved == round(1.1 * usual.allocated)
    assert local.process == local.reserved + 500 * MIB


# The command.


def told(file: Path, *words: str) -> Any:
    env = {"COLUMNS": "140", "XDG_CACHE_HOME": str(file.parent)}
    return CliRunner().invoke(app, ["plan", *words], env=env)


def filled(file: Path) -> list[str]:
    for off in (0.01, 0.02, 0.03):
        remember(file, run_of(off))
    return ["--calibration-file", str(file)]


def test_a_plan_takes_what_was_measured_and_says_so(file: Path):
    words = filled(file)
    done = told(file, "qwen2.5-0.5b", *words)
    assert "on top of tensors as in 3 runs on card" in done.output
    assert "3 runs of dora on this machine: measured +2.0 %" in done.output
    found = json.loads(told(file, "qwen2.5-0.5b", "--json", *words).output)
    assert found["process"] - found["reserved"] == 500 * MIB and found["here"].startswith("3 runs")


WAYS = [["--batch", "8", "--fit", "24GiB"], ["--max", "seq", "--gpu", "24GiB"], ["--compare"]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_fits_depends_on_what_was_measured(file: Path, way: list[str]):
    usual, local = (told(file, "qwen2.5-7b", *way, *more).output for more in ([], filled(file)))
    assert usual != local


def test_the_measurements_are_listed(file: Path):
    words = filled(file)
    done = told(file, "--calibration", *words)
    assert "10.10 GiB" in done.output and "10.0 % in the allocator and 500 MiB" in done.output
    assert len(json.loads(told(file, "--calibration", "--json", *words).output)) == 3


def test_there_is_nothing_to_list(file: Path):
    assert "Nothing was measured here yet" in told(file, "--calibration").output
    done = told(file, "--calibration", "--calibration-file", "no-such.jsonl")
    assert done.exit_code == 2 and "There is no file no-such.jsonl" in done.stderr


def test_the_usual_file_is_in_the_cache_folder(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    usual = calibration.calibration_file()
    assert usual == file.parent / "hirank" / "plan-calibration.jsonl"
    remember(usual, run_of())
    assert "1 run of dora" in told(file, "qwen2.5-0.5b").output

"""The facts of a run, whole or in pieces."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hirank.errors import HirankError
from hirank.train.summary import Change, load_summary
from run_folder import VERSIONS, events, write_run


def test_facts_of_a_whole_run(tmp_path: Path) -> None:
    rows = events(steps=40, every=10)
    run = load_summary(write_run(tmp_path / "orders-1", rows))
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    assert run.train_loss == Change(losses[0], losses[-1], 40)
    assert run.exact_match and run.exact_match.before == 0.0 and run.exact_match.step == 40
    assert run.eval_loss and run.eval_loss.before == 3.1 and run.eval_loss.after < 1
    assert run.tokens == 600 * 40 and run.last_step == 40 and run.peak_memory == int(1.72e9)
    assert run.seconds == pytest.approx(1.6 * (len(rows) - 1))
    assert run.versions == VERSIONS and run.value("method", "r") == 64
    assert [sample.after == sample.expected for sample in run.samples] == [True, True, False]


def test_the_best_loss_is_not_the_last(tmp_path: Path) -> None:
    losses = {0: 3.0, 5: 1.0, 10: 1.4}
    rows = [{"event": "eval", "step": step, "eval_loss": loss} for step, loss in losses.items()]
    assert load_summary(write_run(tmp_path, rows)).eval_loss == Change(3.0, 1.0, 5)


def test_one_evaluation_has_no_before(tmp_path: Path) -> None:
    rows = [{"event": "eval", "step": 5, "eval_loss": 1.0}]
    run = load_summary(write_run(tmp_path, rows))
    assert run.eval_loss == Change(None, 1.0, 5) and run.exact_match is None


def test_nan_is_found_and_left_out_of_the_numbers(tmp_path: Path) -> None:
    values = {1: 2.0, 2: math.nan, 3: 1.0}
    rows = [{"event": "step", "step": step, "loss": loss} for step, loss in values.items()]
    run = load_summary(write_run(tmp_path, rows))
    assert run.nonfinite_step == 2 and run.train_loss == Change(2.0, 1.0, 3)


def test_time_between_sessions_is_not_training_time(tmp_path: Path) -> None:
    times = {0: "start", 60: "step", 5000: "start", 5030: "end"}
    rows: list[dict[str, Any]] = [
        {"event": name, "step": 0, "time": f"2026-11-29T{second // 3600:02d}:"
         f"{second // 60 % 60:02d}:{second % 60:02d}+00:00"}
        for second, name in times.items()
    ]  # fmt: skip
    assert load_summary(write_run(tmp_path, rows)).seconds == 90


def test_settings_and_versions_of_the_start_event_serve_as_well(tmp_path: Path) -> None:
    start = {
        "event": "start",
        "step": 0,
        "config": {"method": {"r": 8}},
        "versions": {"a": {"b": 1}},
    }
    run_dir = write_run(tmp_path, [start])
    (run_dir / "config.yaml").unlink()
    (run_dir / "versions.json").unlink()
    run = load_summary(run_dir)
    assert run.value("method", "r") == 8 and run.versions == {"a b": "1"}


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match=r"log\.jsonl cannot be read"):
        load_summary(tmp_path)
    (write_run(tmp_path, []) / "versions.json").write_text("{")
    with pytest.raises(HirankError, match=r"versions\.json is not JSON"):
        load_summary(tmp_path)
    (tmp_path / "versions.json").write_text(json.dumps({}))
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(HirankError, match=r"config\.yaml is not valid YAML"):
        load_summary(tmp_path)

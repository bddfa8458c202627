"""The log survives crashes and resumes, and is JSON to everybody."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hirank.errors import HirankError
from hirank.train.runlog import RunLog, read_events, read_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def write(path: Path, *events: tuple[str, int, dict[str, object]]) -> Path:
    with RunLog(path) as log:
        for name, step, fields in events:
            log.append(name, step, **fields)  # type: ignore[arg-type]
    return path


def steps_of(path: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read_log(path) if e["event"] == "step"]


def test_events_are_on_disk_before_the_log_is_closed(path: Path) -> None:
    with RunLog(path) as log:
        written = log.append("step", 1, loss=2.5)
        assert read_log(path) == [written]
    assert written["time"].endswith("+00:00")


def test_a_torn_last_line_is_not_an_event(path: Path) -> None:
    write(path, ("step", 1, {"loss": 2.5}))
    with path.open("ab") as file:
        file.write('{"event": "step", "step": 2, "note": "caf\u00e9'.encode()[:-1])
    assert steps_of(path) == [(1, 2.5)]


def test_writing_goes_on_after_a_torn_line(path: Path) -> None:
    write(path, ("step", 1, {"loss": 2.5}))
    with path.open("ab") as file:
        file.write(b'{"event": "st')
    write(path, ("step", 2, {"loss": 1.5}))
    assert steps_of(path) == [(1, 2.5), (2, 1.5)]


def test_a_whole_last_line_without_newline_is_kept(path: Path) -> None:
    path.write_text('{"event": "step", "step": 1, "loss": 2.5}')
    assert steps_of(path) == [(1, 2.5)]
    write(path, ("step", 2, {"loss": 1.5}))
    assert steps_of(path) == [(1, 2.5), (2, 1.5)]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"step": 1}', "\x00"])
def test_a_broken_line_inside_is_named(path: Path, line: str) -> None:
    path.write_text(f'{line}\n{{"event": "step", "step": 1, "loss": 2.5}}\n')
    with pytest.raises(HirankError, match=r"log\.jsonl:1 is not an event"):
        read_log(path)


def test_nan_is_valid_json_and_comes_back(path: Path) -> None:
    write(path, ("step", 1, {"loss": math.nan, "grad_norm": math.inf, "config": {"a": [math.inf]}}))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (event,) = read_log(path)
    assert math.isnan(event["loss"]) and event["grad_norm"] == math.inf
    assert event["config"] == {"a": ["inf"]} and "nonfinite" not in event


def test_scalars_of_torch_and_numpy_are_numbers(path: Path) -> None:
    loss, norm = torch.tensor(1.5), np.float32(0.25)
    write(path, ("step", 1, {"loss": loss, "grad_norm": norm, "dir": Path("x")}))
    (event,) = read_log(path)
    assert (event["loss"], event["grad_norm"], event["dir"]) == (1.5, 0.25, "x")


def test_a_resume_replaces_what_lay_beyond_its_checkpoint(path: Path) -> None:
    write(
        path,
        ("start", 0, {}),
        *[("step", step, {"loss": float(step)}) for step in (1, 2, 3, 4)],
        ("checkpoint", 4, {}),
        ("end", 4, {"status": "interrupted"}),
        ("start", 2, {}),
        ("step", 3, {"loss": 30.0}),
    )
    assert steps_of(path) == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [e["event"] for e in read_log(path) if e["step"] != 3] == [
        "start", "step", "step", "start",
    ]  # fmt: skip
    assert len(read_events(path)) == 9


def test_one_evaluation_may_be_logged_in_parts(path: Path) -> None:
    write(path, ("eval", 5, {"eval_loss": 1.0}), ("eval", 5, {"exact_match": 0.5}))
    (event,) = read_log(path)
    assert (event["eval_loss"], event["exact_match"]) == (1.0, 0.5)


def test_samples_of_one_step_are_all_kept(path: Path) -> None:
    keys = [("before", "a"), ("before", "b"), ("after", "a")]
    write(path, *[("sample", 0, {"phase": phase, "prompt": p}) for phase, p in keys])
    assert [(e["phase"], e["prompt"]) for e in read_log(path)] == keys


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match="cannot be written"):
        RunLog(tmp_path / "missing" / "log.jsonl")
    with pytest.raises(HirankError, match="cannot be read"):
        read_log(tmp_path / "missing" / "log.jsonl")


def test_a_full_disk_is_one_sentence() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    log = RunLog.__new__(RunLog)
    log.path, log._file = full, full.open("w")
    with pytest.raises(HirankError, match="No space left on device"):
        log.append("step", 1, loss=1.0)
    with pytest.raises(OSError):
        log.close()

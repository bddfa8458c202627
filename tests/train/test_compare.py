"""Is rank the bottleneck? Curves of which the answer is known, and runs that do not compare."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hirank.cli import app
from hirank.errors import HirankError
from hirank.train.compare import compare
from run_folder import events, write_run

STEPS = 160


def run(
    folder: Path,
    rank: int,
    floor: float = 0.5,
    *,
    held_out: Any = lambda step, loss: loss + 0.02,
    half_life: float = 15,
    noise: float = 0.05,
    **parts: dict[str, Any],
) -> Path:
    """A run whose training loss goes from 3 to `floor`, with noise that the rows make."""
    rows, rng = events(STEPS, every=16), random.Random(0)
    for row in rows:
        loss = floor + (3 - floor) * 2 ** (-row["step"] / half_life)
        if row["event"] == "step":
            row["loss"] = loss + rng.gauss(0, noise)
        if row["event"] == "eval":
            row["eval_loss"] = held_out(row["step"], loss)
    method = {"name": "lora", "r": rank, "alpha": 4 * math.sqrt(rank), **parts.pop("method", {})}
    return write_run(folder / f"r{rank}", rows, method=method, **parts)


def test_rank_is_the_bottleneck(tmp_path: Path):
    found = compare(run(tmp_path, 64, floor=0.4), run(tmp_path, 4, floor=0.6))
    assert found.answer == "rank" and "r64" in found.advice
    assert [reason.about for reason in found.reasons] == ["data", "optimiser", "optimiser", "rank"]
    assert "the training loss of r64 is 32" in str(found) and "Lower rank:  r4" in str(found)


def test_rank_is_not_the_bottleneck_however_noisy(tmp_path: Path):
    found = compare(run(tmp_path, 4, noise=0.2), run(tmp_path, 64, floor=0.501, noise=0.2))
    assert found.answer == "nothing" and "r4 is enough" in found.advice


def test_noise_of_other_rows_is_no_gain(tmp_path: Path):
    rng = random.Random(7)
    high = run(tmp_path, 64, floor=0.48)
    lines = [json.loads(line) for line in (high / "log.jsonl").read_text().splitlines()]
    for row in lines:
        if row["event"] == "step":
            row["loss"] += rng.gauss(0, 0.3)
    (high / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert compare(run(tmp_path, 4), high).answer == "nothing"


def test_overfitting_comes_first(tmp_path: Path):
    turning = lambda step, loss: loss + 0.02 + max(0, step - 80) / 400  # noqa: E731
    found = compare(run(tmp_path, 4, 0.6), run(tmp_path, 64, 0.2, held_out=turning))
    assert found.answer == "data" and len(found.reasons) == 1
    assert "r64 overfits: its held-out loss was" in found.reasons[0].text


def test_a_gap_that_opens_is_overfitting(tmp_path: Path):
    flat = lambda step, loss: max(loss, 0.6)  # noqa: E731
    found = compare(run(tmp_path, 4, 0.58, held_out=flat), run(tmp_path, 64, 0.2, held_out=flat))
    assert found.answer == "data" and "against the training loss" in found.reasons[0].text
    assert "r4" not in found.reasons[0].text


def test_a_held_out_loss_that_falls_is_no_overfitting_however_small_the_losses(tmp_path: Path):
    slower = lambda step, loss: loss * (1 + step / STEPS)  # noqa: E731
    falling = [run(tmp_path, r, 0, held_out=slower, half_life=30, noise=0.01) for r in (4, 64)]
    assert compare(*falling).reasons[0].text.startswith("Data: neither")


def test_held_out_data_of_another_kind_is_no_overfitting(tmp_path: Path):
    harder = lambda step, loss: 2 * loss  # noqa: E731
    runs = [run(tmp_path, r, f, held_out=harder) for r, f in ((4, 0.6), (64, 0.4))]
    assert compare(*runs).answer == "rank"


def test_the_higher_rank_learns_rows_and_nothing_more(tmp_path: Path):
    both = lambda step, loss: 0.66 + 2 * 2 ** (-step / 15)  # noqa: E731
    runs = [run(tmp_path, r, f, held_out=both) for r, f in ((4, 0.6), (64, 0.57))]
    found = compare(*runs)
    assert found.answer == "data" and "nothing more from them" in found.reasons[-1].text


def test_unlike_steps_come_before_rank(tmp_path: Path):
    found = compare(run(tmp_path, 4, 0.6), run(tmp_path, 64, 0.4, method={"alpha": 8}))
    assert (
        found.answer == "optimiser"
        and "train r64 with learning rate 0.0008, or alpha 32" in str(found)
    )


@pytest.mark.parametrize("setting", [{"batch_size": 16}, {"scheduler": "linear"}, {"seed": 3}])
def test_other_settings_of_the_optimiser_come_before_rank(tmp_path: Path, setting: dict[str, Any]):
    found = compare(run(tmp_path, 4, 0.6), run(tmp_path, 64, 0.4, optim=setting))
    assert found.answer == "optimiser" and next(iter(setting)) in found.reasons[-1].text


def test_a_loss_that_still_falls_comes_before_rank(tmp_path: Path):
    found = compare(run(tmp_path, 4, 0.6, half_life=60), run(tmp_path, 64, 0.4))
    assert found.answer == "optimiser" and "train longer" in found.reasons[-1].text


def test_without_evaluations_the_training_loss_has_to_do(tmp_path: Path):
    none = lambda step, loss: None  # noqa: E731
    runs = [run(tmp_path, r, f, held_out=none) for r, f in ((4, 0.6), (64, 0.4))]
    found = compare(*runs)
    assert found.answer == "rank" and "not logged" in found.reasons[-1].text


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": {"name": "other"}}, "base models"),
        ({"data": {"train": ["other.jsonl"]}}, "training data"),
        ({"method": {"name": "dora"}}, "methods"),
        ({"method": {"target_modules": ["q_proj"]}}, "adapted layers"),
        ({"method": {"name": "full"}}, "trained no adapter"),
        ({"method": {"r": 4}}, "both have rank 4"),
    ],
)
def test_runs_that_do_not_compare(tmp_path: Path, parts: dict[str, Any], said: str):
    other = run(tmp_path, 64, **parts)
    log = (other / "log.jsonl").read_text()
    if "model" in parts:
        log = log.replace('"model": "HuggingFaceTB/SmolLM2-135M-Instruct"', '"model": "other"')
    (other / "log.jsonl").write_text(log)
    with pytest.raises(HirankError, match=said) as caught:
        compare(run(tmp_path, 4), other)
    assert str(caught.value).count(". ") == 0


def test_too_short_or_no_run(tmp_path: Path):
    short = write_run(tmp_path / "short", events(3, every=1))
    with pytest.raises(HirankError, match="20 steps or more"):
        compare(short, run(tmp_path, 4))
    with pytest.raises(HirankError, match="give the folder of a run"):
        compare(tmp_path / "missing", short)


def test_losses_of_zero_and_a_late_evaluation(tmp_path: Path):
    late = lambda step, loss: loss if step > 130 else None  # noqa: E731
    runs = [run(tmp_path, r, 0, held_out=late, half_life=0.1, noise=0) for r in (4, 64)]
    assert compare(*runs).answer == "nothing"


def test_the_command(tmp_path: Path):
    pair = [str(run(tmp_path, 4, 0.6)), str(run(tmp_path, 64, 0.4))]
    done = CliRunner().invoke(app, ["audit", "compare", *pair])
    assert done.exit_code == 0 and done.stdout.rstrip() == str(compare(*map(Path, pair)))
    told = json.loads(CliRunner().invoke(app, ["audit", "compare", *pair, "--json"]).stdout)
    assert told["answer"] == "rank" and len(told["reasons"]) == 4
    assert CliRunner().invoke(app, ["audit", "compare", pair[0], pair[0]]).exit_code == 2

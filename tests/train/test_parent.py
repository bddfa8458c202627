"""A run that steps unlike its parent says so, in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from helpers import chat_rows, write_jsonl
from hirank.cli import app
from hirank.errors import HirankError
from hirank.train.config import TrainConfig, build_config, resolved
from hirank.train.parent import step_notice
from run_folder import events, write_run


def config(parent: Path | None, model: str = "some/model", **parts: dict[str, Any]) -> TrainConfig:
    tree: dict[str, Any] = {"model": {"name": model}, "data": {"train": ["rows.jsonl"]}}
    tree["run"] = {"parent": parent}
    return resolved(build_config(tree | parts))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of DoRA with r 64, alpha 128 and a learning rate of 2e-4."""
    return write_run(tmp_path / "orders-1", events(steps=2, every=1))


def test_another_rank_at_the_usual_alpha_is_within_the_factor(run: Path):
    assert step_notice(config(run, method={"name": "dora", "r": 32})) is None
    assert step_notice(config(run, method={"name": "dora", "r": 64})) is None


def test_a_larger_step_is_told_with_what_would_keep_it(run: Path):
    method = {"name": "lora", "r": 64, "alpha": 128}
    notice = step_notice(config(run, method=method, optim={"lr": 1e-3}))
    assert notice == (
        f"The first steps are 4.97 times as large as those of {run} (r64a128:dora at 0.0002 there, "
        "r64a128 at 0.001 here): to keep them, set optim.lr to 0.0002012 or method.alpha to 25.75."
    )


def test_a_smaller_one_too(run: Path):
    notice = step_notice(config(run, method={"name": "dora", "r": 64, "alpha": 16}))
    assert notice and notice.startswith("The first steps are 0.16")


@pytest.mark.parametrize("part", ["adapter", "adapter-best", "checkpoints/step-2"])
def test_a_part_of_the_run_means_the_run(run: Path, part: str):
    (run / part).mkdir(parents=True)
    notice = step_notice(config(run / part, optim={"lr": 1e-2}))
    assert notice and str(run) in notice


def test_a_base_model_from_a_run_makes_it_the_parent(run: Path):
    (run / "merged").mkdir()
    notice = step_notice(config(None, str(run / "merged"), optim={"lr": 1e-2}))
    assert notice and f"{run} (" in notice


def test_methods_without_an_adapter_have_no_such_step(run: Path):
    assert step_notice(config(run, method={"name": "full"}, optim={"lr": 1.0})) is None
    assert step_notice(config(None, optim={"lr": 1.0})) is None
    full = write_run(run.with_name("full"), events(steps=1), method={"name": "full"})
    assert step_notice(config(full, optim={"lr": 1.0})) is None


def test_an_adapter_of_unknown_learning_rate_is_taken_at_the_present_one(tmp_path: Path):
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    method = {"name": "lora", "r": 4, "alpha": 16}
    notice = step_notice(config(tmp_path, method=method, optim={"lr": 3e-4}))
    assert notice and "r4a4 at 0.0003 there" in notice and "method.alpha to 4." in notice
    assert step_notice(config(tmp_path, method=method | {"alpha": 8})) is None


def test_a_parent_that_is_nothing(tmp_path: Path):
    with pytest.raises(HirankError, match="neither a run nor an adapter"):
        step_notice(config(tmp_path / "missing"))


def test_the_command_warns_before_it_trains(run: Path, tmp_path: Path, tiny_model_dir: Path):
    data = write_jsonl(tmp_path / "rows.jsonl", chat_rows(8))
    words = ["train", "--dry-run"]
    for setting in (f"model={tiny_model_dir}", f"data={data}", f"run.parent={run}", "optim.lr=1"):
        words += ["--set", setting]
    done = CliRunner().invoke(app, [*words, "--set", "method.r=4"])
    assert done.exit_code == 0, done.output
    assert "Warning: The first steps are" in done.output

"""A run is planned before it, and measured after it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hirank.errors import HirankError
from hirank.plan.calibration import recall
from hirank.train import planned
from hirank.train.config import build_config, resolved
from hirank.train.planned import Planned, check_fits, plan_run, setting_of, told_after

GIB = 2**30
CPU = torch.device("cpu")


def config(**parts: Any) -> Any:
    return resolved(build_config({"model": {"name": "m"}, "data": {"train": "a.jsonl"}, **parts}))


def architecture(kind: str = "llama") -> Any:
    sizes = {
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    return SimpleNamespace(to_dict=lambda: sizes)


def test_the_setting_is_what_hirank_train_does_on_a_gpu():
    found = setting_of(config(optim={"batch_size": 4, "grad_accum": 2, "checkpointing": True}))
    assert (found.method, found.base_dtype, found.adapter_dtype) == ("dora", "bf16", "fp32")
    assert found.autocast and found.step == "fused" and found.loss == "trl"
    assert (found.batch, found.accumulation, found.checkpointing) == (4, 2, True)
    assert (found.sequence, found.eval_batch) == (1024, 8)


@pytest.mark.parametrize(
    ("method", "name", "dtype"),
    [
        ({"name": "full"}, "full", "fp32"),
        ({"name": "galore"}, "galore", "bf16"),
        ({"name": "dora", "accelerate": False}, "dora-peft", "bf16"),
        ({"name": "qgalore", "step_in_backward": True}, "qgalore", "bf16"),
        ({"name": "lora", "target_modules": ["q_proj"]}, "lora", "bf16"),
    ],
)
def test_methods(method: dict[str, Any], name: str, dtype: str):
    found = setting_of(config(method=method))
    assert (found.method, found.base_dtype) == (name, dtype)
    assert found.step_in_backward == method.get("step_in_backward", False)


def test_the_longest_row_counts_unless_rows_are_packed():
    assert setting_of(config(), 77).sequence == 77
    assert setting_of(config(data={"train": "a.jsonl", "packing": True}), 77).sequence == 1024


def test_on_a_cpu_everything_is_fp32():
    found = setting_of(config(), gpu=False)
    assert (found.base_dtype, found.autocast) == ("fp32", False)


def test_a_plan_on_a_cpu_is_told():
    found = plan_run(config(), architecture(), 50, CPU)
    assert found is not None and found.capacity is None
    assert found.line.startswith("plan: peak 0.0")


def test_no_plan_without_a_closed_form_or_if_unwanted():
    assert plan_run(config(), architecture("mamba"), 50, CPU) is None
    assert plan_run(config(run={"plan": "none"}), architecture(), 50, CPU) is None


def test_targets_that_only_peft_understands_are_no_reason_to_refuse():
    named = config(method={"name": "lora", "target_modules": ["lm_head"]})
    assert plan_run(named, architecture(), 50, CPU) is None


def test_an_obvious_misfit_is_refused_unless_told():
    misfit = Planned(30 * GIB, "loss backward", "logits and loss", 24 * GIB)
    with pytest.raises(HirankError, match="needs about 30.00 GiB and the GPU has 24.00 GiB"):
        check_fits(misfit, config())
    check_fits(misfit, config(run={"plan": "say"}))
    check_fits(Planned(25 * GIB, "loss backward", "weights", 24 * GIB), config())
    check_fits(Planned(30 * GIB, "loss backward", "weights", None), config())
    check_fits(None, config())


def test_a_gpu_is_asked_for_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned, "_memory_of", lambda device: 24 * GIB)
    found = plan_run(config(), architecture(), 50, CPU)
    assert found is not None and "of 24.00 GiB at" in found.line


def test_what_was_planned_is_compared_with_what_was_seen():
    plan = Planned(10 * GIB, "loss backward", "weights", 24 * GIB)
    said = "peak memory 8.00 GiB, planned 10.00 GiB (+25 %)"
    assert told_after(plan, 8 * GIB) == said
    assert told_after(None, 8 * GIB) is None and told_after(plan, None) is None


def measured_run(monkeypatch: pytest.MonkeyPatch, file: Path) -> str | None:
    """What is said after a run with the plan of `config()`, on a GPU that is not there."""
    monkeypatch.setattr(planned, "_memory_of", lambda device: 24 * GIB)
    monkeypatch.setattr(planned, "_seen", lambda: ("card", 9 * GIB, 10 * GIB))
    plan = plan_run(config(run={"calibration": str(file)}), architecture(), 50, CPU)
    return told_after(plan, 8 * GIB)


def test_what_a_run_needed_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "runs.jsonl"
    said = measured_run(monkeypatch, file)
    assert said is not None and said.startswith("peak memory 8.00 GiB, planned 0.0")
    (found,) = recall(file)
    assert (found.gpu, found.allocated, found.reserved) == ("card", 8 * GIB, 9 * GIB)
    assert found.process == 10 * GIB and found.capacity == 24 * GIB
    assert (found.setting["method"], found.setting["sequence"]) == ("dora", 50)
    assert found.model["kind"] == "llama" and "torch" in found.versions


def test_a_run_is_good_if_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    said = measured_run(monkeypatch, tmp_path / "file" / "runs.jsonl")
    assert said is not None and "not written down, as" in said and "run.calibration" in said


def test_one_process_of_several_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(planned, "_alone", lambda: False)
    file = tmp_path / "runs.jsonl"
    measured_run(monkeypatch, file)
    assert not file.exists() and recall(file) == []


def test_a_run_on_a_cpu_writes_nothing(tmp_path: Path):
    file = tmp_path / "runs.jsonl"
    plan = plan_run(config(run={"calibration": str(file)}), architecture(), 50, CPU)
    assert told_after(plan, 8 * GIB) is not None and not file.exists()


def test_the_log_of_a_run_keeps_what_was_planned_and_no_more():
    plan = plan_run(config(), architecture(), 50, CPU)
    assert plan is not None
    assert set(plan.as_dict()) == {"allocated", "moment", "dominating", "capacity"}


def test_the_gpu_is_asked_what_is_taken(monkeypatch: pytest.MonkeyPatch):
    """1 GiB of the 9 that are not free is in no tensor and in no block of the allocator."""
    answers = {
        "mem_get_info": (15 * GIB, 24 * GIB),
        "memory_reserved": 8 * GIB,
        "max_memory_reserved": 11 * GIB,
        "get_device_name": "card",
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert planned._seen() == ("card", 11 * GIB, 12 * GIB)


def test_prepare_plans_before_anything_is_loaded(tmp_path: Path, tiny_model_dir: Path):
    import io

    from rich.console import Console

    from helpers import chat_rows, write_jsonl
    from hirank.train.prepare import prepare

    rows = write_jsonl(tmp_path / "rows.jsonl", chat_rows(12))
    settings = {
        "model": {"name": str(tiny_model_dir), "device": "cpu"},
        "data": {"train": str(rows)},
    }
    text = io.StringIO()
    run = {"dir": str(tmp_path / "run")}
    prepared = prepare(resolved(build_config({**settings, "run": run})), Console(file=text))
    assert prepared.planned is not None and "plan: peak" in text.getvalue()


@pytest.mark.parametrize(
    ("start", "note"),
    [
        ({}, "of the training process"),
        ({"planned": {"allocated": 3e9, "capacity": None}}, "of the training process"),
        ({"planned": {"allocated": 3e9, "capacity": 8e9}}, "planned 3.00 GB"),
    ],
)
def test_the_report_tells_what_was_planned(start: dict[str, Any], note: str):
    from hirank.train.report import _memory_note

    run: Any = SimpleNamespace(start=start)
    assert _memory_note(run) == note

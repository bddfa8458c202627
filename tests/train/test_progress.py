"""The callback on a real trainer: what it logs, what it shows, and how it counts time."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import PrinterCallback, Trainer, TrainingArguments

from helpers import tiny_llama
from hirank.train.progress import Answering, Memory, ProgressCallback, RunLog, read_log

ROWS = [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 0]}] * 8


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    mask = torch.tensor([row["attention_mask"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def screen(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def train(folder: Path, console: Console, *, steps: int = 4, resume: Path | None = None) -> None:
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    with RunLog(folder / "log.jsonl") as log, ProgressCallback(log, console) as progress:
        trainer = Trainer(
            tiny_llama(),
            args,
            data_collator=collate,
            train_dataset=ROWS,
            eval_dataset=ROWS[:2],
            callbacks=[progress],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def test_step_and_eval_events(tmp_path: Path) -> None:
    train(tmp_path, screen(terminal=False))
    events = read_log(tmp_path / "log.jsonl")
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    assert [e["tokens"] for e in steps] == [12, 24, 36, 48]  # padding is not counted
    for event in steps:
        assert event["loss"] > 0 and event["grad_norm"] > 0 and event["lr"] > 0
        assert 0 < event["memory_bytes"] <= event["peak_memory_bytes"]
        assert event["tokens_per_s"] > 0 and event["eta_s"] >= 0
    evals = [e for e in events if e["event"] == "eval"]
    assert [e["step"] for e in evals] == [2, 4] and all(e["eval_loss"] > 0 for e in evals)


def test_without_a_terminal_there_is_a_line_per_log(tmp_path: Path) -> None:
    console = screen(terminal=False)
    train(tmp_path, console)
    lines = text_of(console).splitlines()
    assert len(lines) == 6 and "\x1b" not in text_of(console)
    step = r"step 1/4  loss \d\.\d{4}  [\d,]+ tokens/s  [\d.]+ [MG]B  [\d.]+ s to go"
    assert re.fullmatch(step, lines[0].rstrip())
    assert re.fullmatch(r"step 2  evaluation  loss \d\.\d{4}", lines[2].rstrip())


def test_on_a_terminal_there_is_one_live_line(tmp_path: Path) -> None:
    console = screen(terminal=True)
    train(tmp_path, console)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text_of(console))
    assert "train" in text and "4/4" in text and "tokens/s" in text
    assert text.count("step 2  evaluation") == 1
    assert text_of(console).rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_tokens_go_on_after_a_resume(tmp_path: Path) -> None:
    console = screen(terminal=False)
    train(tmp_path, console)
    train(tmp_path, console, steps=6, resume=tmp_path / "out" / "checkpoint-2")
    steps = [e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["tokens"] == 72


class Clock:
    """A clock that the test turns."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def state(step: int, tokens: int) -> Any:
    return SimpleNamespace(
        global_step=step, max_steps=4, num_input_tokens_seen=tokens, is_world_process_zero=True
    )


def test_speed_leaves_evaluation_out_and_eta_counts_it(tmp_path: Path, clock: Clock) -> None:
    args: Any = SimpleNamespace(device=torch.device("cpu"))
    control: Any = None
    with RunLog(tmp_path / "log.jsonl") as log:
        progress = ProgressCallback(log, screen(terminal=False), clock=clock)
        progress.on_train_begin(args, state(0, 0), control)
        for step in (1, 2):
            progress.on_step_begin(args, state(step - 1, 100 * (step - 1)), control)
            clock.now += 2
            progress.on_step_end(args, state(step, 100 * step), control)
            progress.on_log(args, state(step, 100 * step), control, {"loss": 1.0})
            clock.now += 8
            progress.on_evaluate(args, state(step, 100 * step), control, {"eval_loss": 1.0})
    first, second = (e for e in read_log(tmp_path / "log.jsonl") if e["event"] == "step")
    assert first["tokens_per_s"] == second["tokens_per_s"] == 50
    assert (first["eta_s"], second["eta_s"]) == (2 / 1 * 3, 12 / 2 * 2)


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    other = state(1, 10)
    other.is_world_process_zero = False
    with RunLog(tmp_path / "log.jsonl") as log:
        progress = ProgressCallback(log, screen(terminal=False))
        progress.on_log(SimpleNamespace(), other, None, {"loss": 1.0})  # type: ignore[arg-type]
        progress.on_evaluate(SimpleNamespace(), other, None, {"eval_loss": 1.0})  # type: ignore[arg-type]
    assert read_log(tmp_path / "log.jsonl") == []


def test_exact_match_is_taken_from_the_metrics(tmp_path: Path) -> None:
    console = screen(terminal=False)
    metrics = {"eval_loss": 1.25, "eval_exact_match": 0.625, "eval_n": 8, "eval_runtime": 3.0}
    with RunLog(tmp_path / "log.jsonl") as log:
        ProgressCallback(log, console).on_evaluate(SimpleNamespace(), state(3, 9), None, metrics)  # type: ignore[arg-type]
    (event,) = read_log(tmp_path / "log.jsonl")
    assert event["exact_match"] == 0.625 and event["n"] == 8 and "eval_runtime" not in event
    assert "exact match 62.5 %" in text_of(console)


def test_answering_is_told_at_once_and_then_not_too_often() -> None:
    said: list[str] = []
    seconds = iter((0.0, 4.0, 11.0, 12.0, 40.0))
    answering = Answering(said.append, clock=lambda: next(seconds))
    for done in (0, 1000, 2000, 3000):
        answering(done, 4000)
    answering(0, 2)  # another exam
    assert said == [
        "answering 4,000 questions",
        "answering 4,000 questions, 2,000 done",
        "answering 2 questions",
    ]


def test_memory_of_this_process_never_falls_below_its_peak() -> None:
    memory = Memory(torch.device("cpu"))
    before, _ = memory.read()
    ballast = bytearray(64 << 20)
    now, peak = memory.read()
    del ballast
    assert before > 0 and peak >= now and memory.read()[1] >= peak


@pytest.mark.gpu
def test_memory_of_the_gpu_is_what_torch_allocated() -> None:
    memory = Memory(torch.device("cuda"))
    before, _ = memory.read()
    held = torch.empty(1 << 20, device="cuda")
    now, peak = memory.read()
    assert now - before == held.numel() * 4 and peak >= now

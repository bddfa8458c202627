"""What a run tells while it runs: `log.jsonl` for machines, a live line for people.

    with RunLog(run_dir / "log.jsonl") as log, ProgressCallback(log, console) as progress:
        trainer = SFTTrainer(..., callbacks=[progress])
        trainer.remove_callback(PrinterCallback)            # ours replaces the stock printing
        trainer.train()

Tokens are the trainer's own `state.num_input_tokens_seen`, so set
`include_num_input_tokens_seen="non_padding"`: the count is saved with the checkpoint and goes on
after a resume. Set `logging_nan_inf_filter=False`, or the trainer hides a loss that became NaN.

Units      seconds, bytes, tokens of the whole job (all processes).
Memory     resident set of this process on a CPU; allocated by torch on a GPU.
Speed      tokens per second of training alone: evaluation and saving are not counted.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from hirank.page.units import bytes_text, duration_text, percent_text
from hirank.train.runlog import Event, RunLog, read_log

__all__ = ["Answering", "Memory", "ProgressCallback", "RunLog", "read_log"]


# Memory.


class Memory:
    """Bytes in use and their peak: of this process on a CPU, of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._peak = 0

    def read(self) -> tuple[int, int]:
        """(bytes now, peak bytes so far)."""
        if self._device.type == "cuda":
            now = torch.cuda.memory_allocated(self._device)
            return now, torch.cuda.max_memory_allocated(self._device)
        now = int(self._process.memory_info().rss)
        self._peak = max(self._peak, now, _peak_resident())
        return now, self._peak


def _peak_resident() -> int:
    """Largest resident set of this process so far in bytes; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Time: what the trainer does between its callbacks, told apart.


class _Stopwatch:
    """Seconds of training since the last reading, and the pace of the whole session."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy = 0.0
        self.reset(0)

    def reset(self, step: int) -> None:
        self._began = self._mark = self._clock()
        self._first_step = step

    def resume(self) -> None:
        self._mark = self._clock()

    def pause(self) -> None:
        now = self._clock()
        self._busy += now - self._mark
        self._mark = now

    def take_busy(self) -> float:
        self.pause()
        busy, self._busy = self._busy, 0.0
        return busy

    def eta(self, step: int, last_step: int) -> float | None:
        """Seconds to go at the pace so far, evaluation and saving included."""
        done = step - self._first_step
        if done <= 0:
            return None
        return (self._clock() - self._began) / done * max(0, last_step - step)


# The callback.


class ProgressCallback(TrainerCallback):
    """Logs step and eval events and shows them: a live bar, or plain lines without a terminal.

    Use it as a context manager, so that the terminal is restored when training is interrupted.
    """

    def __init__(
        self, log: RunLog, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._console = console
        self._watch = _Stopwatch(clock)
        self._tokens = 0
        self._memory: Memory | None = None
        self._bar: _Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the live bar away and leave its last state on the screen."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock at the step the run starts or resumes from."""
        self._memory = Memory(args.device)
        self._tokens = int(state.num_input_tokens_seen)
        self._watch.reset(state.global_step)
        if state.is_world_process_zero and self._console.is_terminal:
            self._bar = _Bar(self._console, state.global_step, state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training time starts to count."""
        self._watch.resume()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training time stops to count; the bar moves on."""
        self._watch.pause()
        if self._bar is not None:
            self._bar.move(state.global_step, self._watch.eta(state.global_step, state.max_steps))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a step event; the trainer's own summaries, which carry no loss, pass by."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        event = self._log.append("step", state.global_step, **self._reading(logs or {}, state))
        if self._bar is not None:
            self._bar.show(event)
        else:
            self._console.print(_step_line(event, state.max_steps), markup=False, highlight=False)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Show how far an evaluation is."""
        if self._bar is not None:
            self._bar.evaluating(len(eval_dataloader) if has_length(eval_dataloader) else None)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write an eval event: eval_loss, and exact_match and n where they were measured."""
        if not state.is_world_process_zero:
            return
        names = {"eval_loss": "eval_loss", "eval_exact_match": "exact_match", "eval_n": "n"}
        found = {ours: (metrics or {}).get(theirs) for theirs, ours in names.items()}
        fields = {name: value for name, value in found.items() if value is not None}
        event = self._log.append("eval", state.global_step, **fields)
        if self._bar is not None:
            self._bar.evaluated()
        self._console.print(_eval_line(event), markup=False, highlight=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The bar has done its work."""
        self.close()

    def _reading(self, logs: dict[str, Any], state: TrainerState) -> Event:
        tokens, busy = int(state.num_input_tokens_seen), self._watch.take_busy()
        fresh, self._tokens = tokens - self._tokens, tokens
        now, peak = (self._memory or Memory(torch.device("cpu"))).read()
        skipped = {"skipped": logs["skipped"]} if "skipped" in logs else {}
        return skipped | {
            "loss": logs["loss"],
            "lr": logs.get("learning_rate"),
            "grad_norm": logs.get("grad_norm"),
            "tokens": tokens,
            "tokens_per_s": fresh / busy if busy > 0 else None,
            "memory_bytes": now,
            "peak_memory_bytes": peak,
            "eta_s": self._watch.eta(state.global_step, state.max_steps),
        }


# What people see.


class Answering:
    """Says that questions are being answered, and after a while how many are."""

    def __init__(
        self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done and now - self._said < _PATIENCE:
            return
        self._said = now
        self._say(f"answering {total:,} questions" + (f", {done:,} done" if done else ""))


_PATIENCE = 10.0  # seconds without a word


class _Bar:
    """The live line: training, and under it the evaluation while one is under way."""

    def __init__(self, console: Console, step: int, last_step: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            TextColumn("{task.fields[eta]}", style="dim", markup=False),
            console=console,
        )
        self._train = self._add("train", total=last_step, completed=step)
        self._eval: TaskID | None = None
        self._progress.start()

    def _add(self, name: str, *, total: int | None, completed: int = 0) -> TaskID:
        return self._progress.add_task(name, total=total, completed=completed, state="", eta="")

    def move(self, step: int, eta: float | None) -> None:
        self._progress.update(self._train, completed=step, eta=_eta_text(eta))

    def show(self, event: Event) -> None:
        self._progress.update(self._train, completed=event["step"], state=_state_text(event))

    def evaluating(self, batches: int | None) -> None:
        if self._eval is None:
            self._eval = self._add("evaluate", total=batches)
        self._progress.advance(self._eval)

    def evaluated(self) -> None:
        if self._eval is not None:
            self._progress.remove_task(self._eval)
        self._eval = None

    def stop(self) -> None:
        self.evaluated()
        self._progress.stop()


def _step_line(event: Event, last_step: int) -> str:
    parts = [f"step {event['step']}/{last_step}", _state_text(event), _eta_text(event["eta_s"])]
    return "  ".join(part for part in parts if part)


def _state_text(event: Event) -> str:
    """`loss 1.2345  412 tokens/s  1.92 GB`; what is not known is left out."""
    parts = [f"loss {event['loss']:.4f}"]
    if event["tokens_per_s"]:
        parts.append(f"{event['tokens_per_s']:,.0f} tokens/s")
    if event.get("skipped"):
        parts.append(f"{event['skipped']:,} skipped")
    return "  ".join([*parts, bytes_text(event["memory_bytes"])])


def _eta_text(seconds: float | None) -> str:
    """Nothing when it is not known yet, and nothing when it is over."""
    return f"{duration_text(seconds)} to go" if seconds else ""


def _eval_line(event: Event) -> str:
    parts = [f"step {event['step']}  evaluation"]
    if "eval_loss" in event:
        parts.append(f"loss {event['eval_loss']:.4f}")
    if "exact_match" in event:
        parts.append(f"exact match {percent_text(event['exact_match'])}")
    return "  ".join(parts)

"""One training run, from a configuration to a folder.

What happens, in this order:

    prepare    everything that can be refused, see prepare.py
    set up     the run's folder, the model, its adapter
    train      with checkpoints, evaluations and a log
    finish     last weights, answers after, report, model card
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hirank.files import recover, write_text
from hirank.train import checkpoint, lowrank, methods, model
from hirank.train.config import dump_config, resolved
from hirank.train.evaluate import EvalConfig
from hirank.train.interrupt import Interrupt
from hirank.train.optim import interval, trainer_settings
from hirank.train.planned import told_after
from hirank.train.prepare import Prepared, prepare
from hirank.train.quiet import quiet, say
from hirank.train.run import alone_in, claim_run_dir, cleared_on_failure, versions
from hirank.train.runlog import RunLog, read_log
from hirank.train.summary import Sample, load_summary

if TYPE_CHECKING:
    from rich.console import Console

    from hirank.optim.optimizer import LowRankAdamW
    from hirank.train.config import TrainConfig
    from hirank.train.methods import Applied
    from hirank.train.progress import ProgressCallback
    from hirank.train.trainer import Exam, Trainer

__all__ = ["RunResult", "train"]

STOPPING = "Stopping after this step, with a checkpoint. Press Ctrl-C again to stop at once."


@dataclass(frozen=True)
class RunResult:
    """What a run came to. `before` and `after` hold eval_loss, exact_match and n where measured."""

    run_dir: Path
    status: Literal["finished", "interrupted"]
    step: int
    weights: Path
    """Folder of the last weights; there only if the run has finished."""
    best: Path | None
    """Folder of the best weights, None if nothing was evaluated."""
    report: Path
    before: dict[str, Any]
    after: dict[str, Any]
    samples: list[Sample]
    """The questions that were answered before and after, with both answers."""
    nonfinite_step: int | None
    """The first step whose loss was NaN or infinite."""


def train(config: TrainConfig, *, console: Console, resume: Path | None = None) -> RunResult:
    """Train as configured, or continue the run (or the checkpoint of a run) at `resume`.

    Raises HirankError for anything wrong with the input, and KeyboardInterrupt if it is stopped
    twice, or before there is anything to save.
    """
    config = resolved(config)
    notice = partial(say, console, STOPPING)
    with quiet(console), Interrupt(notice) as interrupt, ExitStack() as stack:
        if resume:
            stack.enter_context(alone_in(checkpoint.run_of(resume)))
        prepared = prepare(config, console, resume)
        run_dir = checkpoint.run_of(resume) if resume else claim_run_dir(config.run)
        if not resume:
            stack.enter_context(alone_in(run_dir))
        with cleared_on_failure(run_dir, new=resume is None) as worth:
            try:
                return _Run(prepared, run_dir, console, interrupt, worth).go()
            except KeyboardInterrupt:
                for newest in checkpoint.steps(run_dir)[:1]:
                    say(console, f"Resume from {newest.name}: hirank train --resume {run_dir}")
                raise


class _Run:
    """A run that has its folder; `go` is its story."""

    def __init__(
        self,
        prepared: Prepared,
        run_dir: Path,
        console: Console,
        interrupt: Interrupt,
        worth: list[bool],
    ) -> None:
        self.prepared, self.run_dir, self.console = prepared, run_dir, console
        self.config = _placed(prepared.config, run_dir)
        self.interrupt, self.worth = interrupt, worth
        kind = "adapter" if self.config.method.method.adapter else "model"
        self.last, self.best = run_dir / kind, run_dir / f"{kind}-best"

    def go(self) -> RunResult:
        from hirank.train.progress import ProgressCallback

        self._write_settings()
        applied = self._model()
        optimizer = self._optimizer(applied)
        with (
            RunLog(self.run_dir / "log.jsonl") as log,
            ProgressCallback(log, self.console) as progress,
        ):
            self._log_start(log, applied, optimizer)
            trainer = self._trainer(log, applied, optimizer, progress)
            if not self.prepared.resume and self.config.eval.before:
                self._samples(trainer, log, "before")
            self._train(trainer)
            return self._finish(trainer, log)

    # Set up.

    def _write_settings(self) -> None:
        recover(self.last)
        recover(self.best)
        device = str(model.pick_device(self.config.model))
        write_text(self.run_dir / "config.yaml", dump_config(self.config))
        write_text(self.run_dir / "versions.json", json.dumps(versions(device), indent=2) + "\n")

    def _model(self) -> Applied:
        from transformers import set_seed

        method = self.config.method
        self._say(f"loading {self.config.model.name}")
        full = not method.method.adapter and not method.method.optimizer
        base = model.load_model(self.config.model, full=full)
        set_seed(self.config.optim.seed)
        return methods.apply(base, method)

    def _optimizer(self, applied: Applied) -> LowRankAdamW | None:
        """The method's own, if it has one; else the trainer makes torch's AdamW."""
        method = self.config.method
        if not method.method.optimizer:
            return None
        return lowrank.build(applied.model, method, self.config.optim)

    def _log_start(self, log: RunLog, applied: Applied, optimizer: LowRankAdamW | None) -> None:
        trainable, total = methods.parameter_counts(applied.model)
        prepared, resume = self.prepared, self.prepared.resume
        log.append(
            "start",
            resume.step if resume else 0,
            versions=versions(str(model.pick_device(self.config.model))),
            config=self.config.model_dump(mode="json"),
            model=model.locate(self.config.model.name).path,
            n_train=len(prepared.train_set.dataset),
            n_eval=len(prepared.eval_set.dataset) if prepared.eval_set else 0,
            tokens=prepared.train_set.n_tokens,
            trainable_params=trainable,
            total_params=total,
            layers=applied.layers,
            **({"planned": prepared.planned.as_dict()} if prepared.planned else {}),
            **({"optimizer": lowrank.facts(optimizer)} if optimizer else {}),
        )
        self._say(f"{trainable:,} of {total:,} parameters are trained, {prepared.steps} steps")
        if optimizer:
            self._say(optimizer.describe())

    def _trainer(
        self,
        log: RunLog,
        applied: Applied,
        optimizer: LowRankAdamW | None,
        progress: ProgressCallback,
    ) -> Trainer:
        from hirank.train.packing import collator_for
        from hirank.train.trainer import Folder, StopWhenAsked, Trainer, training_args

        prepared, config = self.prepared, self.config
        facts = {"config": config.model_dump(mode="json"), "data": prepared.fingerprint}
        collators = [
            collator_for(applied.model, prepared.tokenizer, packing=packing)
            for packing in (config.data.packing, False)
        ]
        args = training_args(self._settings())
        if optimizer:
            lowrank.refuse_processes(args, config.method)
        return Trainer(
            low_rank=optimizer,
            step_in_backward=config.method.step_in_backward,
            folder=Folder(self.run_dir, self.best, config.run.keep, facts, log),
            exam=self._exam(),
            model=applied.model,
            args=args,
            data_collator=collators[0],
            eval_collator=collators[1],
            train_dataset=prepared.train_set.dataset,
            eval_dataset=prepared.eval_set.dataset if prepared.eval_set else None,
            processing_class=prepared.tokenizer,
            callbacks=[
                progress,
                StopWhenAsked(self.interrupt, lambda: self.worth.append(True)),
            ],
        )

    def _exam(self) -> Exam:
        from hirank.train.progress import Answering
        from hirank.train.trainer import Exam

        settings = self.config.eval
        return Exam(
            self.prepared.questions,
            batch_size=settings.batch_size,
            max_new_tokens=settings.max_new_tokens,
            scored_every_time=settings.exact_match_every_eval,
            scored_at_ends=settings.exact_match or settings.exact_match_every_eval,
            told=Answering(self._say),
        )

    def _settings(self) -> dict[str, Any]:
        gpu = model.pick_device(self.config.model).type == "cuda"
        settings = trainer_settings(self.config, steps=self.prepared.steps, gpu=gpu)
        settings["output_dir"] = str(self.run_dir)
        if self.prepared.eval_set is None:
            return settings | {"eval_strategy": "no"}
        return settings | _evaluation(self.config.eval, self.prepared)

    # Train.

    def _train(self, trainer: Trainer) -> None:
        resume = self.prepared.resume
        if resume is None:
            trainer.train()
        elif resume.step < self.prepared.steps:
            self._say(f"continuing after step {resume.step}")
            trainer.train(resume_from_checkpoint=str(resume.path))
        else:
            trainer.load_finished(str(resume.path))

    def _samples(self, trainer: Trainer, log: RunLog, phase: str) -> None:
        """Write down some answers; those to all questions are made now if they will be scored."""
        asked = self.prepared.questions
        count = min(self.config.eval.samples, len(asked))
        if not asked or not count:
            return
        scored = trainer.exam.scored_at_ends
        outputs = trainer.answers(len(asked) if scored else count)[:count]
        for question, output in zip(asked, outputs, strict=False):
            log.append(
                "sample",
                trainer.state.global_step,
                phase=phase,
                prompt=question.prompt,
                expected=question.expected,
                output=output,
            )

    # Finish.

    def _finish(self, trainer: Trainer, log: RunLog) -> RunResult:
        from hirank.train.trainer import save_weights

        step = trainer.state.global_step
        finished = step >= self.prepared.steps
        if finished:
            save_weights(trainer.model, self.prepared.tokenizer, self.last)
            self._samples(trainer, log, "after")
        status: Literal["finished", "interrupted"] = "finished" if finished else "interrupted"
        measured = self._peak()
        found = {} if measured is None else {"peak_allocated_bytes": measured}
        log.append("end", step, status=status, best_step=trainer.state.best_global_step, **found)
        if (said := told_after(self.prepared.planned, measured)) is not None:
            self._say(said)
        return self._result(status, step)

    def _peak(self) -> int | None:
        """The most that was in tensors on the GPU; None on a CPU."""
        import torch

        device = model.pick_device(self.config.model)
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def _result(self, status: Literal["finished", "interrupted"], step: int) -> RunResult:
        from hirank.train.card import write_card
        from hirank.train.report import write_report

        events = read_log(self.run_dir / "log.jsonl")
        write_text(self.run_dir / "samples.jsonl", _sample_lines(events))
        write_card(self.run_dir)
        evals = [event for event in events if event["event"] == "eval"]
        summary = load_summary(self.run_dir)
        return RunResult(
            run_dir=self.run_dir,
            status=status,
            step=step,
            weights=self.last,
            best=self.best if self.best.is_dir() else None,
            report=write_report(self.run_dir),
            before=next((e for e in evals if e["step"] == 0), {}),
            after=next((e for e in reversed(evals) if e["step"] == step), {}),
            samples=summary.samples,
            nonfinite_step=summary.nonfinite_step,
        )

    def _say(self, text: str) -> None:
        say(self.console, text)


def _placed(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """The settings with the folder that the run got."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})


def _evaluation(settings: EvalConfig, prepared: Prepared) -> dict[str, Any]:
    by_match = settings.exact_match_every_eval
    return {
        "eval_strategy": "steps",
        "eval_steps": interval(settings.every, prepared.steps),
        "eval_on_start": settings.before and prepared.resume is None,
        "metric_for_best_model": "eval_exact_match" if by_match else "eval_loss",
        "greater_is_better": by_match,
    }


def _sample_lines(events: list[dict[str, Any]]) -> str:
    kept = ("step", "phase", "prompt", "expected", "output")
    rows = [{key: e[key] for key in kept} for e in events if e["event"] == "sample"]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

"""TRL's SFTTrainer as hirank uses it: the one file that knows how TRL and Transformers train.

It differs in five ways: checkpoints are written whole or not at all, evaluation weighs every
token alike and leaves training undisturbed, exact match is measured beside the loss, the best
weights are put aside when they are found, and a low-rank optimiser may step in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from hirank.files import atomic_folder
from hirank.optim.backward import StepInBackward
from hirank.optim.optimizer import LowRankAdamW
from hirank.train import lowrank
from hirank.train.checkpoint import rotate, seal, step_dir
from hirank.train.evaluate import Question, Told, exact_match, generate, undisturbed
from hirank.train.interrupt import Interrupt
from hirank.train.runlog import RunLog

__all__ = [
    "Exam",
    "Folder",
    "StopWhenAsked",
    "Trainer",
    "save_weights",
    "training_args",
    "write_weights",
]

# Questions and answers.


@dataclass
class Exam:
    """Questions to the model, and its answers, which are remembered for the last step asked."""

    questions: Sequence[Question]
    batch_size: int
    max_new_tokens: int
    scored_every_time: bool = False
    scored_at_ends: bool = False
    told: Told | None = None
    _step: int = -1
    _answers: list[str] = field(default_factory=list)

    def answers(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, step: int, count: int
    ) -> list[str]:
        """Answers to the first `count` questions after `step` steps."""
        if step != self._step or len(self._answers) < count:
            prompts = [question.prompt for question in self.questions[:count]]
            self._answers = generate(
                model,
                tokenizer,
                prompts,
                max_new_tokens=self.max_new_tokens,
                batch_size=self.batch_size,
                told=self.told,
            )
            self._step = step
        return self._answers[:count]

    def is_scored(self, step: int, last_step: int) -> bool:
        """Whether exact match is measured after `step` steps."""
        at_end = step == 0 or step >= last_step
        return self.scored_every_time or (self.scored_at_ends and at_end)


# The trainer.


@dataclass
class Folder:
    """Where the trainer writes, and what it writes beside the weights."""

    run_dir: Path
    best: Path
    keep: int
    facts: dict[str, Any]
    log: RunLog


class Trainer(SFTTrainer):
    """SFTTrainer with whole checkpoints, even-handed evaluation, exact match and best weights."""

    model: Any
    processing_class: Any
    eval_dataset: Any

    def __init__(
        self,
        *,
        folder: Folder,
        exam: Exam,
        eval_collator: Callable[..., Any],
        low_rank: LowRankAdamW | None = None,
        step_in_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizers=(low_rank, None), **kwargs)
        self.low_rank, self.step_in_backward = low_rank, step_in_backward
        self.engine: StepInBackward | None = None
        self.folder = folder
        self.exam = exam
        self.eval_collator = eval_collator
        self.remove_callback(PrinterCallback)

    def answers(self, count: int) -> list[str]:
        """The model's answers to the first `count` questions, as it is now."""
        with self.accelerator.autocast():
            return self.exam.answers(
                self.model, self.processing_class, self.state.global_step, count
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The first one hands the steps to backward, now that the model is where it stays."""
        if self.step_in_backward and self.engine is None and self.low_rank is not None:
            self.engine = self.low_rank.step_in_backward(
                micro_batches=self.args.gradient_accumulation_steps,
                clip=self.args.max_grad_norm or None,
            )
        step: Callable[..., Any] = super().training_step
        return step(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        """The engine clips what it holds; there are no gradients here to be clipped."""
        clip: Callable[..., Any] = super()._clip_grad_norm
        return None if self.engine else clip(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As ever, but without the product with a factor that one NaN makes NaN for all."""
        if self.engine:
            return None
        if grad_norm is None and self.low_rank is not None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            grad_norm = nn.utils.get_total_norm(grads)
        norm: Callable[..., Any] = super()._get_grad_norm
        return norm(model, grad_norm=grad_norm)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """What is logged, and how many steps of a parameter have been skipped so far."""
        if self.low_rank is not None and "loss" in logs:
            logs["skipped"] = lowrank.skipped(self.low_rank)
            if self.engine is not None and self.engine.grad_norm is not None:
                logs["grad_norm"] = float(self.engine.grad_norm)
        super().log(logs, *args, **kwargs)

    def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
        super()._load_from_checkpoint(path, model)
        lowrank.load_int8(self.model, Path(path))

    def load_finished(self, path: str) -> None:
        """Take weights and state from the checkpoint of a run whose last step is done."""
        self._load_from_checkpoint(path)
        self.state = TrainerState.load_from_json(f"{path}/trainer_state.json")

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count real tokens; packed rows come without a mask and have hardly any padding."""
        mask = inputs.get("attention_mask")
        count = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        self.state.num_input_tokens_seen += count

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Held-out rows are not packed, even where the training rows are."""
        train_collator, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.data_collator = train_collator

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The mean loss of all scored tokens, and exact match where it is due."""
        self.callback_handler.eval_dataloader = dataloader
        with undisturbed(self.model):
            loss = self._mean_token_loss(dataloader)
        metrics = {"eval_loss": loss, "eval_n": len(self.eval_dataset)}
        step, asked = self.state.global_step, self.exam.questions
        if self.exam.is_scored(step, self.state.max_steps):
            metrics["eval_exact_match"] = exact_match(self.answers(len(asked)), asked)
        nothing: Any = None
        return EvalLoopOutput(nothing, nothing, metrics, len(self.eval_dataset))

    def _mean_token_loss(self, dataloader: Any) -> float:
        total, tokens = 0.0, 0
        token_mean: Callable[..., Any] = self.compute_loss
        for batch in dataloader:
            inputs = self._prepare_inputs(batch)
            count = int((inputs["labels"] != -100).sum())
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                total += float(token_mean(self.model, inputs)) * count
            tokens += count
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        return total / tokens if tokens else math.nan

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = bool(super()._determine_best_metric(metrics, trial))
        if best:
            save_weights(self.model, self.processing_class, self.folder.best)
        return best

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        target = step_dir(self.folder.run_dir, step)
        with atomic_folder(target, replace=True) as draft:
            write_weights(self.model, draft)
            lowrank.save_int8(self.model, draft)
            self._save_optimizer_and_scheduler(str(draft))
            self._save_scaler(str(draft))
            self._save_rng_state(str(draft))
            self.state.save_to_json(str(draft / "trainer_state.json"))
            seal(draft, step, self.folder.facts)
        rotate(self.folder.run_dir, self.folder.keep)
        self.folder.log.append(
            "checkpoint", step, path=str(target.relative_to(self.folder.run_dir))
        )


def write_weights(model: Any, folder: Path) -> None:
    """The adapter in PEFT's format, or the whole model in Transformers'."""
    if hasattr(model, "peft_config"):
        # embeddings that are trained are in modules_to_save already
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
    else:
        model.save_pretrained(folder, state_dict=lowrank.plain_weights(model))


def save_weights(model: Any, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Weights and tokenizer as a folder to use elsewhere, whole or not at all."""
    with atomic_folder(target, replace=True) as draft:
        write_weights(model, draft)
        tokenizer.save_pretrained(draft)


class StopWhenAsked(TrainerCallback):
    """After a signal: a checkpoint at the end of the step or evaluation, then the end."""

    def __init__(self, interrupt: Interrupt, on_first_step: Callable[[], None]) -> None:
        self.interrupt = interrupt
        self.on_first_step = on_first_step

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """There is something worth saving from here on."""
        self.interrupt.arm()
        self.on_first_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save and stop if asked to."""
        return self._stop(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """The same after an evaluation, which can take longer than a step."""
        return self._stop(control) if state.global_step else control

    def _stop(self, control: TrainerControl) -> TrainerControl:
        if self.interrupt.requested:
            control.should_save = control.should_training_stop = True
        return control


def training_args(settings: dict[str, Any]) -> SFTConfig:
    """TRL's arguments: what hirank always wants, and the settings of this run."""
    args = SFTConfig(
        fp16=False,
        logging_nan_inf_filter=False,  # a loss that became NaN is shown as such
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        prediction_loss_only=True,
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing_kwargs={"use_reentrant": False},
        **settings,
    )
    args._n_gpu = min(args.n_gpu, 1)  # one process drives one GPU
    return args

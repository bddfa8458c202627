"""Everything that can be refused, before anything heavy is done or written.

Settings, output folder, checkpoint, data, tokens, and the adapter against the shapes of the
model. Only the weights are left to load afterwards.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError
from hirank.train import methods, model
from hirank.train.checkpoint import Checkpoint, open_checkpoint, run_of
from hirank.train.evaluate import Question, need_questions, questions
from hirank.train.optim import planned_steps
from hirank.train.parent import step_notice
from hirank.train.planned import Planned, check_fits, plan_run
from hirank.train.quiet import say, without_bars
from hirank.train.run import check_run_dir
from hirank.train.runlog import read_log

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from hirank.train.config import TrainConfig
    from hirank.train.data import Examples
    from hirank.train.tokens import Encoded

__all__ = ["Prepared", "changed_settings", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """All that a run needs and that can be had without the model's weights."""

    config: TrainConfig
    resume: Checkpoint | None
    examples: Examples
    tokenizer: PreTrainedTokenizerBase
    train_set: Encoded
    eval_set: Encoded | None
    questions: list[Question]
    trainable: int  # parameters
    steps: int
    planned: Planned | None = None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the training tokens and labels in their order."""
        digest = hashlib.sha256()
        for row in self.train_set.dataset:
            digest.update(json.dumps([row["input_ids"], row["labels"]]).encode())
        return digest.hexdigest()


def prepare(config: TrainConfig, console: Console, resume: Path | None = None) -> Prepared:
    """Read and check everything but the weights. Writes nothing. Raises HirankError."""
    from hirank.train.data import load_examples

    found = _resume_point(config, resume) if resume else None
    if found is None:
        check_run_dir(config.run)
        if (notice := step_notice(config)) is not None:
            warnings.warn(notice, stacklevel=1)
    model.locate(config.model.name)
    examples = load_examples(config.data)
    say(console, str(examples.counts))
    device = model.pick_device(config.model)
    without_bars()  # here, because what comes before is quick to refuse
    tokenizer = model.load_tokenizer(config.model)
    train_set, eval_set = _encode(config, examples, tokenizer)
    for part in (train_set, eval_set):
        _tell_left_out(part, config, console)
    architecture = model.load_architecture(config.model)
    shape = model.meta_model(config.model, architecture)
    for part in (train_set, eval_set):
        _check_fits(part, shape)
    trainable = methods.check(shape, config.method)
    planned = plan_run(config, architecture, max(train_set.lengths), device)
    check_fits(planned, config)
    prepared = Prepared(
        config=config,
        resume=found,
        examples=examples,
        tokenizer=tokenizer,
        train_set=train_set,
        eval_set=eval_set,
        questions=_questions(config, examples, tokenizer),
        trainable=trainable,
        steps=planned_steps(config.optim, len(train_set.dataset)),
        planned=planned,
    )
    _check_same_data(prepared)
    if planned is not None:
        say(console, planned.line)
    return prepared


def _encode(
    config: TrainConfig, examples: Examples, tokenizer: PreTrainedTokenizerBase
) -> tuple[Encoded, Encoded | None]:
    from hirank.train.tokens import encode

    train_set = encode(examples.train, tokenizer, config.data)
    if not examples.eval:
        return train_set, None
    return train_set, encode(examples.eval, tokenizer, config.data, packing=False)


def _tell_left_out(part: Encoded | None, config: TrainConfig, console: Console) -> None:
    """No row disappears without a word."""
    if part is None:
        return
    limit = f"longer than data.max_length {config.data.max_length}"
    counts = {
        f"are {limit} and left out": part.n_dropped,
        f"are {limit} and cut": part.n_truncated,
        "are refused by the chat template and left out": part.n_refused,
    }
    for what, count in counts.items():
        if count:
            say(console, f"{count} rows {what}", "yellow")


def _check_fits(part: Encoded | None, shape: Any) -> None:
    """Refuse tokens that the model has no embedding for, and rows beyond its last position."""
    if part is None:
        return
    rows, vocabulary = part.dataset["input_ids"], shape.get_input_embeddings().num_embeddings
    largest = max(max(row) for row in rows)
    if largest >= vocabulary:
        raise HirankError(
            f"The tokenizer makes the token {largest}, but the model knows only {vocabulary}; "
            "use the model's own tokenizer (model.tokenizer)."
        )
    positions, longest = model.learned_positions(shape), max(part.lengths)
    if positions is not None and longest > positions:
        raise HirankError(
            f"A row has {longest} tokens, but the model knows only {positions} positions; "
            f"set data.max_length to {positions} or less."
        )


def _questions(
    config: TrainConfig, examples: Examples, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    """Held-out questions; without held-out rows, training rows are good enough for samples."""
    scored = config.eval.exact_match or config.eval.exact_match_every_eval
    count = max(config.eval.exact_match_rows if scored else 0, config.eval.samples)
    skip = config.data.skip_bad_rows
    asked = questions(examples.eval, tokenizer, count, skip_bad=skip)
    need_questions(asked, config.eval)
    return asked or questions(examples.train, tokenizer, config.eval.samples, skip_bad=skip)


# Resuming.


def _resume_point(config: TrainConfig, resume: Path) -> Checkpoint:
    found = open_checkpoint(resume)
    log = run_of(resume) / "log.jsonl"
    if log.exists():
        read_log(log)  # what the report will be made of, before hours are spent
    before = found.facts.get("config")
    if not isinstance(before, dict) or not all(isinstance(part, dict) for part in before.values()):
        raise HirankError(
            f"The checkpoint {found.path} cannot be used: its manifest.json does not say what it "
            "was trained with; resume from another one, or start the run again."
        )
    changed = changed_settings(before, config)
    if changed:
        raise HirankError(
            f"{resume} was trained with other settings ({', '.join(changed)}); "
            "resume with the same ones, or start a new run."
        )
    return found


def changed_settings(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """Settings that differ and matter: where to write, how to measure and how long do not."""
    free: dict[str, set[str]] = {
        "optim": {"epochs", "max_steps"},
        "model": {"device"},
        "data": {"train", "eval", "eval_limit"},  # the rows learnt are compared by content
    }
    return [
        f"{part}.{key} was {before.get(part, {}).get(key)!r} and is now {value!r}"
        for part, settings in config.model_dump(mode="json").items()
        for key, value in settings.items()
        if part not in ("run", "eval") and key not in free.get(part, set())
        if before.get(part, {}).get(key) != value
    ]


def _check_same_data(prepared: Prepared) -> None:
    resume = prepared.resume
    if resume and resume.facts.get("data") != prepared.fingerprint:
        raise HirankError(
            f"The training data is not what {resume.path} was trained on; "
            "restore the files, or start a new run."
        )

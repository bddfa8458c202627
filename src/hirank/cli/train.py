"""`hirank train` and `hirank chat`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hirank.cli.common import INTERRUPTED, Set, console, told
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.train.loop import RunResult
    from hirank.train.summary import Sample

__all__ = ["chat", "mount", "train"]

Config = Annotated[
    Path | None,
    typer.Argument(help="YAML file with the settings; may be left out with --resume."),
]
Resume = Annotated[
    Path | None, typer.Option(metavar="RUN", help="Continue this run, or one of its checkpoints.")
]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Leave bad rows of the data out and count them.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and say what would be done, no more.")
]


def mount(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(train)
    app.command()(chat)


@told
def train(
    config: Config = None,
    set_: Set = None,
    resume: Resume = None,
    skip_bad_rows: SkipBadRows = False,
    dry_run: DryRun = False,
) -> None:
    """Fine-tune a model as CONFIG says."""
    overrides = list(set_ or []) + (["data.skip_bad_rows=true"] if skip_bad_rows else [])
    settings = _settings(config, overrides, resume)
    terminal = console()
    if dry_run:
        return _show_plan(settings, resume, terminal)
    from hirank.train.loop import train as train_run

    result = train_run(settings, console=terminal, resume=resume)
    _show_result(result, terminal)
    if result.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _settings(config: Path | None, overrides: list[str], resume: Path | None) -> Any:
    from hirank.train.checkpoint import run_of
    from hirank.train.config import load_config

    if config is None and resume is not None:
        config = run_of(resume) / "config.yaml"
    if config is None and not overrides:
        raise HirankError("Give a configuration file, settings with --set, or a run to --resume.")
    return load_config(config, overrides)


def _show_plan(settings: Any, resume: Path | None, terminal: Any) -> None:
    from hirank.train.config import dump_config, resolved
    from hirank.train.prepare import prepare
    from hirank.train.quiet import quiet, say

    settings = resolved(settings)
    with quiet(terminal):
        prepared = prepare(settings, terminal, resume)
    say(terminal, dump_config(settings))
    held_out = len(prepared.eval_set.dataset) if prepared.eval_set else 0
    say(
        terminal,
        f"{len(prepared.train_set.dataset):,} rows to train on, {held_out:,} held out, "
        f"{prepared.train_set.n_tokens:,} tokens, {prepared.trainable:,} parameters, "
        f"{prepared.steps:,} steps. Nothing was written.",
    )


def _show_result(result: RunResult, terminal: Any) -> None:
    from hirank.train.quiet import say

    lines = [line for sample in result.samples for line in _sample_lines(sample)]
    lines.append(f"{result.status.capitalize()} at step {result.step}.")
    lines += [
        f"{title}: {result.before[key]:.4g} before, {result.after[key]:.4g} after"
        for title, key in (("Held-out loss", "eval_loss"), ("Exact match", "exact_match"))
        if key in result.before and key in result.after
    ]
    if result.nonfinite_step is not None:
        lines.append(
            f"The loss was no finite number at step {result.nonfinite_step}, so the last weights "
            "are likely ruined: lower optim.lr and train again."
        )
    if result.status == "interrupted":
        lines.append(f"Resume with: hirank train --resume {result.run_dir}")
    else:
        lines.append(f"Weights: {result.best or result.weights}")
        lines.append(f"Try it:  hirank chat {result.run_dir}")
    lines.append(f"Report:  {result.report}")
    for line in lines:
        say(terminal, line)


def _sample_lines(sample: Sample) -> list[str]:
    """The last line of a question, without the template's marks, and what became of its answer."""
    lines = [re.sub(r"<\|[^|]*\|>", "", line).strip() for line in sample.prompt.splitlines()]
    asked = [line for line in lines if line]
    question = (asked[:-1] or asked or [""])[-1]  # the very last opens the answer
    answers = [("expected", sample.expected), ("before", sample.before), ("after", sample.after)]
    told = [f"  {name:<9} {' '.join(text.split())}" for name, text in answers if text is not None]
    return [f"Sample: {question}", *told]


@told
def chat(
    where: Annotated[
        Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="A run, an adapter or a model folder.")
    ],
    prompt: Annotated[
        str | None, typer.Option(help="Answer this and end, instead of a conversation.")
    ] = None,
    no_adapter: Annotated[
        bool, typer.Option("--no-adapter", help="Start with the adapter off: the base model.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(help="The base model, if it is not where the adapter says.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
) -> None:
    """Talk to a trained model."""
    from hirank.train.chat import converse, load_chat
    from hirank.train.quiet import quiet, without_bars

    terminal = console()
    with quiet(terminal):
        without_bars()
        loaded = load_chat(where, base=base, adapter=not no_adapter, max_new_tokens=max_new_tokens)
        if prompt is None:
            converse(loaded, terminal)
        else:
            print(loaded.answer(prompt))

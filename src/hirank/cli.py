"""The command line: parse, build a configuration, call one function, print.

Exit codes: 0 done, 2 bad input (one sentence), 130 interrupted, 1 anything else; for `doctor`
0 nothing found, 1 something found.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from hirank.bench.cli import mount as mount_bench
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.train.loop import RunResult
    from hirank.train.summary import Sample

__all__ = ["app", "chat", "doctor", "main", "run", "told", "train", "version"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train large models at high quality in little memory.",
)

FOUND, BAD_INPUT, INTERRUPTED = 1, 2, 130
Args = ParamSpec("Args")


def main() -> None:
    """Run the command line and leave with its exit code."""
    app()


def told(command: Callable[Args, None]) -> Callable[Args, None]:
    """Bad input and interruption end a command with a sentence and their exit code."""

    @functools.wraps(command)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HirankError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            print("Interrupted; what was saved before is whole.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run


Config = Annotated[
    Path | None,
    typer.Argument(help="YAML file with the settings; may be left out with --resume."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Replace a setting: --set optim.lr=1e-4."),
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


@app.command()
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
    console = _console()
    if dry_run:
        return _show_plan(settings, resume, console)
    from hirank.train.loop import train as train_run

    result = train_run(settings, console=console, resume=resume)
    _show_result(result, console)
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


def _console() -> Any:
    from rich.console import Console

    return Console()


def _show_plan(settings: Any, resume: Path | None, console: Any) -> None:
    from hirank.train.config import dump_config, resolved
    from hirank.train.prepare import prepare
    from hirank.train.quiet import quiet, say

    settings = resolved(settings)
    with quiet(console):
        prepared = prepare(settings, console, resume)
    say(console, dump_config(settings))
    held_out = len(prepared.eval_set.dataset) if prepared.eval_set else 0
    say(
        console,
        f"{len(prepared.train_set.dataset):,} rows to train on, {held_out:,} held out, "
        f"{prepared.train_set.n_tokens:,} tokens, {prepared.trainable:,} parameters, "
        f"{prepared.steps:,} steps. Nothing was written.",
    )


def _show_result(result: RunResult, console: Any) -> None:
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
        say(console, line)


def _sample_lines(sample: Sample) -> list[str]:
    """The last line of a question, without the template's marks, and what became of its answer."""
    lines = [re.sub(r"<\|[^|]*\|>", "", line).strip() for line in sample.prompt.splitlines()]
    asked = [line for line in lines if line]
    question = (asked[:-1] or asked or [""])[-1]  # the very last opens the answer
    answers = [("expected", sample.expected), ("before", sample.before), ("after", sample.after)]
    told = [f"  {name:<9} {' '.join(text.split())}" for name, text in answers if text is not None]
    return [f"Sample: {question}", *told]


@app.command()
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

    console = _console()
    with quiet(console):
        without_bars()
        loaded = load_chat(where, base=base, adapter=not no_adapter, max_new_tokens=max_new_tokens)
        if prompt is None:
            converse(loaded, console)
        else:
            print(loaded.answer(prompt))


@app.command()
@told
def doctor(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG_OR_ADAPTER", help="A training's YAML file, or an adapter."),
    ],
    base: Annotated[
        str | None, typer.Option(help="The adapter's base model, if it is not where it says.")
    ] = None,
    set_: Set = None,
    world_size: Annotated[int, typer.Option(min=1, help="Processes that train together.")] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Name the traps a training is about to fall into; exit code 1 if there are any."""
    import json

    from rich.console import Console

    from hirank.doctor.command import open_and_examine
    from hirank.train.quiet import quiet

    with quiet(Console(stderr=True)):
        report = open_and_examine(target, base=base, overrides=set_ or (), world_size=world_size)
    print(json.dumps(report.as_dict(), indent=2) if json_ else report)
    if report:
        raise typer.Exit(FOUND)


mount_bench(app)


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    options_metavar="[OPTIONS] --",
)
@told
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND...", help="A trainer that uses PEFT, as you start it."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Name every adapted layer.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was converted as JSON.")
    ] = None,
    backend: Annotated[str, typer.Option(help="Who computes: auto, triton or torch.")] = "auto",
    dropout: Annotated[
        str, typer.Option(help="What dropout means with DoRA: peft or single-gemm.")
    ] = "peft",
) -> None:
    """Run COMMAND with hirank's layers in place of PEFT's."""
    from hirank.launch.process import run as run_command

    code = run_command(
        command or [],
        say=lambda line: print(line, file=sys.stderr),
        report=report,
        verbose=verbose,
        backend=backend,
        dropout=dropout,
    )
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    import hirank

    print(hirank.__version__)

"""`hirank bench`: hands its arguments to the benchmark's own command line."""

from __future__ import annotations

import typer

from hirank.bench.options import main

__all__ = ["mount"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def mount(app: typer.Typer) -> None:
    """Add the command `bench` to `app`."""
    app.command("bench", context_settings=PASS_ON)(bench)


def bench(context: typer.Context) -> None:
    """Measure stock PEFT and hirank side by side."""
    raise typer.Exit(main(context.args, lambda line: print(line, flush=True)))

"""`hirank bench`: hands its arguments to the benchmark's own command line."""

from __future__ import annotations

import typer

from hirank.bench.options import main

__all__ = ["bench"]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure stock PEFT and hirank side by side: see `hirank bench --help`."""
    code = main(context.args, lambda line: print(line, flush=True))
    raise typer.Exit(code)

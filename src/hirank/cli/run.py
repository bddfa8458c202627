"""`hirank run`: everything behind `--` is the command's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hirank.cli.common import told

__all__ = ["mount", "run"]


def mount(app: typer.Typer) -> None:
    """Add the command to `app`."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command(context_settings=settings, options_metavar="[OPTIONS] --")(run)


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

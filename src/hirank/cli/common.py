"""What every command has in common: how bad input ends it, options that several take."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer

from hirank.errors import HirankError
from hirank.quiet import unheard

__all__ = ["BAD_INPUT", "FOUND", "INTERRUPTED", "Set", "console", "told"]

FOUND, BAD_INPUT, INTERRUPTED = 1, 2, 130
Args = ParamSpec("Args")

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Replace a setting: --set optim.lr=1e-4."),
]


def told(command: Callable[Args, None]) -> Callable[Args, None]:
    """Bad input and interruption end a command with a sentence and their exit code.

    Meanwhile libraries keep to themselves what is no error.
    """

    @functools.wraps(command)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> None:
        try:
            with unheard():
                command(*args, **kwargs)
        except HirankError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            print("Interrupted; what was saved before is whole.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run


def console() -> Any:
    """The terminal, as Rich sees it."""
    from rich.console import Console

    return Console()

"""`hirank doctor`: exit code 0 nothing found, 1 something found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hirank.cli.common import FOUND, Set, told

__all__ = ["doctor", "mount"]


def mount(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(doctor)


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

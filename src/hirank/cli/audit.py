"""`hirank audit`: what a fine-tune decides silently, computed. One subcommand for each question."""

from __future__ import annotations

import typer

__all__ = ["audit", "mount"]

audit = typer.Typer(no_args_is_help=True)


def mount(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(audit, name="audit", help="Say what was trained: steps, rank, gains.")


@audit.callback()
def _audit() -> None:
    """Say what was trained: steps, rank, gains."""

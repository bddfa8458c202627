"""`hirank audit` on weights: an adapter's ranks and gains, its truncation, a full fine-tune."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hirank.cli.common import console, told
from hirank.errors import HirankError

__all__ = ["AdapterFirst", "adapter", "finetune", "gains", "mount", "truncate"]

Adapter = Annotated[
    Path, typer.Argument(metavar="ADAPTER", help="A LoRA or DoRA adapter in PEFT's format.")
]
Base = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="The adapter's base model, for the gains.")
]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


class AdapterFirst(TyperGroup):
    """`hirank audit FOLDER` is `hirank audit adapter FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        return super().parse_args(
            ctx, ["adapter", *args] if args and args[0] not in known else args
        )


def mount(audit: typer.Typer) -> None:
    """Add the commands to the group."""
    for command in (adapter, gains, truncate, finetune):
        audit.command()(command)


@told
def adapter(
    adapter: Adapter,
    base: Base = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where audit.html goes.", show_default="here"),
    ] = None,
    increment: Annotated[
        bool,
        typer.Option(
            help="With --base and DoRA: the spectrum of g (W + sBA) - W, which is slower."
        ),
    ] = True,
    json_: Json = False,
) -> None:
    """Say what an adapter is worth; `hirank audit ADAPTER` is enough. Writes audit.html, too."""
    from hirank.audit.merge_run import as_json
    from hirank.audit.summary import audit_adapter
    from hirank.audit.table import adapter_lines

    if out is not None or not json_:
        _check_out(out or Path())
    with _watched() as tick:
        found = audit_adapter(adapter, base, increments=increment, tick=tick)
    if json_:
        print(as_json(found.as_dict()))
    else:
        _show(adapter_lines(found))
    if out is not None or not json_:
        _write_page(found, out or Path(), quietly=json_)


def _check_out(folder: Path) -> None:
    if not folder.is_dir():
        raise HirankError(f"{folder} is no folder: make it first, or leave --out away.")
    if not os.access(folder, os.W_OK):
        raise HirankError(
            f"{folder.resolve()} takes no audit.html: name another folder with --out."
        )


def _write_page(found: Any, folder: Path, *, quietly: bool) -> None:
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        if not quietly:
            print("No page: its plots need Plotly, which comes with pip install 'hirank[train]'.")
        return
    from hirank.audit.page import write_page

    path = write_page(found, folder)
    if not quietly:
        print(f"Page: {path}")


@told
def gains(adapter: Adapter, base: Base = None, json_: Json = False) -> None:
    """Say how far DoRA's gains are from 1, and which of them low precision swallows."""
    from hirank.adapters.files import AdapterFolder
    from hirank.audit.gains import need_magnitudes
    from hirank.audit.merge_run import as_json
    from hirank.audit.summary import audit_adapter
    from hirank.audit.table import gain_lines

    need_magnitudes(AdapterFolder(adapter))
    with _watched() as tick:
        found = audit_adapter(adapter, base, increments=False, tick=tick)
    if json_:
        from_files = {name: {"magnitudes": span} for name, span in found.magnitudes.items()}
        told = {name: one.as_dict() for name, one in found.gains.items()}
        print(as_json(told or from_files))
    else:
        _show(gain_lines(found))


@told
def truncate(
    adapter: Adapter,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The new adapter; new or empty.")],
    rank: Annotated[int | None, typer.Option(help="The rank to come down to.")] = None,
    energy: Annotated[
        float | None, typer.Option(help="Instead: the share of |sBA|^2 each layer keeps, as 0.99.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The base, to tell the weight's error.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write an adapter of smaller rank, the best there is, and say exactly how far off it is."""
    from hirank.audit.merge_run import as_json
    from hirank.audit.table import truncation_lines
    from hirank.audit.truncate import truncate as cut

    with _watched() as tick:
        done = cut(adapter, out, rank=rank, energy=energy, base=base, tick=tick)
    if json_:
        print(as_json(done.as_dict()))
    else:
        _show(truncation_lines(done))


@told
def finetune(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The model before.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The model after.")],
    rank: Annotated[int, typer.Option(min=1, help="The largest rank to ask about.")] = 64,
    json_: Json = False,
) -> None:
    """Say what rank a fine-tune of all weights had, and what a LoRA would have missed of it."""
    from hirank.audit.finetune import compare_models
    from hirank.audit.merge_run import as_json
    from hirank.audit.table import finetune_lines

    with _watched() as tick:
        found = compare_models(base, tuned, rank=rank, tick=tick)
    if json_:
        print(as_json(found.as_dict()))
    else:
        _show(finetune_lines(found))


def _show(lines: Iterator[Any]) -> None:
    terminal = console()
    for line in lines:
        terminal.print(line, soft_wrap=False, highlight=False)


@contextmanager
def _watched() -> Iterator[Callable[[str], None]]:
    """Says on a terminal, and there only, which layer is being looked at; others are quiet."""
    from rich.console import Console
    from rich.text import Text

    from hirank.train.quiet import quiet

    terminal = Console(stderr=True)
    with quiet(terminal):
        if not terminal.is_terminal:
            yield lambda name: None
            return
        with terminal.status("") as status:
            yield lambda name: status.update(Text(name))

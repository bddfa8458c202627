"""`hirank export`: what was trained, in a form that an engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hirank.cli.common import FOUND, console, told
from hirank.cli.merge import as_text, local_folder, merged
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.audit.nearest_lora import Nearest

__all__ = ["export", "mount"]

export = typer.Typer(no_args_is_help=True)


def mount(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.add_typer(export, name="export", help="Bring what was trained into other forms.")


@export.callback()
def _export() -> None:
    """Bring what was trained into other forms. (A merged model: hirank merge.)"""


@export.command()
@told
def lora(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A DoRA adapter, or a model trained whole.")
    ],
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA; DoRA's own rank or more.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it; new.")],
    base: Annotated[
        str | None, typer.Option(help="The base model, if SOURCE does not say where it is.")
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Refuse if a layer misses a larger share (0.1: 10 %)."),
    ] = None,
    verify: Annotated[bool, typer.Option(help="Load it and compare its logits.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the errors as JSON.")] = False,
) -> None:
    """Write the LoRA nearest to SOURCE, for engines that serve no DoRA, and what it misses."""
    from hirank.audit.merge_run import as_json
    from hirank.train.quiet import quiet, without_bars

    with quiet(console()):
        without_bars()
        found, told_of = _lora(source, rank, out, base, max_error, verify)
    if json_:
        print(as_json(found.as_dict() | {"verified": told_of}))
    else:
        print("\n".join([*_lines(found), *([told_of] if told_of else []), f"Written: {out}"]))


def _lora(
    source: Path, rank: int, out: Path, base: str | None, max_error: float | None, verify: bool
) -> tuple[Nearest, str | None]:
    from hirank.adapters.export import CONFIG_FILE
    from hirank.audit.nearest_lora import lora_of_adapter, lora_of_model
    from hirank.audit.verify import verified
    from hirank.train.chat import base_of

    is_adapter = (source / CONFIG_FILE).is_file()
    if base is None and not is_adapter:
        raise HirankError(f"{source} is no adapter: say with --base what it was trained from.")
    folder = local_folder(base or base_of(source))
    said: list[str] = []

    def finish(draft: Path) -> None:
        said.append(verified(folder, source, draft)["told"])

    make = lora_of_adapter if is_adapter else lora_of_model
    found = make(
        source, folder, out, rank=rank, max_error=max_error, finish=finish if verify else None
    )
    return found, said[0] if said else None


@export.command()
@told
def gguf(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A LoRA or DoRA folder.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it; new.")],
    base: Annotated[
        str | None, typer.Option(help="The base model, if ADAPTER does not say where it is.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Load it and compare its logits.")] = True,
) -> None:
    """Merge ADAPTER into a folder that llama.cpp converts to GGUF as it is."""
    from hirank.audit.gguf_ready import conversion, need_convertible
    from hirank.train.chat import base_of
    from hirank.train.quiet import quiet, without_bars

    with quiet(console()):
        without_bars()
        need_convertible(local_folder(base or base_of(adapter)))
        options = (base, None, None, None, False)
        report = merged(adapter, out, options, None, verify, force=False)
    print(as_text(report))
    if report["out"] is None:
        raise typer.Exit(FOUND)
    print(f"To convert it, in a checkout of llama.cpp: {conversion(out)}")


ROWS = 5


def _lines(found: Nearest) -> list[str]:
    worst = sorted(found.layers, key=lambda layer: -layer.error)[:ROWS]
    lines = [
        f"A LoRA of rank {found.rank} misses {100 * found.error:.3g} % of what was trained "
        f"(Frobenius norm, {len(found.layers)} layers); the worst layers:",
        *(f"  {100 * layer.error:>8.3g} %  {layer.name}" for layer in worst),
    ]
    if found.left_out:
        more = f" and {len(found.left_out) - 1} more" if len(found.left_out) > 1 else ""
        lines.append(f"No LoRA reaches {found.left_out[0]}{more}, which changed, too.")
    return lines

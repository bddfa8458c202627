"""A plan in the terminal: the verdict, the peak by class, the phases, one line of advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hirank.page.units import count_text
from hirank.plan.calibration import ENOUGH, Measured, off_line, overhead_of
from hirank.plan.compare import Row
from hirank.plan.fit import Fit, fits
from hirank.plan.inventory import Shape
from hirank.plan.ledger import CLASSES, Ledger, Overhead, Term
from hirank.plan.setting import Setting
from hirank.plan.sizes import gib

__all__ = [
    "about",
    "calibration_lines",
    "compare_lines",
    "explain_lines",
    "fit_lines",
    "model_lines",
    "plan_lines",
    "verdict",
]

BAR = 28


def about(setting: Setting, shape: Shape) -> str:
    """The setting in a line."""
    s = setting
    rank = "" if s.method == "full" else f" r {s.rank}"
    parts = [
        f"{shape.name} ({count_text(shape.parameters)} parameters)",
        f"{s.method}{rank}",
        f"{s.batch} x {s.sequence:,} tokens",
        f"checkpointing {'on' if s.checkpointing else 'off'}",
        f"{s.base_dtype} weights" + (", bf16 autocast" if s.autocast else ""),
        f"{s.attention} attention",
        f"loss {s.loss}",
    ]
    spread = [] if s.sharding == "none" else [f"{s.sharding} on {s.world} GPUs"]
    return " · ".join([*parts, *spread])


def verdict(ledger: Ledger, capacity: int | None) -> str:
    """`Fits into 24.00 GiB with 2.10 GiB to spare.`"""
    if capacity is None:
        return f"Peak {gib(ledger.allocated)} allocated, at {ledger.moment}."
    room = capacity - ledger.process
    if fits(ledger, capacity):
        return f"Fits into {gib(capacity)}: {gib(room)} to spare."
    return f"Does not fit into {gib(capacity)}: {gib(-room)} too much."


def plan_lines(
    setting: Setting, shape: Shape, ledger: Ledger, capacity: int | None, advice: str
) -> Iterator[RenderableType]:
    """What `hirank plan` prints."""
    good = capacity is None or fits(ledger, capacity)
    yield Text(about(setting, shape))
    yield Text(verdict(ledger, capacity), style="bold green" if good else "bold red")
    yield ""
    yield _classes(ledger)
    yield ""
    yield _phases(ledger)
    yield ""
    yield Text(_sizes(ledger))
    yield Text(advice, style="bold")
    for note in ledger.notes:
        yield Text(f"Not known: {note}.", style="dim")


def _sizes(ledger: Ledger) -> str:
    known, here = "about ", ""
    if ledger.overhead.runs:
        known = ""
        here = f" (on top of tensors as in {ledger.overhead.runs} runs on {ledger.overhead.gpu})"
    return (
        f"Allocated {gib(ledger.allocated)} · reserved {known}{gib(ledger.reserved)} · process "
        f"{known}{gib(ledger.process)}, with CUDA's context and libraries{here}"
    )


def _classes(ledger: Ledger) -> Table:
    table = _table(f"At the peak ({ledger.moment})", "GiB", "Share", "")
    for kind, size in ledger.at_peak().items():
        table.add_row(kind, f"{size / 2**30:.2f}", *_share(size, ledger.allocated))
    return table


def _phases(ledger: Ledger) -> Table:
    table = _table("Phase", "GiB", "Share", "")
    for phase in ledger.phases:
        size = ledger.total(phase)
        table.add_row(phase, f"{size / 2**30:.2f}", *_share(size, ledger.allocated))
    return table


def _share(size: int, whole: int) -> tuple[str, str]:
    share = size / whole if whole else 0
    return f"{100 * share:.0f} %", "█" * round(BAR * share)


_WORDS = ("At", "Most of it", "Date", "GPU", "Model", "Shape from")
"""Columns that take two lines in a narrow terminal, so that no number is cut."""


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=first not in _WORDS)
    for name in others:
        justify: Literal["left", "right"] = "right" if name else "left"
        table.add_column(name, justify=justify, no_wrap=name not in _WORDS)
    return table


# Formulas.


def explain_lines(ledger: Ledger) -> Iterator[RenderableType]:
    """Each summand at the peak, and each that is only there at other times."""
    at_peak = [term for term in ledger.terms if ledger.moment in term.phases]
    shown = {(term.kind, term.formula) for term in at_peak}
    others = [term for term in ledger.terms if (term.kind, term.formula) not in shown]
    yield Text(f"At the peak, {ledger.moment}:", style="bold")
    yield from _terms(at_peak)
    yield ""
    yield Text("At other times:", style="bold")
    yield from _terms(others)


def _terms(terms: Sequence[Term]) -> Iterator[RenderableType]:
    for term in sorted(terms, key=lambda term: CLASSES.index(term.kind)):
        yield Text(f"  {term.kind:<22} {gib(term.size):>11}   {term.formula}")


# Other commands.


def calibration_lines(found: Sequence[Measured]) -> Iterator[RenderableType]:
    """What --calibration prints: a line a run, and what they come to."""
    table = _table("Date", "GPU", "Model", "Method", "Tokens", "Planned", "Measured", "Off")
    for run in found:
        table.add_row(*_run_cells(run))
    yield table
    for method in dict.fromkeys(str(run.setting.get("method")) for run in found):
        yield Text(f"{off_line(found, method)}.")
    yield Text(_on_top(overhead_of(found)))


def _on_top(known: Overhead | None) -> str:
    if known is None:
        return f"Plans estimate what comes on top of tensors until {ENOUGH} runs have measured it."
    return (
        f"On top of tensors, as plans have it now: {100 * known.segment - 100:.1f} % in the "
        f"allocator and {known.context / 2**20:,.0f} MiB of CUDA ({known.gpu})."
    )


def _run_cells(run: Measured) -> Iterable[Text]:
    kind, count = run.model.get("kind", "?"), run.model.get("parameters", 0)
    said = run.setting
    tokens = f"{said.get('batch', '?')} x {said.get('sequence', '?')}"
    sizes = (gib(run.planned), gib(run.allocated), f"{100 * run.off:+.1f} %")
    model = f"{kind} {count_text(count)}"
    return map(Text, (run.date[:10], run.gpu, model, str(said.get("method")), tokens, *sizes))


def fit_lines(found: Fit | None, capacity: int) -> Iterator[RenderableType]:
    """What --fit prints."""
    if found is None:
        yield Text(
            f"Nothing that the planner can change makes it fit into {gib(capacity)}: it takes a "
            "smaller model, or more GPUs (--world with --sharding fsdp2).",
            style="bold red",
        )
        return
    if not found.steps:
        yield Text(f"It fits into {gib(capacity)} as it is.", style="bold green")
        return
    yield Text(f"To fit into {gib(capacity)}:", style="bold")
    for made, ledger in found.steps:
        yield Text(f"  {made.text}  ->  {gib(ledger.process)}")
        yield Text(f"      {made.cost}", style="dim")


def compare_lines(rows: Sequence[Row], capacity: int | None) -> Iterator[RenderableType]:
    """What --compare prints."""
    table = _table("Method", "Rank", "Trained", "Peak", "Process", "At", "Most of it")
    for row in rows:
        good = capacity is None or fits(row.ledger, capacity)
        table.add_row(*_cells(row), style="" if good else "red")
    yield table
    if capacity is not None:
        count = sum(fits(row.ledger, capacity) for row in rows)
        yield Text(f"{count} of {len(rows)} fit into {gib(capacity)}.")


def _cells(row: Row) -> Iterable[str]:
    ledger = row.ledger
    rank = "" if row.setting.method == "full" else str(row.setting.rank)
    sizes = (gib(ledger.allocated), gib(ledger.process))
    return (row.name, rank, count_text(row.trained), *sizes, ledger.moment, ledger.dominating)


def model_lines(shapes: Iterable[tuple[Shape, str]]) -> Iterator[RenderableType]:
    """What --models prints."""
    table = _table("Model", "Parameters", "Layers", "Hidden", "Words", "Shape from")
    for shape, source in shapes:
        sizes = (f"{shape.parameters:,}", shape.layers, shape.hidden, shape.vocabulary)
        table.add_row(shape.name, *map(str, sizes), source)
    yield table

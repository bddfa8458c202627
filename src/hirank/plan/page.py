"""The page of a plan (see `hirank.page.html`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hirank.files import write_text
from hirank.page.html import Card, Status, render
from hirank.page.units import count_text
from hirank.plan.charts import comparison_chart, step_chart
from hirank.plan.closed import timeline
from hirank.plan.compare import Row, comparison
from hirank.plan.fit import fits
from hirank.plan.inventory import Shape
from hirank.plan.ledger import Ledger
from hirank.plan.setting import Setting
from hirank.plan.sizes import gib
from hirank.plan.states import trained_numbers
from hirank.plan.table import about, verdict

__all__ = ["page_html", "write_page"]


def write_page(
    path: Path,
    setting: Setting,
    shape: Shape,
    ledger: Ledger,
    capacity: int | None,
    advice: str,
) -> Path:
    """Write the page, whole or not at all. Raises HirankError if it cannot."""
    return write_text(path, page_html(setting, shape, ledger, capacity, advice))


def page_html(
    setting: Setting, shape: Shape, ledger: Ledger, capacity: int | None, advice: str
) -> str:
    """The page as text."""
    rows = comparison(setting, shape, ledger.overhead)
    charts = [step_chart(timeline(setting, shape), capacity), comparison_chart(rows, capacity)]
    good = capacity is None or fits(ledger, capacity)
    values: dict[str, Any] = {
        "title": shape.name,
        "subtitle": about(setting, shape),
        "status": Status("finished" if good else "failed", verdict(ledger, capacity)),
        "notices": [f"Not known: {note}." for note in ledger.notes],
        "cards": _cards(setting, shape, ledger),
        "advice": advice,
        "moment": ledger.moment,
        "classes": _classes(ledger),
        "methods": [_method(row) for row in rows],
        "terms": [_term(ledger, number) for number in range(len(ledger.terms))],
    }
    return render("hirank.plan", "plan.html", values, charts)


def _cards(setting: Setting, shape: Shape, ledger: Ledger) -> list[Card]:
    trained = trained_numbers(setting, shape)
    runs = ledger.overhead.runs
    known = f"as in {runs} runs here" if runs else "about"
    return [
        Card("Allocated", gib(ledger.allocated), f"at {ledger.moment}"),
        Card("Reserved", gib(ledger.reserved), f"by PyTorch's allocator, {known}"),
        Card("Process", gib(ledger.process), f"with CUDA and libraries, {known}"),
        Card("Trained", count_text(trained), f"of {count_text(shape.parameters)} parameters"),
    ]


def _classes(ledger: Ledger) -> list[dict[str, str]]:
    return [
        {"kind": kind, "size": gib(size), "share": f"{100 * size / ledger.allocated:.1f} %"}
        for kind, size in ledger.at_peak().items()
    ]


def _method(row: Row) -> dict[str, str]:
    return {
        "name": row.name,
        "rank": "" if row.setting.method == "full" else str(row.setting.rank),
        "trained": count_text(row.trained),
        "peak": gib(row.ledger.allocated),
        "process": gib(row.ledger.process),
        "moment": row.ledger.moment,
        "most": row.ledger.dominating,
    }


def _term(ledger: Ledger, number: int) -> dict[str, str]:
    term = ledger.terms[number]
    return {
        "kind": term.kind,
        "size": gib(term.size),
        "formula": term.formula,
        "phases": ", ".join(term.phases),
    }

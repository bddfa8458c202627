"""The pictures of a plan: one step in time, and the methods side by side."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from hirank.page.charts import SERIES, Chart, empty_figure
from hirank.plan.compare import Row
from hirank.plan.ledger import CLASSES

__all__ = ["comparison_chart", "step_chart"]

_GIB = 2**30
_COLORS = dict(zip(CLASSES, (*SERIES, "#5b6c8f"), strict=False))


def step_chart(moments: Sequence[tuple[str, dict[str, int]]], capacity: int | None) -> Chart:
    """What lies in memory from the start of a step to its end, class upon class."""
    figure = empty_figure(".3~f", ".2f", "")
    names = [name for name, _ in moments]
    for kind in CLASSES:
        sizes = [kinds.get(kind, 0) / _GIB for _, kinds in moments]
        if any(sizes):
            figure.add_trace(_area(names, sizes, kind))
    _limit(figure, capacity, across=True)
    figure.update_yaxes(title={"text": "GiB", "font": {"size": 12}})
    return Chart("One step", "what is allocated, moment by moment", figure, wide=True)


def _area(names: list[str], sizes: list[float], kind: str) -> go.Scatter:
    color = _COLORS[kind]
    line = {"color": color, "width": 1}
    return go.Scatter(
        x=names, y=sizes, name=kind, mode="lines", stackgroup="step", line=line, fillcolor=color
    )


def comparison_chart(rows: Sequence[Row], capacity: int | None) -> Chart:
    """The peak of each method, by class."""
    figure = empty_figure(".3~f", ".2f", "GiB at the peak")
    names = [row.name for row in rows]
    for kind in CLASSES:
        sizes = [row.ledger.at_peak().get(kind, 0) / _GIB for row in rows]
        if any(sizes):
            bar = {"color": _COLORS[kind]}
            figure.add_trace(go.Bar(y=names, x=sizes, name=kind, orientation="h", marker=bar))
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_xaxes(rangemode="tozero", showgrid=True)
    figure.update_yaxes(autorange="reversed", tickformat="")
    _limit(figure, capacity, across=False)
    return Chart("Methods", "the same data with each of them", figure, wide=True)


def _limit(figure: go.Figure, capacity: int | None, *, across: bool) -> None:
    """A line where the GPU ends."""
    if capacity is None:
        return
    line = {"color": "#d05353", "width": 2, "dash": "dash"}
    if across:
        figure.add_hline(y=capacity / _GIB, line=line)
    else:
        figure.add_vline(x=capacity / _GIB, line=line)

"""The plots of a run."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from hirank.page.charts import BLUE, GREEN, ORANGE, Chart, Points, empty_figure, line
from hirank.train.runlog import Event
from hirank.train.summary import Summary

__all__ = ["run_charts", "smoothed"]


def run_charts(run: Summary) -> list[Chart]:
    """Charts of all that was measured; what was not measured has no chart."""
    made = [
        _loss(run),
        _exact_match(run),
        _single(run, "Learning rate", "lr", "", ".2~g", ".3g"),
        _single(run, "Gradient norm", "grad_norm", "before clipping", "~g", ".3g"),
        _single(run, "Speed", "tokens_per_s", "training tokens per second", "~s", ",.0f"),
        _memory(run),
    ]
    charts = [chart for chart in made if chart is not None]
    for chart in charts:
        _align(chart.figure, run.last_step)
    return charts


# One function per chart.


def _loss(run: Summary) -> Chart | None:
    raw, held_out = _points(run.steps, "loss"), _points(run.evals, "eval_loss")
    if not _any(raw) and not _any(held_out):
        return None
    figure = empty_figure("~g", ".4f", "step")
    figure.update_yaxes(rangemode="normal")
    figure.add_trace(line(raw, "training", BLUE, opacity=0.35, width=1.5))
    if len(raw[0]) >= 8:
        figure.add_trace(line((raw[0], smoothed(raw[1])), "training, smoothed", BLUE))
    if _any(held_out):
        figure.add_trace(line(held_out, "held-out", ORANGE, dots=True))
    return Chart("Loss", "lower is better", figure, wide=True)


def _exact_match(run: Summary) -> Chart | None:
    points = _points([e for e in run.evals if "exact_match" in e], "exact_match")
    if not _any(points):
        return None
    figure = empty_figure(".0%", ".1%", "step")
    figure.add_trace(line(points, "exact match", GREEN, dots=True))
    figure.update_yaxes(range=[-0.03, 1.03])
    return Chart("Exact match", "held-out answers generated word for word", figure)


def _single(run: Summary, title: str, name: str, note: str, ticks: str, hover: str) -> Chart | None:
    points = _points(run.steps, name)
    if not _any(points):
        return None
    figure = empty_figure(ticks, hover, "step")
    figure.add_trace(line(points, title.lower(), BLUE))
    return Chart(title, note, figure)


def _memory(run: Summary) -> Chart | None:
    now, peak = _points(run.steps, "memory_bytes"), _points(run.steps, "peak_memory_bytes")
    if not _any(now) and not _any(peak):
        return None
    figure = empty_figure("~g", ".3f", "step")
    for points, name, color in ((now, "in use", BLUE), (peak, "peak so far", ORANGE)):
        if _any(points):
            figure.add_trace(line((points[0], _giga(points[1])), name, color))
    return Chart("Memory", "GB = 10⁹ bytes", figure)


# Numbers.


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Running mean whose weights fall off over about a twentieth of the run.

    It starts at the first value without bias, and gaps (None) stay gaps.
    """
    keep = 1 - 1 / max(2.0, len(values) / 20)
    total = weight = 0.0
    result: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        result.append(None if value is None else total / weight)
    return result


def _points(events: Sequence[Event], name: str) -> Points:
    return [event["step"] for event in events], [_number(event.get(name)) for event in events]


def _number(value: Any) -> float | None:
    """NaN, infinity and what is no number become a gap in the line."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _any(points: Points) -> bool:
    return any(value is not None for value in points[1])


def _giga(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else value / 1e9 for value in values]


def _align(figure: go.Figure, last_step: int) -> None:
    """One x range for every chart, so that what lies below one another happened together."""
    margin = max(1, last_step) * 0.015
    figure.update_xaxes(range=[-margin, max(1, last_step) + margin])
    figure.update_layout(showlegend=len(figure.data) > 1)

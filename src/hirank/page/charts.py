"""Plotly figures that carry no colour of page or text.

Background is transparent and text and grid are coloured by the page's style sheet, so one figure
serves light and dark. Trace colours are mid tones that read on both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

__all__ = [
    "BLUE",
    "GREEN",
    "MAX_POINTS",
    "ORANGE",
    "RED",
    "SERIES",
    "Chart",
    "Points",
    "empty_figure",
    "line",
    "stride",
    "thinned",
]

BLUE, ORANGE, GREEN, RED = "#3d84f5", "#e07b28", "#2a9d6f", "#d05353"
SERIES = (BLUE, ORANGE, GREEN, RED, "#9a6cd6", "#2aa3b5", "#b98a1d", "#d463a4", "#7a8699")
"""Colours of things of one kind, in this order."""
CLEAR = "rgba(0,0,0,0)"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif'
MAX_POINTS = 3000
"""Points of one line; longer ones keep every k-th, so that the page stays small."""

Points = tuple[Sequence[float], Sequence[float | None]]


@dataclass(frozen=True)
class Chart:
    """A titled figure; `note` says in a few words how to read it."""

    title: str
    note: str
    figure: go.Figure
    wide: bool = False


def empty_figure(ticks: str, hover: str, x_title: str) -> go.Figure:
    """An empty figure; `ticks` and `hover` are d3 formats of the values."""
    axis: dict[str, Any] = {"zeroline": False, "automargin": True}
    layout = {
        "template": "none",
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": axis | {"showgrid": False, "title": {"text": x_title, "font": {"size": 12}}},
        "yaxis": axis | {"rangemode": "tozero", "tickformat": ticks, "hoverformat": hover},
    }
    return go.Figure(layout=layout)


def line(
    points: Points,
    name: str,
    color: str,
    *,
    opacity: float = 1.0,
    width: float = 2.5,
    dots: bool = False,
) -> go.Scatter:
    """A line, with gaps where a value is None, and dots where it has few points."""
    x, y = thinned(points)
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode="lines+markers" if dots or len(x) < 8 else "lines",
        line={"color": color, "width": width},
        marker={"color": color, "size": 7},
        opacity=opacity,
        connectgaps=False,
    )


def stride(count: int) -> int:
    """Of `count` points every how many are drawn."""
    return max(1, math.ceil(count / MAX_POINTS))


def thinned(points: Points) -> tuple[list[float], list[float | None]]:
    """Every k-th point and the last one, so that at most MAX_POINTS + 1 are left."""
    count = len(points[0])
    kept = [*range(0, count - 1, stride(count)), count - 1] if count else []
    return [points[0][i] for i in kept], [points[1][i] for i in kept]

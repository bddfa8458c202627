"""The plots of an audit: spectra, what each rank keeps, gains, and maps of layers."""

import html
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from hirank.audit.rank import LayerRank
from hirank.audit.summary import VALUES, Audit, Group, kind_of
from hirank.page.charts import BLUE, ORANGE, SERIES, Chart, empty_figure, line

__all__ = ["audit_charts", "height"]

BINS = 120
LABEL = 32
_ZONES = ((-(2.0**-9), 2.0**-8), (-(2.0**-12), 2.0**-11))
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def audit_charts(audit: Audit) -> list[Chart]:
    """Charts of all that is known; what is not known has no chart."""
    made = [_spectra(audit), _kept(audit), _gains(audit), *_maps(audit)]
    return [chart for chart in made if chart is not None]


# Ranks.


def _shown(audit: Audit) -> list[Group]:
    """The kinds with the most energy, one colour each, in the order of the model."""
    groups = [group for group in audit.groups() if group.norm > 0]
    largest = sorted(groups, key=lambda group: -group.norm)[: len(SERIES)]
    return [group for group in groups if group in largest]


def _spectra(audit: Audit) -> Chart | None:
    shown = _shown(audit)
    if not shown:
        return None
    figure = empty_figure(".0e", ".3g", "number of the singular value")
    figure.update_yaxes(type="log", rangemode="normal", exponentformat="power")
    for group, color in zip(shown, SERIES, strict=False):
        values = _median_spectrum(group.layers)
        figure.add_trace(line((range(1, len(values) + 1), values), _plain(group.kind), color))
    figure.update_layout(showlegend=True)
    return Chart("Spectra", "of s B A, over the largest value; median of each kind", figure)


def _median_spectrum(layers: Sequence[LayerRank]) -> list[float | None]:
    found = [x.spectrum.values for x in layers if x.spectrum.energy > 0]
    shortest = min(map(len, found))
    medians = [statistics.median(v[i] / v[0] for v in found) for i in range(shortest)]
    return [value if value > 1e-9 else None for value in medians]  # below is rounding


def _kept(audit: Audit) -> Chart | None:
    trained = [layer for layer in audit.ranks if layer.spectrum.energy > 0]
    if not trained:
        return None
    highest = max(layer.rank for layer in trained)
    ranks = range(1, highest + 1)
    figure = empty_figure(".0%", ".2%", "rank")
    residuals = [math.sqrt(max(0.0, 1 - audit.kept(rank))) for rank in ranks]
    worst = [max(layer.spectrum.residual(rank) for layer in trained) for rank in ranks]
    figure.add_trace(line((ranks, residuals), "all layers", BLUE))
    figure.add_trace(line((ranks, worst), "worst layer", ORANGE))
    figure.update_layout(showlegend=True)
    return Chart(
        "Error of truncation", "of s B A to each rank, relative: the least there is", figure
    )


# Gains.


def _gains(audit: Audit) -> Chart | None:
    if not audit.dora or not audit.gains:
        return None
    gains = torch.cat([found.gain for found in audit.gains.values()]).double() - 1
    low, high = (
        float(x) for x in torch.quantile(_sample(gains), torch.tensor([0.001, 0.999]).double())
    )
    low, high = min(low, -0.005), max(high, 0.005)
    counts = torch.histc(gains.clamp(low, high).float(), BINS, low, high)
    width = (high - low) / BINS
    figure = empty_figure("~s", ",.0f", "g - 1, the ends hold all beyond them")
    figure.update_layout(hovermode="closest", bargap=0, showlegend=False)
    middles = [low + (i + 0.5) * width for i in range(BINS)]
    figure.add_trace(
        go.Bar(x=middles, y=counts.tolist(), width=width, marker={"color": BLUE}, name="rows")
    )
    for start, end in _ZONES:
        figure.add_vrect(x0=start, x1=end, fillcolor=ORANGE, opacity=0.3, line_width=0)
    return Chart(
        "Gains", "rows by g - 1; shaded: rounded to bf16, and to fp16, g is 1", figure, wide=True
    )


def _sample(values: torch.Tensor) -> torch.Tensor:
    return values[:: max(1, values.numel() // 1_000_000)]  # more is not taken by quantile


# Maps: one small square for each layer.


def _maps(audit: Audit) -> list[Chart | None]:
    ranks, gains = {x.name: x for x in audit.ranks}, audit.gains
    return [
        _map(audit, "Effective rank", "over the rank", ".0%",
             lambda name: ranks[name].spectrum.effective_rank / ranks[name].rank),
        _map(audit, "Size of s B A", "Frobenius norm", ".2g",
             lambda name: ranks[name].spectrum.norm),
        _map(audit, "Step", "|g (W + s B A) - W| over |W|", ".2%",
             lambda name: _step(audit, name)),
        _map(audit, "Gain", "root mean square of g - 1", ".2%",
             lambda name: gains[name].deviation if name in gains and audit.dora else None),
        _map(audit, "Full increment", "what the best LoRA of its rank, 64 at most, misses", ".1%",
             lambda name: _missed(audit, ranks[name])),
        _map(audit, "Merge distortion", "of the increment by rounding, relative", ".1%",
             audit.distortions.get),
    ]  # fmt: skip


def _step(audit: Audit, name: str) -> float | None:
    found = audit.gains.get(name)
    return found.step_norm / found.base_norm if found and found.base_norm else None


def _missed(audit: Audit, layer: LayerRank) -> float | None:
    found = audit.increments.get(layer.name)
    return found.residual(min(VALUES, layer.rank)) if found and found.energy else None


def _map(
    audit: Audit, title: str, note: str, form: str, value: Callable[[str], float | None]
) -> Chart | None:
    values = {layer.name: value(layer.name) for layer in audit.ranks}
    if all(found is None for found in values.values()):
        return None
    columns, rows = _places(list(values))
    grid = {
        (kind, number): name for (kind, number), name in zip(_placed(values), values, strict=True)
    }
    cells = [[grid.get((row, column)) for column in columns] for row in rows]
    figure = empty_figure("", "", "number of the layer" if len(columns) > 1 else "")
    figure.update_layout(hovermode="closest", height=None)
    figure.add_trace(_heat(cells, columns, rows, values, form))
    figure.update_yaxes(
        autorange="reversed", rangemode="normal", tickformat=None, type="category", showgrid=False
    )
    figure.update_xaxes(type="category", showticklabels=len(columns) > 1)
    return Chart(title, note, figure, wide=True)


def _heat(
    cells: list[list[str | None]], columns: list[str], rows: list[str],
    values: dict[str, float | None], form: str,
) -> Any:  # fmt: skip
    numbers = [[None if name is None else values[name] for name in row] for row in cells]
    return go.Heatmap(
        z=numbers,
        x=columns,
        y=_labels(rows),
        text=[[_plain(name or "") for name in row] for row in cells],
        hovertemplate="%{text}<br>%{z:" + form + "}<extra></extra>",
        colorscale=[[0, "rgba(61,132,245,0.06)"], [1, "rgba(61,132,245,1)"]],
        colorbar={"tickformat": form.replace(".2", ".2~"), "thickness": 10, "outlinewidth": 0},
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def _plain(name: str) -> str:
    """A name that Plotly shows as it is: it knows some tags in texts."""
    return html.escape(name, quote=False)


def _labels(rows: list[str]) -> list[str]:
    """Rows by their names, the ends of long ones where those still differ."""
    short = [row if len(row) <= LABEL else f"…{row[1 - LABEL :]}" for row in rows]
    return [_plain(row) for row in (short if len(set(short)) == len(rows) else rows)]


def height(chart: Chart) -> int | None:
    """Pixels that a map of many rows needs; None for what is as high as any plot."""
    rows = next((len(t.y) for t in chart.figure.data if isinstance(t, go.Heatmap)), 0)
    return 80 + 20 * rows if rows > 12 else None


def _placed(names: Iterable[str]) -> list[tuple[str, str]]:
    """Row and column of each name: what it is, and the number of its block.

    Names with several numbers (experts) have all but the first in their row.
    """
    found = []
    for name in names:
        match = _NUMBER.search(name)
        if match is None:
            found.append((name, ""))
            continue
        rest = name[match.end() :].strip(".")
        found.append((rest if _NUMBER.search(f".{rest}") else kind_of(name), match[0]))
    return _apart(found, list(names))


def _apart(found: list[tuple[str, str]], names: list[str]) -> list[tuple[str, str]]:
    """Layers that would share a square get rows of their own names instead."""
    twice = {kind for (kind, _), count in Counter(found).items() if count > 1}
    return [
        (_NUMBER.sub("*", name, count=1), number) if kind in twice else (kind, number)
        for (kind, number), name in zip(found, names, strict=True)
    ]


def _places(names: list[str]) -> tuple[list[str], list[str]]:
    placed = _placed(names)
    numbers = sorted({number for _, number in placed}, key=lambda n: (n != "", int(n or 0)))
    return numbers, list(dict.fromkeys(kind for kind, _ in placed))

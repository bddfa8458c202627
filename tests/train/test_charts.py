"""Charts hold the numbers of the log, and only those that were measured."""

import math
from pathlib import Path

from hirank.page.charts import MAX_POINTS, Chart, thinned
from hirank.train.charts import run_charts, smoothed
from hirank.train.summary import load_summary
from run_folder import events, write_run


def charts_of(folder: Path, rows: list[dict[str, object]]) -> dict[str, Chart]:
    return {chart.title: chart for chart in run_charts(load_summary(write_run(folder, rows)))}


def test_every_measure_has_its_chart(tmp_path: Path) -> None:
    rows = events(steps=40, every=10)
    charts = charts_of(tmp_path, rows)
    assert list(charts) == [
        "Loss", "Exact match", "Learning rate", "Gradient norm", "Speed", "Memory",
    ]  # fmt: skip
    raw, smooth, held_out = charts["Loss"].figure.data
    assert list(raw.y) == [row["loss"] for row in rows if row["event"] == "step"]
    assert list(smooth.y) == smoothed(raw.y)
    assert list(held_out.x) == [0, 10, 20, 30, 40]
    now, peak = charts["Memory"].figure.data
    assert 1.5 < now.y[0] < peak.y[-1] == 1.72


def test_what_was_not_measured_has_no_chart(tmp_path: Path) -> None:
    assert charts_of(tmp_path / "a", []) == {}
    only = charts_of(tmp_path / "b", [{"event": "step", "step": 1, "loss": 2.0}])
    assert list(only) == ["Loss"]
    assert only["Loss"].figure.data[0].mode == "lines+markers"  # one point is visible


def test_nan_is_a_gap(tmp_path: Path) -> None:
    rows = [{"event": "step", "step": n, "loss": loss} for n, loss in enumerate([1.0, math.nan, 3])]
    assert list(charts_of(tmp_path, rows)["Loss"].figure.data[0].y) == [1.0, None, 3.0]
    assert charts_of(tmp_path, [{"event": "step", "step": 1, "loss": math.nan}]) == {}


def test_smoothing_is_an_unbiased_mean() -> None:
    assert smoothed([4.0, 4.0, None, 4.0]) == [4.0, 4.0, None, 4.0]
    assert smoothed([1.0, 2.0]) == [1.0, (0.5 * 1 + 2) / 1.5]
    assert smoothed([]) == []


def test_long_runs_are_thinned_and_keep_their_ends() -> None:
    count = 10 * MAX_POINTS + 7
    x, y = thinned((list(range(count)), [float(n) for n in range(count)]))
    assert len(x) <= MAX_POINTS + 1 and (x[0], x[-1], y[-1]) == (0, count - 1, count - 1.0)
    assert thinned(([], [])) == ([], [])
    assert thinned(([3], [1.0])) == ([3], [1.0])

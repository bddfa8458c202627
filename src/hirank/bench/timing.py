"""Clocks. Arms take turns in one process, so that whatever disturbs one disturbs all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Marks", "Sample", "calls", "interleaved", "quantiles", "ratios", "synchronize"]

Sample = dict[str, float]


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Points in time of one measurement: CUDA events on a GPU, the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[Any] = []

    def mark(self) -> None:
        """Now, in the order of the device's own work; does not wait."""
        if self._device.type != "cuda":
            self._points.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._points.append(event)

    def spans(self) -> list[float]:
        """Seconds between neighbouring marks. Waits for the device."""
        synchronize(self._device)
        pairs = zip(self._points, self._points[1:], strict=False)
        if self._device.type != "cuda":
            return [late - early for early, late in pairs]
        return [early.elapsed_time(late) / 1e3 for early, late in pairs]


def calls(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of one call, taken over `count` calls; on a GPU by its own events."""
    marks = Marks(device)
    synchronize(device)
    marks.mark()
    for _ in range(count):
        run()
    marks.mark()
    return sum(marks.spans()) / count


def interleaved(
    arms: Mapping[str, Callable[[], Sample]],
    *,
    repeats: int,
    warmup: int = 0,
    limit: float = float("inf"),
) -> dict[str, list[Sample]]:
    """Samples of every arm. They take turns, and a different one begins each round.

    After `limit` seconds no further round begins, but three are measured in any case.
    """
    names = list(arms)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    end = time.perf_counter() + limit
    with _no_garbage_collection():
        for turn in range(warmup + repeats):
            if turn >= warmup + 3 and time.perf_counter() > end:
                break
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                sample = arms[name]()
                if turn >= warmup:
                    samples[name].append(sample)
            gc.collect()
    return samples


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """{p20, p50, p80, n}, linear between samples."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"p20": at(0.2), "p50": at(0.5), "p80": at(0.8), "n": len(ordered)}


def ratios(samples: Mapping[str, Sequence[Sample]], key: str) -> dict[str, dict[str, float]]:
    """{arm: {other: ratio}}: the median over rounds of this arm's `key` by the other's.

    Both times of a ratio are of the same round, so a slow minute of the machine cancels.
    """
    return {
        name: {
            other: statistics.median(a[key] / b[key] for a, b in zip(mine, theirs, strict=True))
            for other, theirs in samples.items()
            if other != name
        }
        for name, mine in samples.items()
    }

"""What a GPU did during a step: for how long it was busy, and with which kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from hirank.bench.timing import synchronize

__all__ = ["GpuSpan", "covered", "profiled", "summary"]

# Kernels whose work is matrix products or attention, by what libraries call them.
_MATRIX = re.compile(
    r"gemm|_joined_kernel|nvjet|cutlass|xmma|flash|fmha|attention|gemv|splitK", re.I
)
_TOP = 15


class GpuSpan(NamedTuple):
    """One kernel, copy or fill, in nanoseconds of the device's clock."""

    name: str
    start: int
    end: int


def profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """`summary` of `run()` on a GPU; nothing elsewhere."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize(device)
    traced: Any = profiler.profiler  # its own events: parsing them all takes seconds
    events = (e for e in traced.kineto_results.events() if e.device_type().name == "CUDA")
    return summary(GpuSpan(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)


def summary(spans: Iterable[GpuSpan]) -> dict[str, Any]:
    """busy_s, launches, matrix_s (products and attention), and the kernels that took longest.

    Busy is the union of all spans, so that what overlaps counts once.
    """
    spans = list(spans)
    by_name: dict[str, list[int]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span.end - span.start)
    totals = sorted(((sum(times), name) for name, times in by_name.items()), reverse=True)
    return {
        "busy_s": covered((span.start, span.end) for span in spans) / 1e9,
        "launches": len(spans),
        "matrix_s": sum(total for total, name in totals if _MATRIX.search(name)) / 1e9,
        "kernels": [[name[:100], len(by_name[name]), total / 1e9] for total, name in totals[:_TOP]],
    }


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total

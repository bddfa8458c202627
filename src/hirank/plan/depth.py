"""From traces of two depths to any depth, exactly: what is alive grows by the same with each block.

Two traces of the same model run the same operations, the deeper one more of them in the middle.
From the start, both agree until the shallower one leaves its last block; from the end, until it
leaves its first one. Between two operations that correspond, the bytes of every class are linear in
the depth. The peak of a phase at any depth is then the largest of all such lines: the operation at
which it happens need not be the one of the traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from hirank.plan.live import Moment

__all__ = ["peaks", "peaks_at"]


def peaks(moments: Iterable[Moment]) -> dict[str, Moment]:
    """The largest moment of every phase."""
    found: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in found or moment.total > found[moment.phase].total:
            found[moment.phase] = moment
    return found


def peaks_at(
    depth: int, small: Sequence[Moment], large: Sequence[Moment], depths: tuple[int, int]
) -> dict[str, Moment]:
    """The same at `depth`, from the moments at two other depths.

    Raises:
        ValueError: the two traces have other phases.
    """
    if set(m.phase for m in small) != set(m.phase for m in large):
        raise ValueError("The traces of two depths differ in their phases.")
    return peaks(
        _line(depth, a, b, depths)
        for one, other in zip(_stretches(small), _stretches(large), strict=True)
        for a, b in _pairs(one, other)
    )


def _stretches(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Consecutive moments of one phase."""
    return [list(group) for _, group in groupby(moments, key=lambda m: m.phase)]


def _pairs(small: Sequence[Moment], large: Sequence[Moment]) -> Iterable[tuple[Moment, Moment]]:
    """Moments that correspond, counted from the start and from the end."""
    if len(small) == len(large):
        return zip(small, large, strict=True)
    return [*_common(small, large), *_common(small[::-1], large[::-1])]


def _common(small: Sequence[Moment], large: Sequence[Moment]) -> Iterable[tuple[Moment, Moment]]:
    for a, b in zip(small, large, strict=False):
        if a.op != b.op:
            return
        yield a, b


def _line(depth: int, a: Moment, b: Moment, depths: tuple[int, int]) -> Moment:
    first, second = depths
    kinds = Counter[str]()
    for kind in a.kinds | b.kinds:
        grown = (b.kinds[kind] - a.kinds[kind]) * (depth - second)
        kinds[kind] = b.kinds[kind] + round(grown / (second - first))
    return Moment(a.op, a.phase, kinds)

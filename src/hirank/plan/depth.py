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
from itertools import groupby, takewhile

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
        for a, b in _pairs(one, other, depths)
    )


def _stretches(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Consecutive moments of one phase."""
    return [list(group) for _, group in groupby(moments, key=lambda m: m.phase)]


def _pairs(
    small: Sequence[Moment], large: Sequence[Moment], depths: tuple[int, int]
) -> Iterable[tuple[Moment, Moment]]:
    """Moments that correspond, counted from the start and from the end.

    Blocks at the ends are not like those between: what comes before them, or after, is there in
    another way. So of two blocks one is counted from each side, and what follows on the blocks is
    not taken for a block, although the last norm runs the same operations as the first of a block.
    """
    if len(small) == len(large):
        return zip(small, large, strict=True)
    start, end = _common(small, large), _common(small[::-1], large[::-1])
    period = len(large) - len(small)
    count = depths[0] // (depths[1] - depths[0])
    before, behind = (max(0, len(found) - count * period) for found in (start, end))
    inside = len(small) - count // 2 * period
    return [*start[: inside - behind], *end[: inside - before]]


def _common(small: Sequence[Moment], large: Sequence[Moment]) -> list[tuple[Moment, Moment]]:
    pairs = zip(small, large, strict=False)
    return list(takewhile(lambda pair: pair[0].op == pair[1].op, pairs))


def _line(depth: int, a: Moment, b: Moment, depths: tuple[int, int]) -> Moment:
    first, second = depths
    kinds = Counter[str]()
    for kind in a.kinds | b.kinds:
        grown = (b.kinds[kind] - a.kinds[kind]) * (depth - second)
        kinds[kind] = b.kinds[kind] + round(grown / (second - first))
    return Moment(a.op, a.phase, kinds)

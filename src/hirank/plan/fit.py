"""Settings that fit: the cheapest change of a run, the largest size, and one line of advice."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from hirank.errors import HirankError
from hirank.plan.changes import Made, changes_of
from hirank.plan.closed import closed_form
from hirank.plan.inventory import Shape
from hirank.plan.ledger import ESTIMATED, Ledger, Overhead
from hirank.plan.setting import Setting
from hirank.plan.sizes import gib

__all__ = ["Fit", "advice", "fit", "fits", "largest"]

_TRIES = 1000
"""Settings that the search for the cheapest looks at: about a second or two."""


@dataclass(frozen=True)
class Fit:
    """A setting that fits, and how it was come by."""

    setting: Setting
    ledger: Ledger
    steps: tuple[tuple[Made, Ledger], ...]
    """Each change with the ledger after it, in order."""


def fits(ledger: Ledger, capacity: int) -> bool:
    """Whether a process with this ledger is expected to fit into so many bytes."""
    return ledger.process <= capacity


def fit(
    setting: Setting, shape: Shape, capacity: int, overhead: Overhead = ESTIMATED
) -> Fit | None:
    """The setting that fits with the lowest sum of prices, None if none does.

    A search by price, so the first that fits is the cheapest. Where that is farther away than
    _TRIES, the changes are made cheapest first until it fits, and those taken back that were not
    needed.
    """
    made = _search(setting, shape, capacity, overhead)
    if made is None:
        made = _descend(setting, shape, capacity, overhead)
        made = made and _needed(setting, shape, made, capacity, overhead)
    return None if made is None else _told(setting, shape, made, overhead)


def _search(
    setting: Setting, shape: Shape, capacity: int, overhead: Overhead
) -> tuple[Made, ...] | None:
    order = itertools.count()
    seen = {setting}
    heap: list[tuple[float, int, Setting, tuple[Made, ...]]] = [(0.0, next(order), setting, ())]
    for _ in range(_TRIES):
        if not heap:
            return None
        price, _, found, made = heapq.heappop(heap)
        if fits(closed_form(found, shape, overhead), capacity):
            return made
        for changed, change in changes_of(found):
            if changed not in seen and _possible(changed, shape):
                seen.add(changed)
                entry = (price + change.price, next(order), changed, (*made, change))
                heapq.heappush(heap, entry)
    return None


def _descend(
    setting: Setting, shape: Shape, capacity: int, overhead: Overhead
) -> tuple[Made, ...] | None:
    """Whatever makes it smaller, the cheapest first, until it fits; None if it never does."""
    made: list[Made] = []
    while not fits(ledger := closed_form(setting, shape, overhead), capacity):
        smaller = (
            (changed, change)
            for changed, change in sorted(changes_of(setting), key=lambda one: one[1].price)
            if _possible(changed, shape)
            and closed_form(changed, shape, overhead).process < ledger.process
        )
        found = next(smaller, None)
        if found is None:
            return None
        setting = found[0]
        made.append(found[1])
    return tuple(made)


def _needed(
    setting: Setting, shape: Shape, made: tuple[Made, ...], capacity: int, overhead: Overhead
) -> tuple[Made, ...]:
    """Those changes without which it would not fit, the most expensive taken back first."""
    for change in sorted(reversed(made), key=lambda one: -one.price):
        fewer = tuple(one for one in made if one is not change)
        changed = _replayed(setting, fewer)
        if changed is not None and fits(closed_form(changed, shape, overhead), capacity):
            return _needed(setting, shape, fewer, capacity, overhead)
    return made


def _replayed(setting: Setting, made: tuple[Made, ...]) -> Setting | None:
    """The setting after these changes; None where one of them means something else by then."""
    for change in made:
        offered = (one for one, same in changes_of(setting) if same == change)
        found = next(offered, None)
        if found is None:
            return None
        setting = found
    return setting


def _possible(setting: Setting, shape: Shape) -> bool:
    return not (shape.softcapped and setting.attention == "sdpa")


def _told(setting: Setting, shape: Shape, made: tuple[Made, ...], overhead: Overhead) -> Fit:
    steps, now = [], setting
    for change in made:
        now = replace(now, **change.values)
        steps.append((change, closed_form(now, shape, overhead)))
    return Fit(now, closed_form(now, shape, overhead), tuple(steps))


# The largest that fits.

_WHAT = {"seq": "sequence", "sequence": "sequence", "batch": "batch", "rank": "rank"}
_TOP = 2**24


def largest(
    what: str, setting: Setting, shape: Shape, capacity: int, overhead: Overhead = ESTIMATED
) -> int:
    """The largest sequence, batch or rank that fits, all else as it is; 0 if not even 1 does.

    Raises:
        HirankError: `what` is none of these, or rank has no meaning for the method.
    """
    if what not in _WHAT:
        raise HirankError(f"--max {what}: give seq, batch or rank.")
    name = _WHAT[what]
    if name == "rank" and setting.method == "full":
        raise HirankError("--max rank: the method full has no rank; use --max seq or batch.")
    top = _TOP
    if name == "rank":
        top = min(min(matrix.out, matrix.inp) for matrix in shape.linears)

    def good(size: int) -> bool:
        made = replace(setting, **{name: size})  # type: ignore[arg-type]
        return fits(closed_form(made, shape, overhead), capacity)

    return _last(good, top)


def _last(good: Callable[[int], bool], top: int) -> int:
    """The largest number up to `top` that is good, if all below a good one are."""
    low, high = 0, 1
    while high <= top and good(high):
        low, high = high, high * 2
    high = min(high, top + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


# Advice.


def advice(setting: Setting, shape: Shape, ledger: Ledger) -> str:
    """What is largest at the peak, and the change that saves most for its price."""
    main = _name_of(ledger)
    best = max(_savings(setting, shape, ledger), default=None)
    if best is None or best[1] < 0.02 * ledger.allocated:
        return f"{main}: no single change without a price in quality saves more than 2 %."
    _, saved, made = best
    return f"{main}: {made.text} saves {gib(saved)} ({made.cost})."


def _name_of(ledger: Ledger) -> str:
    kinds = ledger.at_peak()
    kind = max(kinds, key=lambda name: kinds[name])
    share = 100 * kinds[kind] / ledger.allocated
    verb = "is" if kind in ("optimizer state", "recomputation peak") else "are"
    others = "" if kind == "adapters" or not kinds.get("adapters") else ", not rank,"
    name = kind if kind != "logits and loss" else "logits"
    return f"{name[:1].upper()}{name[1:]}{others} {verb} {share:.0f} % of the peak"


def _savings(setting: Setting, shape: Shape, ledger: Ledger) -> list[tuple[float, int, Made]]:
    """(saved for the price, saved, change) of what can be had without another method."""
    found = []
    for changed, made in changes_of(setting):
        if made.price < 30 and _possible(changed, shape):
            saved = ledger.allocated - closed_form(changed, shape).allocated
            found.append((saved / (1 + made.price), saved, made))
    return sorted(found, key=lambda entry: entry[:2])[-1:]

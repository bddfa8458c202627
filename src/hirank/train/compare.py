"""Is rank what holds a run back? Two runs of different rank, asked in the order of likelihood.

    data         does one of them learn its rows by heart?      then more rows, or fewer epochs
    optimiser    same steps? is the loss still falling?         then learning rate, or more steps
    rank         does the higher one end lower, in both curves?

The first that holds ends it: what a higher rank gains while the data or the steps are the limit
says nothing about rank. Only the folders of the runs are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from hirank.audit.scaling import Setting, advise
from hirank.errors import HirankError
from hirank.page.units import percent_text
from hirank.train.parent import setting_of
from hirank.train.summary import Summary, load_summary

__all__ = ["Comparison", "Reason", "compare"]

Answer = Literal["data", "optimiser", "rank", "nothing"]

RISE = 0.02
"""Share by which a held-out loss is above its best, at the end, where it has turned."""
GAP = 1.2
"""How much the held-out loss has grown over the training loss since a quarter of the run."""
SAME_STEP = 1.25
"""Effective steps within this factor are one."""
FALLING = 0.03
"""Share of the loss lost over the last quarter of a run that is not yet done."""
GAIN = 0.01
"""Share of the loss that a higher rank has to save."""
LEAST = 20
"""Logged steps without which a curve says nothing."""
_OPTIM = ("batch_size", "grad_accum", "scheduler", "warmup", "weight_decay", "beta1", "beta2",
          "clip", "seed")  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """One question, what the curves say to it, and whether that settles the matter."""

    about: Answer
    text: str
    settles: bool


@dataclass(frozen=True)
class Comparison:
    """Why rank is the bottleneck, or what is instead."""

    low: str
    high: str
    reasons: list[Reason]
    answer: Answer
    advice: str

    def __str__(self) -> str:
        """The reasoning, line by line, and what to do."""
        lines = [f"Lower rank:  {self.low}", f"Higher rank: {self.high}"]
        lines += [f"{n}. {reason.text}" for n, reason in enumerate(self.reasons, 1)]
        return "\n".join([*lines, self.advice])


@dataclass(frozen=True)
class _Curves:
    """What is asked about one run."""

    run: Summary
    setting: Setting
    train: dict[int, float]
    """Training loss by step."""
    held_out: list[tuple[int, float]]
    """Step and held-out loss."""

    @property
    def name(self) -> str:
        return f"r{self.setting.rank}"

    @property
    def told(self) -> str:
        loss = self.train_around(max(self.train))
        end = f"{self.name} ({self.run.run_dir}), training loss {loss:.3g}"
        held_out = min((loss for _, loss in self.held_out), default=None)
        return end if held_out is None else f"{end}, held-out {held_out:.3g} at best"

    def train_around(self, step: int) -> float:
        """Mean training loss of a tenth of the run, around `step`."""
        half = max(1, max(self.train) // 20)
        return fmean([v for at, v in self.train.items() if abs(at - step) <= half] or [math.nan])


def compare(first: Path, second: Path) -> Comparison:
    """Compare two run folders, in either order.

    Raises HirankError where they differ in more than rank, alpha and learning rate: other models,
    data, layers or methods cannot tell what the rank did.
    """
    pair = [_curves(first), _curves(second)]
    _need_same(*pair)
    low, high = sorted(pair, key=lambda one: one.setting.rank)
    reasons: list[Reason] = []
    for question in QUESTIONS:
        reasons.append(question(low, high))
        if reasons[-1].settles:
            break
    answer = reasons[-1].about if reasons[-1].settles else "nothing"
    advice = ADVICE[answer].format(low=low.name, high=high.name)
    return Comparison(low.told, high.told, reasons, answer, advice)


ADVICE = {
    "data": "The data is the bottleneck, not the rank: take more or cleaner rows, or fewer epochs, "
    "and compare again.",
    "optimiser": "The optimiser comes before the rank: mend this, and compare again.",
    "rank": "Rank is the bottleneck: stay with {high} or go higher.",
    "nothing": "Rank is not the bottleneck: {low} is enough; look at the data next.",
}

# The questions, in their order.


def _overfits(low: _Curves, high: _Curves) -> Reason:
    if not (low.held_out and high.held_out):
        return Reason("data", "Data: no held-out loss was logged, so overfitting is unseen.", False)
    told = {one.name: _learnt_by_heart(one) for one in (low, high)}
    found = [f"{name} {why}" for name, why in told.items() if why]
    if found:
        return Reason("data", f"Data: {' and '.join(found)}.", True)
    text = "Data: neither run learns its rows by heart; the held-out losses follow the training."
    return Reason("data", text, False)


def _learnt_by_heart(one: _Curves) -> str | None:
    best_at, best = min(one.held_out, key=lambda point: point[1])
    last_at, last = one.held_out[-1]
    if last > best * (1 + RISE):
        return (
            f"overfits: its held-out loss was {best:.4g} at step {best_at} "
            f"and is {last:.4g} at step {last_at}"
        )
    early_at, grown = _gap_since_a_quarter(one)
    if grown > GAP and _stalled(one):
        return (
            f"overfits: since step {early_at} its held-out loss has grown {grown:.2f} times "
            "against the training loss, and it falls no more"
        )
    return None


def _gap_since_a_quarter(one: _Curves) -> tuple[int, float]:
    """Held-out over training loss at the end, against what it was then; that step."""
    last_at, last = one.held_out[-1]
    early_at, early = next(point for point in one.held_out if point[0] >= last_at / 4)
    then, now = (
        _share(loss, one.train_around(at)) for at, loss in ((early_at, early), (last_at, last))
    )
    return early_at, _share(now, then)


def _stalled(one: _Curves) -> bool:
    """Whether the last quarter has not lowered the held-out loss."""
    last_at, last = one.held_out[-1]
    before = (loss for at, loss in one.held_out if at <= 0.75 * last_at)
    return last > (1 - GAIN) * min(before, default=math.inf)


def _same_steps(low: _Curves, high: _Curves) -> Reason:
    broken = [one.name for one in (low, high) if one.run.nonfinite_step is not None]
    if broken:
        return Reason("optimiser", f"Optimiser: the loss of {broken[0]} was no number.", True)
    changed = [name for name in _OPTIM if _optim(low, name) != _optim(high, name)]
    if max(low.train) != max(high.train):
        changed.append("the number of steps")
    if changed:
        text = f"Optimiser: the runs differ in {', '.join(changed)}."
        return Reason("optimiser", text, True)
    advice = advise(low.setting, high.setting, power=1)
    if not 1 / SAME_STEP <= advice.ratio <= SAME_STEP:
        alpha = f", or alpha {advice.alpha:.4g}" if advice.alpha is not None else ""
        text = (
            f"Optimiser: the first steps of {high.name} are {advice.ratio:.3g} times those of "
            f"{low.name}: train {high.name} with learning rate {advice.lr:.4g}{alpha}."
        )
        return Reason("optimiser", text, True)
    text = "Optimiser: both start with steps of one size, and share their other settings."
    return Reason("optimiser", text, False)


def _still_falling(low: _Curves, high: _Curves) -> Reason:
    losses = [low.train[step] for step in sorted(low.train)]
    quarter = len(losses) // 4
    before, last = losses[-2 * quarter : -quarter], losses[-quarter:]
    fall = fmean(before) - fmean(last)
    share = _share(fall, fmean(before))
    if share > FALLING and fall > 2 * math.hypot(_error(before), _error(last)):
        text = (
            f"Optimiser: the training loss of {low.name} still fell by {percent_text(share)} over "
            "the last quarter: train longer, or with a higher learning rate."
        )
        return Reason("optimiser", text, True)
    text = f"Optimiser: the training loss of {low.name} has settled over the last quarter."
    return Reason("optimiser", text, False)


def _rank(low: _Curves, high: _Curves) -> Reason:
    gain, error = _train_gain(low, high)
    text = (
        f"Rank: over the last quarter the training loss of {high.name} is {_less(gain)} than that "
        f"of {low.name}"
    )
    if gain <= max(GAIN, 2 * error):
        return Reason("rank", f"{text}: no gain beyond noise.", False)
    if not (low.held_out and high.held_out):
        return Reason("rank", f"{text}; held-out losses were not logged.", True)
    one, other = (min(loss for _, loss in run.held_out) for run in (low, high))
    saved = _share(one - other, one)
    text += f", and its best held-out loss is {_less(saved)} ({one:.4g} and {other:.4g})"
    if saved <= GAIN:
        return Reason("data", f"{text}: it learns its rows, and nothing more from them.", True)
    return Reason("rank", f"{text}.", True)


QUESTIONS: tuple[Callable[[_Curves, _Curves], Reason], ...] = (
    _overfits,
    _same_steps,
    _still_falling,
    _rank,
)


def _train_gain(low: _Curves, high: _Curves) -> tuple[float, float]:
    """What the higher rank saves of the training loss, and the standard error of that share.

    The same rows in the same order make the same noise, so differences are taken step by step.
    """
    shared = sorted(low.train.keys() & high.train.keys())
    tail = shared[-max(2, len(shared) // 4) :]
    differences = [low.train[step] - high.train[step] for step in tail]
    level = fmean(low.train[step] for step in tail)
    return _share(fmean(differences), level), _share(_error(differences), level)


def _error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _share(part: float, whole: float) -> float:
    """0 of a loss that is 0: there is nothing to save."""
    return part / whole if whole else 0.0


def _less(share: float) -> str:
    return f"{percent_text(abs(share))} {'lower' if share >= 0 else 'higher'}"


# What can be compared.


def _curves(folder: Path) -> _Curves:
    run = load_summary(folder)
    setting = setting_of(run.config)
    if setting is None:
        raise HirankError(f"{folder} trained no adapter, so there is no rank to compare.")
    train = {e["step"]: e["loss"] for e in run.steps if _finite(e.get("loss"))}
    if len(train) < LEAST:
        raise HirankError(
            f"{folder} logged {len(train)} training losses, too few for a curve: compare runs of "
            f"{LEAST} steps or more."
        )
    held_out = [(e["step"], e["eval_loss"]) for e in run.evals if _finite(e.get("eval_loss"))]
    return _Curves(run, setting, train, held_out)


def _need_same(one: _Curves, other: _Curves) -> None:
    """Refuse runs that differ in what would explain their curves as well as rank does."""
    sections: dict[str, Callable[[Summary], Any]] = {
        "base models": lambda run: run.model_name,
        "training data": lambda run: (run.value("data", "train"), run.start.get("tokens")),
        "held-out data": lambda run: run.value("data", "eval"),
        "methods": lambda run: run.value("method", "name"),
        "adapted layers": lambda run: run.value("method", "target_modules"),
        "rank patterns": lambda run: run.value("method", "rank_pattern"),
    }
    for what, part in sections.items():
        if part(one.run) != part(other.run):
            raise HirankError(
                f"{one.run.run_dir} and {other.run.run_dir} have different {what}, so their "
                "curves do not tell what the rank did: compare runs that differ in rank alone."
            )
    if one.setting.rank == other.setting.rank:
        raise HirankError(
            f"{one.run.run_dir} and {other.run.run_dir} both have rank {one.setting.rank}: compare "
            "two ranks."
        )


def _optim(one: _Curves, name: str) -> Any:
    return one.run.value("optim", name)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

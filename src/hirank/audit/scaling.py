"""How far the first optimizer step moves an adapted weight, and what keeps that the same.

    Adam and its kind   one row of W moves by      lr s sqrt(r / 3)
    SGD                 the weight moves by        lr s^2 sqrt(r) / 3 |G| / sqrt(K)

    s    scale: alpha / r, or alpha / sqrt(r) with rsLoRA
    G    [N, K], gradient of the loss by the weight; K in, N out, r well below K
    1/3  squared length of a row of A as PEFT initialises it, whatever r and K

B is zero before the first step, so only B moves, and the weight by s dB A. Adam moves each number
of B by lr; SGD moves B by lr s G Aᵀ, and that is where the second s comes from. LoRA+ multiplies
the learning rate of B, hence the step. DoRA's norm is a constant for autograd and g = 1 at the
start, so B moves as without it; the magnitudes move, too, by lr (Adam) or lr |G| / sqrt(K) (SGD) a
row, at a right angle to the rest, and neither alpha nor r changes that part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hirank.errors import HirankError

__all__ = [
    "Advice",
    "Setting",
    "advise",
    "compared",
    "magnitude_share",
    "parse_setting",
    "power_of",
    "step_size",
    "told",
]

ROW = 1 / math.sqrt(3)
"""Length of a row of A at initialisation: K numbers, uniform between -1/sqrt(K) and 1/sqrt(K)."""

SGD = ("sgd",)
ADAM = ("adam", "adamw", "adamax", "adafactor", "lion", "nadam", "rmsprop")
HEADINGS = (
    "setting",
    "scale",
    "first step",
    "learning rate that keeps it",
    "alpha that keeps it",
)
SAME = math.log(1.02)
"""Steps that differ by less are the same."""
SMALL = 1e-4
"""Learning rate where none is told: only ratios are shown then."""
_VARIANT = re.compile(r"[-_]|paged|torch|fused|bnb|\d+bit")
_SETTING = re.compile(r"r(\d+)a(\d+(?:\.\d+)?)((?::(?:lora|rslora|dora))*)", re.I)


@dataclass(frozen=True)
class Setting:
    """What decides the length of an adapter's first step."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    lr: float = 1.0
    """Learning rate of A."""
    b_ratio: float = 1.0
    """LoRA+: the learning rate of B and of magnitudes over that of A."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __str__(self) -> str:
        method = (":rslora" if self.rslora else "") + (":dora" if self.dora else "")
        faster = f" (LoRA+ {_short(self.b_ratio)})" if self.b_ratio != 1 else ""
        return f"r{self.rank}a{_short(self.alpha)}{method}{faster}"


@dataclass(frozen=True)
class Advice:
    """Two settings compared, and what makes the second step as the first does."""

    before: Setting
    after: Setting
    ratio: float
    """First step of `after` over that of `before`."""
    lr: float
    """Learning rate with which `after` steps as `before`."""
    alpha: float | None
    """Alpha with which it does; None: DoRA's magnitudes alone step further than that."""


def parse_setting(text: str, *, rslora: bool = False, dora: bool = False) -> Setting:
    """`r16a32`, or with methods of its own `r16a32:rslora`, `r16a32:dora`, `r16a32:rslora:dora`.

    Raises HirankError for anything else.
    """
    found = _SETTING.fullmatch(text.strip())
    if found is None or int(found[1]) == 0 or float(found[2]) == 0:
        raise HirankError(
            f"{text!r} is no setting: write rank and alpha, both above 0, such as r16a32, and "
            "behind them :lora, :rslora or :dora where the two settings differ in that."
        )
    if methods := found[3].lower().split(":")[1:]:
        rslora, dora = "rslora" in methods, "dora" in methods
    return Setting(int(found[1]), float(found[2]), rslora=rslora, dora=dora)


def power_of(optimizer: str) -> int:
    """The power of the scale in the step: 2 for SGD, 1 for optimisers that divide by the gradient.

    Takes the names that trainers use (adamw_torch_fused, paged_adamw_8bit). Raises HirankError
    for an optimiser that the law is not known for.
    """
    plain = _VARIANT.sub("", optimizer.lower())
    if plain in SGD:
        return 2
    if plain in ADAM:
        return 1
    raise HirankError(
        f"The step of the optimizer {optimizer!r} follows no law known here: give one of "
        f"{', '.join(SGD + ADAM)}."
    )


def step_size(setting: Setting, power: int) -> float:
    """Root mean square step of a row of W, in units of what the gradient gives (see above)."""
    return setting.lr * setting.b_ratio * math.sqrt(_directions(setting, power) + setting.dora)


def advise(before: Setting, after: Setting, power: int) -> Advice:
    """What `after` needs for the first step of `before`."""
    ratio = step_size(after, power) / step_size(before, power)
    return Advice(before, after, ratio, after.lr / ratio, _alpha_for(before, after, power))


def compared(
    before: str,
    after: str,
    optimizer: str,
    *,
    rslora: bool = False,
    dora: bool = False,
    lr: float | None = None,
    b_ratio: float = 1.0,
) -> Advice:
    """Two settings as they are written, compared at one learning rate `lr`.

    `b_ratio` is LoRA+'s, of `after` alone: what is asked is how to go from plain LoRA to it.
    Raises HirankError for what cannot be read, or a learning rate or ratio that is not above 0.
    """
    for name, value in (("learning rate", lr), ("LoRA+ ratio", b_ratio)):
        if value is not None and not 0 < value < math.inf:
            raise HirankError(f"The {name} {value:g} moves nothing: give one above 0.")
    power = power_of(optimizer)
    ways = {"rslora": rslora, "dora": dora}
    one, other = parse_setting(before, **ways), parse_setting(after, **ways)
    rate = SMALL if lr is None else lr
    return advise(replace(one, lr=rate), replace(other, lr=rate, b_ratio=b_ratio), power)


def magnitude_share(setting: Setting, power: int) -> float:
    """The part of the squared step that DoRA's magnitudes make; 0 without them."""
    return setting.dora / (_directions(setting, power) + setting.dora)


def told(advice: Advice, optimizer: str, *, lr: bool = True) -> str:
    """A table of both settings, and what to do in a sentence; `lr`: learning rates are known."""
    before, after = advice.before, advice.after
    rate, alpha = _rate(advice, lr), "none" if advice.alpha is None else _short(advice.alpha)
    rows = [
        HEADINGS,
        (str(before), _short(before.scale), "1", _short(before.lr) if lr else "", ""),
        (str(after), _short(after.scale), f"{advice.ratio:.3g}", rate, alpha),
    ]
    lines = [*_columns(rows), "", _sentence(advice, optimizer, rate)]
    return "\n".join([*lines, *_about_magnitudes(after, optimizer)])


def _about_magnitudes(setting: Setting, optimizer: str) -> list[str]:
    share = magnitude_share(setting, power_of(optimizer))
    said = f"Magnitudes make {share:.2g} of its square; alpha does not change their part."
    return [said] if setting.dora else []


def _rate(advice: Advice, known: bool) -> str:
    factor = f"{1 / advice.ratio:.3g} x that of {advice.before}"
    return f"{_short(advice.lr)} ({factor})" if known else factor


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _sentence(advice: Advice, optimizer: str, rate: str) -> str:
    before, after, ratio = advice.before, advice.after, advice.ratio
    if abs(math.log(ratio)) < SAME:
        return f"With {optimizer}, {after} starts with the step of {before}: change nothing."
    alpha = f", or alpha {_short(advice.alpha)}" if advice.alpha is not None else ""
    return (
        f"With {optimizer}, the first step of {after} is {ratio:.3g} times that of {before}: to "
        f"keep it, take the learning rate {rate}{alpha}."
    )


def _directions(setting: Setting, power: int) -> float:
    """The square of the part that goes through B, for a learning rate of 1."""
    return (setting.scale * ROW) ** (2 * power) * setting.rank


def _alpha_for(before: Setting, after: Setting, power: int) -> float | None:
    wanted = (step_size(before, power) / (after.lr * after.b_ratio)) ** 2 - after.dora
    if wanted <= 0:
        return None
    factor = wanted / _directions(after, power)
    return float(after.alpha * factor ** (1 / (2 * power)))


def _short(number: float) -> str:
    return f"{number:.4g}" if number < 1e4 else f"{number:.0f}"

"""One run by every method, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hirank.plan.closed import closed_form
from hirank.plan.inventory import Shape
from hirank.plan.ledger import ESTIMATED, Ledger, Overhead
from hirank.plan.setting import Setting
from hirank.plan.states import trained_numbers

__all__ = ["USUAL_RANK", "Row", "comparison"]


@dataclass(frozen=True)
class Row:
    """One method."""

    name: str
    setting: Setting
    ledger: Ledger
    trained: int
    """Parameters."""


_NARROW: dict[str, Any] = {"base_dtype": "bf16", "step_in_backward": False}
USUAL_RANK = {"galore": 128, "qgalore": 128, "fira": 128, "apollo": 256, "apollo-mini": 1}


def comparison(setting: Setting, shape: Shape, overhead: Overhead = ESTIMATED) -> list[Row]:
    """The same data, length and batch with each method; adapters keep the rank, and low-rank
    optimisers have their papers' unless the setting is of one."""
    made = [(name, one) for name, one in _settings(setting) if _can(one)]
    return [
        Row(name, one, closed_form(one, shape, overhead), trained_numbers(one, shape))
        for name, one in made
    ]


def _settings(s: Setting) -> list[tuple[str, Setting]]:
    rank = s.rank if s.is_adapter else 16
    found = [
        (name, replace(s, method=name, rank=rank, kbit_upcast=False, **_NARROW))
        for name in ("qlora", "qdora", "lora", "dora", "dora-peft")
    ]
    for name, usual in USUAL_RANK.items():
        mine = s.rank if s.method == name else usual
        made = replace(s, method=name, rank=mine, kbit_upcast=False, **_NARROW)  # type: ignore[arg-type]
        found.append((name, made))
    whole = replace(s, method="full", kbit_upcast=False, **_NARROW)
    found.append(("full, bf16 weights", replace(whole, autocast=False)))
    found.append(("full, fp32 weights", replace(whole, base_dtype="fp32", autocast=True)))
    return found


def _can(s: Setting) -> bool:
    return not (s.is_low_rank and s.sharding.startswith("zero"))

"""What can be changed about a run to make it smaller, and what each change costs.

The price orders changes: below 1 nothing is lost, from 1 time, from 10 something of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hirank.plan.setting import Setting

__all__ = ["CHANGES", "Change", "Made", "changes_of"]


@dataclass(frozen=True)
class Change:
    """One way to need less."""

    price: float
    cost: str
    """What it costs in quality and speed."""
    values: Callable[[Setting], dict[str, Any] | None]
    """The new values, None where it has no meaning."""


@dataclass(frozen=True)
class Made:
    """A change as made to a setting."""

    values: dict[str, Any]
    cost: str
    price: float

    @property
    def text(self) -> str:
        """`checkpointing = true, batch = 4`."""
        return ", ".join(f"{name} = {_plain(value)}" for name, value in self.values.items())


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes_of(setting: Setting) -> Iterator[tuple[Setting, Made]]:
    """Every change that has a meaning, each alone."""
    for change in CHANGES:
        values = change.values(setting)
        if values is not None:
            yield replace(setting, **values), Made(values, change.cost, change.price)


def _smaller_batch(s: Setting) -> dict[str, Any] | None:
    if s.batch == 1 or s.batch % 2:
        return {"batch": 1, "accumulation": s.accumulation * s.batch} if s.batch > 1 else None
    return {"batch": s.batch // 2, "accumulation": 2 * s.accumulation}


def _packed_in_4_bits(s: Setting) -> dict[str, Any] | None:
    to = {"lora": "qlora", "dora": "qdora", "dora-peft": "qdora"}.get(s.method)
    return {"method": to, "base_dtype": "bf16"} if to else None


def _low_rank_instead(s: Setting) -> dict[str, Any] | None:
    if s.method != "full" or s.sharding.startswith("zero"):
        return None
    return {"method": "galore", "rank": 128, "base_dtype": "bf16"}


def _adapter_instead(s: Setting) -> dict[str, Any] | None:
    if s.is_adapter:
        return None
    return {"method": "dora", "rank": 64, "base_dtype": "bf16", "step_in_backward": False}


CHANGES = (
    Change(
        0.1,
        "same result, same speed",
        lambda s: {"loss": "trl"} if s.loss == "plain" else None,
    ),
    Change(
        0.2,
        "same result, faster",
        lambda s: {"step": "fused"} if s.step != "fused" and not s.is_low_rank else None,
    ),
    Change(
        0.3,
        "same result, faster; needs a model without a softcap",
        lambda s: {"attention": "sdpa"} if s.attention == "eager" else None,
    ),
    Change(
        0.4,
        "same result, faster",
        lambda s: {"method": "dora"} if s.method == "dora-peft" else None,
    ),
    Change(
        1.0,
        "same result but for the order of sums; smaller batches use the GPU a little worse",
        _smaller_batch,
    ),
    Change(
        2.5,
        "same result; about a third more time, as activations are computed twice",
        lambda s: None if s.checkpointing else {"checkpointing": True},
    ),
    Change(
        3.0,
        "same result with one micro-batch; no gradient norm is logged",
        lambda s: {"step_in_backward": True} if s.is_low_rank and _may_step_early(s) else None,
    ),
    Change(
        10.0,
        "moments in 8 bits (bitsandbytes' AdamW8bit; in hirank train for galore and its kind only)",
        lambda s: {"state_dtype": "int8"} if _has_wide_moments(s) else None,
    ),
    Change(
        14.0,
        "NF4 weights: a little of the quality, and 1.3 to 2 times the time of bf16",
        _packed_in_4_bits,
    ),
    Change(
        16.0,
        "bf16 weights: steps below 1/256 of a weight round away unless rounding is stochastic",
        lambda s: {"base_dtype": "bf16"} if _may_be_narrow(s) else None,
    ),
    Change(
        18.0,
        "half the rank: less can be learnt where rank is the bottleneck; mind the learning rate",
        lambda s: {"rank": s.rank // 2} if s.rank > 8 and s.method != "full" else None,
    ),
    Change(
        30.0,
        "another method: full weights by gradients seen in a subspace; slower to learn new facts",
        _low_rank_instead,
    ),
    Change(
        40.0,
        "another method: an adapter instead of all weights; enough for most fine-tuning",
        _adapter_instead,
    ),
    Change(
        50.0,
        "half the length: longer rows are left out or cut, so it learns other data",
        lambda s: {"sequence": s.sequence // 2} if s.sequence > 256 else None,
    ),
)  # fmt: skip


def _may_step_early(s: Setting) -> bool:
    return not s.step_in_backward and s.world == 1


def _has_wide_moments(s: Setting) -> bool:
    return s.state_dtype != "int8" and s.optimizer == "adamw" and s.method != "qgalore"


def _may_be_narrow(s: Setting) -> bool:
    return s.base_dtype == "fp32" and not s.is_quantised

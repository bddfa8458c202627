"""What all suites share: device, arms, repeats, where lines of text go; and what they return."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hirank.bench.arms import base_dtype, load_base
from hirank.bench.gate import Agreement, Probe, agreement, finite
from hirank.bench.timing import Sample, interleaved, quantiles, ratios

__all__ = ["Result", "Session", "results"]


@dataclass(frozen=True)
class Result:
    """What one arm measured under one set of settings."""

    arm: str
    metrics: dict[str, Any]

    @property
    def agrees(self) -> bool:
        """False if the arm was judged and found further from the truth than stock PEFT."""
        return bool(self.metrics.get("agreement", {}).get("agrees", True))


@dataclass(frozen=True)
class Session:
    """One run of the benchmark."""

    device: torch.device
    arms: tuple[str, ...] | None
    """Only these, in this order; None: all that the suite has."""
    repeats: int
    warmup: int
    limit: float
    """Seconds after which no further round begins."""
    say: Callable[[str], None]
    _bases: dict[str, nn.Module] = field(default_factory=dict, repr=False)

    def chosen(self, available: Sequence[str]) -> list[str]:
        """The arms to measure of those that a suite has."""
        if self.arms is None:
            return list(available)
        return [name for name in self.arms if name in available]

    def base(self, name: str) -> nn.Module:
        """The base model, loaded once for settings that follow each other."""
        if name not in self._bases:
            self._bases.clear()
            self.say(f"loading {name} on {self.device}")
            self._bases[name] = load_base(name, self.device)
        return self._bases[name]

    def judge(
        self,
        base: nn.Module,
        arms: Mapping[str, nn.Module],
        probe: Probe,
        *,
        dropout: float = 0.0,
        of: str = "",
    ) -> dict[str, Agreement]:
        """The verdict on each arm that has a judge, said and returned; `of` says of what."""
        found = agreement(base, arms, probe, base_dtype(self.device), dropout=dropout)
        for name, one in found.items():
            self.say(f"{of}{name} {one}")
        return found

    def tidy(self) -> None:
        """Let go of the arms that were measured, before the next are built."""
        gc.unfreeze()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure(
        self, steps: Mapping[str, Callable[[], Sample]]
    ) -> tuple[dict[str, Callable[[], Sample]], dict[str, list[Sample]]]:
        """Interleaved samples of every step that fits the GPU, and those steps."""
        fitting = {name: step for name, step in steps.items() if self._fits(name, step)}
        if not fitting:
            return fitting, {}
        # With several models in one process a full collection takes several times as long as in
        # anyone's training; frozen objects are left out of it.
        gc.collect()
        gc.freeze()
        warmup = max(0, self.warmup - 1)  # the first was to see whether it fits
        taken = interleaved(fitting, repeats=self.repeats, warmup=warmup, limit=self.limit)
        return fitting, taken

    def _fits(self, name: str, step: Callable[[], Sample]) -> bool:
        try:
            step()
        except torch.OutOfMemoryError:
            pass
        else:
            return True
        torch.cuda.empty_cache()
        self.say(f"{name}: out of memory")
        return False


def results(
    samples: Mapping[str, Sequence[Sample]],
    key: str,
    *,
    agreements: Mapping[str, Agreement] | None = None,
    more: Mapping[str, dict[str, Any]] | None = None,
) -> list[Result]:
    """Quantiles of all times, ratios of `key`, and whatever `more` is known of each arm.

    An arm that was judged and disagrees has times but no ratio, nor has another a ratio to it.
    """
    agreements, more = agreements or {}, more or {}
    off = {one.against: one.judge_off for one in agreements.values()}
    off |= {name: one.off for name, one in agreements.items()}
    wrong = {name for name, found in agreements.items() if not found.agrees}
    compared = ratios({name: s for name, s in samples.items() if name not in wrong}, key)
    found = []
    for name, rounds in samples.items():
        metrics: dict[str, Any] = {
            what: quantiles([sample[what] for sample in rounds]) for what in rounds[0]
        }
        metrics["ratio"] = compared.get(name, {})
        if name in agreements:
            metrics["agreement"] = agreements[name].record()
        if name in off:
            metrics["off_fp32"] = finite(off[name])
        found.append(Result(name, metrics | dict(more.get(name, {}))))
    return found

"""Suite `optim`: one full-parameter step of a whole model by each optimiser: bytes and seconds.

    adamw              PyTorch's AdamW (fused on a GPU) with moments in the weights' dtype
    adamw-8bit         bitsandbytes' AdamW8bit
    galore-torch-8bit  galore-torch's 8-bit GaLore, per layer
    hirank-galore      GaLore, int8 moments, bf16 bases, stepping in backward
    hirank-galore-int4 the same with bases in 4 bits
    hirank-qgalore     Q-GaLore, stepping in backward
    ...-offload        while the inputs of checkpointed blocks wait on the host (`optim/away.py`)

Arms come one after the other, each with a model of its own, so that nothing of another is in its
peak. Every arm is first held against the formulas in fp64 (`optim_gate`); one that is off, or whose
state is not as large as its formula says, has times but no ratio.

`peak_bytes` is of all steps, the first one with its bases from nothing and refreshes included;
`plain_peak_bytes` of those without a refresh. With `stagger` refreshes come as they come, a few
bases a step; without it all of them are made due `refreshes` times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hirank.bench import arms as arms_
from hirank.bench.compat import checkpoint_blocks
from hirank.bench.optim_gate import Verdict, judged, ratios
from hirank.bench.optim_loss import next_token_loss
from hirank.bench.optim_memory import peak_of, state_bytes, weight_bytes
from hirank.bench.optim_rivals import PerLayer, adamw_8bit, galore_torch_8bit
from hirank.bench.session import Result, Session
from hirank.bench.settings import Optim
from hirank.bench.shapes import MODELS, config_of
from hirank.bench.timing import quantiles, synchronize
from hirank.errors import HirankError
from hirank.optim import bases
from hirank.optim.optimizer import LowRankAdamW
from hirank.optim.presets import GaLoreAdamW, QGaLoreAdamW

__all__ = ["ARMS", "run"]

_LR, _GATE_LR, _GATE_SCALE, _GATE_RANK, _GATE_GAP = 1e-4, 0.02, 0.5, 64, 200


# Optimisers.


def _galore(model: nn.Module, basis_store: str = "bf16", **options: Any) -> LowRankAdamW:
    made = GaLoreAdamW(
        model, **options, state="int8", basis_store=basis_store, weight_rounding="stochastic"
    )
    made.step_in_backward()
    return made


def _qgalore(model: nn.Module, **options: Any) -> LowRankAdamW:
    made = QGaLoreAdamW(model, **options)
    made.step_in_backward()
    return made


def _galore_torch(model: nn.Module, stagger: bool, **options: Any) -> PerLayer:
    return galore_torch_8bit(model, **options)


def _adamw_8bit(model: nn.Module, lr: float, **_: Any) -> Any:
    return adamw_8bit(model, lr)


def _adamw(model: nn.Module, lr: float, **_: Any) -> Any:
    parameters = list(model.parameters())
    fused = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=fused)


_MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": _adamw,
    "adamw-8bit": _adamw_8bit,
    "galore-torch-8bit": _galore_torch,
    "hirank-galore": _galore,
    "hirank-galore-int4": partial(_galore, basis_store="int4"),
    "hirank-qgalore": _qgalore,
    "hirank-galore-offload": _galore,
    "hirank-qgalore-offload": _qgalore,
}
ARMS = tuple(_MAKERS)


def _judged(name: str, session: Session) -> Verdict:
    def make(model: nn.Module) -> Any:
        options = {"lr": _GATE_LR, "scale": _GATE_SCALE, "rank": _GATE_RANK, "gap": _GATE_GAP}
        return _MAKERS[name](model, **options, stagger=False)

    return judged(name, make, session.device, arms_.base_dtype(session.device))


# A step.


@dataclass
class _Arm:
    """A model, its optimiser, and what its steps took."""

    model: nn.Module
    optimizer: Any
    ids: Tensor
    offload: bool = False
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, kind: str | None = None) -> None:
        """One step. Without a `kind` it is a plain one, or a refresh if a basis is due."""
        kind = kind or ("refresh" if self._due() else "plain")
        synchronize(self.ids.device)
        start = time.perf_counter()
        with self._watched(kind):
            self.step()
            synchronize(self.ids.device)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - start)

    def _watched(self, kind: str) -> Any:
        return _Peak(self, kind) if self.ids.device.type == "cuda" else nullcontext()

    def step(self) -> None:
        """Forward, backward and the optimiser."""
        loss = next_token_loss(self.model, self.ids, offload=self.offload)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def watch(self, kind: str) -> None:
        """A step that is not timed, for its peak on a CPU."""
        with _Peak(self, kind):
            self.step()

    def held(self) -> int:
        """Bytes of weights and state."""
        return weight_bytes(self.model) + state_bytes(self.optimizer.state)

    def _due(self) -> bool:
        optimizer = self.optimizer
        if not isinstance(optimizer, LowRankAdamW):
            return False
        return any(bases.due(optimizer.state[p]) for p in optimizer.projected())

    def make_due(self) -> bool:
        """Make every basis due; False for an optimiser without bases."""
        if isinstance(self.optimizer, LowRankAdamW):
            for p in self.optimizer.projected():
                self.optimizer.state[p]["next_refresh"] = self.optimizer.state[p]["step"]
            return True
        states = self.optimizer.state.values()
        found = [entry["projector"] for entry in states if "projector" in entry]
        for projector in found:
            projector.ortho_matrix = None
        return bool(found)


class _Peak:
    """Keeps the highest peak of a kind of step."""

    def __init__(self, arm: _Arm, kind: str) -> None:
        self._arm, self._kind = arm, kind
        self._block = peak_of(arm.ids.device, arm.held() if arm.ids.device.type != "cuda" else 0)

    def __enter__(self) -> None:
        self._found = self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)
        peaks = self._arm.peaks
        peaks[self._kind] = max(peaks.get(self._kind, 0), self._found.bytes)


# The suite.


def run(settings: Optim, session: Session) -> list[Result]:
    """Judge every arm, measure those that can be had, and compare those that are right."""
    found: dict[str, dict[str, Any]] = {}
    verdicts: dict[str, Verdict] = {}
    for name in session.chosen(ARMS):
        try:
            verdicts[name] = _judged(name, session)
        except HirankError as error:
            session.say(f"{name} is left out: {error}")
            continue
        session.say(f"{name} {verdicts[name]}")
        found[name] = _measured(name, settings, session)
        session.tidy()
    return _results(found, verdicts)


def _measured(name: str, settings: Optim, session: Session) -> dict[str, Any]:
    try:
        return _facts(_run(name, settings, session), settings)
    except torch.OutOfMemoryError:
        session.say(f"{name}: out of memory")
        return {"out_of_memory": True}


def _run(name: str, settings: Optim, session: Session) -> _Arm:
    model = _model(settings, session.device)
    options = {"rank": settings.rank, "gap": settings.gap, "scale": 0.25, "lr": _LR}
    optimizer = _MAKERS[name](model, **options, stagger=settings.stagger)
    vocab: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (settings.batch, settings.seq), generator=draw)
    arm = _Arm(model, optimizer, ids.to(session.device), name.endswith("-offload"))
    arm.timed("first")
    for _ in range(session.warmup):
        arm.step()
    for _ in range(session.repeats):
        arm.timed()
    _refreshed(arm, settings)
    if session.device.type != "cuda":
        _watched(arm)
    return arm


def _refreshed(arm: _Arm, settings: Optim) -> None:
    for _ in range(0 if settings.stagger else settings.refreshes):
        if arm.make_due():
            arm.timed("refresh")


def _watched(arm: _Arm) -> None:
    """Peaks on a CPU, where counting them is slow."""
    arm.watch("plain")
    if arm.make_due():
        arm.watch("refresh")


def _model(settings: Optim, device: torch.device) -> nn.Module:
    """Random weights, all of them to be trained, in bf16 on a GPU."""
    from transformers import AutoModelForCausalLM

    if settings.model not in MODELS:
        raise HirankError(f"--model got {settings.model!r}: choose from {', '.join(MODELS)}.")
    config: Any = config_of(settings.model)
    if settings.layers:
        config.num_hidden_layers = settings.layers
    create: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    with device:
        model: nn.Module = create(config, dtype=arms_.base_dtype(device))
    if settings.checkpointing:
        checkpoint_blocks(model)
    return model.train()


def _facts(arm: _Arm, settings: Optim) -> dict[str, Any]:
    plain = arm.seconds.get("plain", [])
    refreshes = arm.seconds.get("refresh", [])
    steps = plain if not settings.stagger else plain + refreshes
    facts: dict[str, Any] = {
        "first_step_s": arm.seconds["first"][0],
        "wall_s": quantiles(steps or refreshes),
        "weight_bytes": weight_bytes(arm.model),
        "state_bytes": state_bytes(arm.optimizer.state),
        "peak_bytes": max(arm.peaks.values()),
    }
    facts["tokens_per_s"] = {"p50": arm.ids.numel() / facts["wall_s"]["p50"]}
    if "plain" in arm.peaks:
        facts["plain_peak_bytes"] = arm.peaks["plain"]
    if refreshes:
        facts["refresh_s"] = quantiles(refreshes) | {"max": max(refreshes)}
    if isinstance(arm.optimizer, LowRankAdamW):
        facts["formula_bytes"] = arm.optimizer.cost()
        facts["optimizer"] = arm.optimizer.describe()
    return facts


def _results(found: dict[str, dict[str, Any]], verdicts: dict[str, Verdict]) -> list[Result]:
    wrong = {name for name, facts in found.items() if not _adds_up(facts)}
    seconds = {
        name: facts["wall_s"]["p50"]
        for name, facts in found.items()
        if "wall_s" in facts and name not in wrong
    }
    compared = ratios(seconds, verdicts)
    return [
        Result(name, facts | _judgement(verdicts[name], name not in wrong, compared.get(name, {})))
        for name, facts in found.items()
    ]


def _adds_up(facts: dict[str, Any]) -> bool:
    """Whether the state is as large as its formula says, where there is one."""
    return bool(facts.get("formula_bytes") == facts.get("state_bytes")) or (
        "formula_bytes" not in facts
    )


def _judgement(verdict: Verdict, adds_up: bool, compared: dict[str, float]) -> dict[str, Any]:
    agreement = verdict.record() | {"agrees": verdict.agrees and adds_up}
    return {"agreement": agreement, "off_fp64": verdict.off, "ratio": compared}

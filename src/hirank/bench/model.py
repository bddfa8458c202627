"""Suite `model`: one optimizer step of a whole model, accumulation micro-batches and all.

Wall time is the host's clock around the whole step, with the device idle before and after.
Without the optimizer's step the adapters are still nudged before each step, outside the clock:
otherwise a norm that is kept would never have to be computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.adapters.peft import explain
from hirank.bench import arms as arms_
from hirank.bench.compat import checkpoint_blocks
from hirank.bench.gate import with_judges
from hirank.bench.memory import cache_bytes, saved_bytes, size, state_bytes
from hirank.bench.profiling import profiled
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Model
from hirank.bench.timing import Marks, Sample, synchronize

__all__ = ["ARMS", "gate_probe", "run"]

ARMS = arms_.ARMS
_GATE_TOKENS = 256  # fewer would leave more to chance
_LR = 1e-6  # the work of a step does not depend on it; small, so that no arm runs away


@dataclass(frozen=True)
class _Arm:
    """One arm with what its step needs. The optimizer is common to all arms, as the weights are."""

    name: str
    model: nn.Module
    ids: Tensor  # [accumulation, batch, seq]
    settings: Model
    optimizer: torch.optim.Optimizer | None
    device: torch.device

    def loss(self, ids: Tensor, loss_tokens: int) -> Tensor:
        """Mean cross-entropy of the next token over the last `loss_tokens` (0: all) of each row."""
        logits = self.logits(ids, loss_tokens or ids.shape[1])
        wanted = ids[:, ids.shape[1] - logits.shape[1] + 1 :]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten())

    def logits(self, ids: Tensor, count: int) -> Tensor:
        """[batch, count, vocabulary]; the base arm's embeddings want a gradient."""
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.name == "base":
            embed: Any = self.model.get_input_embeddings()  # type: ignore[operator]
            inputs = {"inputs_embeds": embed(ids).detach().requires_grad_()}
        found: Tensor = self.model(**inputs, logits_to_keep=count, use_cache=False).logits
        return found

    def step(self) -> Sample:
        """One step, timed. Leaves no gradients behind, not even where memory ran out."""
        try:
            return self._timed()
        finally:
            self._forget()

    def _timed(self) -> Sample:
        marks = Marks(self.device)
        if self.optimizer is None:
            _nudge(self.model)
        synchronize(self.device)
        start = time.perf_counter()
        marks.mark()
        self._gradients(marks)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        marks.mark()
        synchronize(self.device)
        return self._sample(time.perf_counter() - start, marks.spans())

    def _forget(self) -> None:
        for parameter in arms_.trainable(self.model).values():
            parameter.grad = None

    def _gradients(self, marks: Marks) -> None:
        for ids in self.ids:
            with arms_.autocast(self.device):
                loss = self.loss(ids, self.settings.loss_tokens) / len(self.ids)
            marks.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            marks.mark()

    def _sample(self, wall: float, spans: list[float]) -> Sample:
        *halves, optimizer = spans
        sample = {
            "wall_s": wall,
            "forward_s": sum(halves[::2]),
            "backward_s": sum(halves[1::2]),
            "tokens_per_s": self.ids.numel() / wall,
        }
        if self.optimizer is not None:
            sample["optimizer_s"] = optimizer
        if self.device.type == "cuda":
            sample["gpu_s"] = sum(spans)
        return sample


def gate_probe(model: nn.Module, ids: Tensor, device: torch.device) -> Tensor:
    """Logits of a small batch [1, tokens] of `ids` [batch, seq], after a backward through it."""
    ids = ids[:1, :_GATE_TOKENS]
    with arms_.autocast(device):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return logits


def run(settings: Model, session: Session) -> list[Result]:
    """Hold the arms against the truth, then time them in turn, then count bytes and norms."""
    _require_next_token(settings)
    base = session.base(settings.model)
    if session.device.type == "cuda":  # as much before each combination: all else was let go of
        held = torch.cuda.memory_allocated(session.device)
        session.say(f"{held / 1e9:.1f} GB are held before the arms are made")
    names, ids = session.chosen(ARMS), _ids(settings, base)[0].to(session.device)
    models = arms_.build(base, with_judges(names), rank=settings.rank, dropout=settings.dropout)

    def probe(model: nn.Module) -> Tensor:
        return gate_probe(model, ids, session.device)

    agreements = session.judge(base, models, probe, dropout=settings.dropout)
    models = {name: models[name] for name in names}
    arms = _arms(settings, session, models)
    more = {name: {"kept_bytes": count} for name, count in _saved(arms, settings).items()}
    if settings.checkpointing:
        for model in models.values():
            checkpoint_blocks(model)
    steps, samples = session.measure({name: arm.step for name, arm in arms.items()})
    unfit = [Result(name, {"out_of_memory": True}) for name in arms if name not in steps]
    for name in steps:
        walls = sorted(sample["wall_s"] for sample in samples[name])
        more.setdefault(name, {}).update(_facts(arms, name, walls[len(walls) // 2]))
    return results(samples, "wall_s", agreements=agreements, more=more) + unfit


def _require_next_token(settings: Model) -> None:
    from hirank.errors import HirankError

    if settings.seq < 2 or settings.loss_tokens == 1 or settings.batch * settings.accumulation < 1:
        raise HirankError(
            f"A step of {settings.accumulation} x {settings.batch} x {settings.seq} tokens with "
            f"--loss-tokens {settings.loss_tokens} has no next token to learn: give at least 2."
        )


def _ids(settings: Model, base: Any) -> Tensor:
    """[accumulation, batch, seq]"""
    shape = (settings.accumulation, settings.batch, settings.seq)
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, base.config.vocab_size, shape, generator=draw)


def _arms(settings: Model, session: Session, models: dict[str, nn.Module]) -> dict[str, _Arm]:
    ids = _ids(settings, next(iter(models.values()))).to(session.device)
    weights = {name: p for model in models.values() for name, p in arms_.trainable(model).items()}
    optimizer = None
    if settings.optimizer and weights:
        fused = session.device.type == "cuda"
        optimizer = torch.optim.AdamW(list(weights.values()), lr=_LR, fused=fused)
    return {
        name: _Arm(name, model, ids, settings, optimizer, session.device)
        for name, model in models.items()
    }


def _nudge(model: nn.Module) -> None:
    """Change the adapter as little as a step does, so that what depends on it is computed anew."""
    with torch.no_grad():
        for name, parameter in arms_.trainable(model).items():
            if ".lora_B." in name:
                parameter.mul_(1 + 2.0**-10)


def _saved(arms: dict[str, _Arm], settings: Model) -> dict[str, int]:
    """Bytes kept by one forward without checkpointing, of at most so many tokens as asked."""
    count = min(settings.seq, settings.saved_tokens)
    if count < 2:
        return {}
    found = {}
    for name, arm in arms.items():
        try:
            found[name] = _saved_by(arm, arm.ids[0, :1, :count])
        except torch.OutOfMemoryError:  # said by the arm's own step if that does not fit either
            continue
    return found


def _saved_by(arm: _Arm, ids: Tensor) -> int:
    owned = [*arm.model.parameters(), *arm.model.buffers()]
    with arms_.autocast(arm.device):
        with torch.no_grad():
            arm.logits(ids, 1)  # a norm that is kept is no activation
        return saved_bytes(lambda: arm.loss(ids, 2), owned)


def _facts(arms: dict[str, _Arm], name: str, wall: float) -> dict[str, Any]:
    """One more step of an arm, watched: norms, peak and resident bytes, what the GPU did."""
    arm = arms[name]
    own = list(arms_.trainable(arm.model).values())
    facts: dict[str, Any] = {
        "resident_bytes": size(own) + _state(arm, own) + cache_bytes(arm.model)
    }
    before, _ = arms_.computed_norms(arm.model)
    facts |= _watched(arms, arm, wall)
    after, layers = arms_.computed_norms(arm.model)
    if layers and "dora" in name:
        facts["norms_per_layer"] = (after - before) / layers
    if name.startswith("hirank"):
        facts["route"] = explain(arm.model).summary()
    return facts


def _watched(arms: dict[str, _Arm], arm: _Arm, wall: float) -> dict[str, Any]:
    """A step under the profiler on a GPU, with the allocator's peak as if the arm were alone.

    The profiler's own buffers come from the driver, not from PyTorch's allocator.
    """
    if arm.device.type != "cuda":
        arm.step()
        return {}
    torch.cuda.reset_peak_memory_stats(arm.device)
    facts = profiled(arm.step, arm.device)
    peak = torch.cuda.max_memory_allocated(arm.device) - _held_by_others(arms, arm)
    return facts | {"wall_over_busy": wall / facts["busy_s"], "peak_bytes": peak}


def _held_by_others(arms: dict[str, _Arm], arm: _Arm) -> int:
    """Bytes that only other arms need: their norms, and weights with state that are not ours."""
    others = sum(cache_bytes(other.model) for other in arms.values() if other is not arm)
    own = {id(p) for p in arms_.trainable(arm.model).values()}
    everyone = {p for other in arms.values() for p in arms_.trainable(other.model).values()}
    foreign = [p for p in everyone if id(p) not in own]
    return others + size(foreign) + _state(arm, foreign)


def _state(arm: _Arm, parameters: Iterable[Tensor]) -> int:
    return 0 if arm.optimizer is None else state_bytes(arm.optimizer, parameters)

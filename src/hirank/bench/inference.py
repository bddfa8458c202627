"""Suites `prefill` and `decode`: tokens a second with unmerged adapters, without gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hirank.bench import arms as arms_
from hirank.bench.compat import kept_keys_and_values, rewind, static_cache
from hirank.bench.gate import with_judges
from hirank.bench.profiling import profiled
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Decode, Prefill
from hirank.bench.timing import Sample, calls
from hirank.errors import HirankError

__all__ = ["ARMS", "run_decode", "run_prefill"]

ARMS = arms_.ARMS
_GATE_TOKENS = 256
_GATE_WRITTEN = 8  # tokens written one by one, as the clock will see them
_WARM = 2  # tokens before a graph is recorded


def run_prefill(settings: Prefill, session: Session) -> list[Result]:
    """One forward over the prompt, logits of its last token."""

    def step(model: nn.Module, ids: Tensor) -> float:
        def read() -> None:
            model(input_ids=ids, logits_to_keep=1, use_cache=False)

        return calls(read, 1, session.device)

    def probe(model: nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids[:1, :_GATE_TOKENS], use_cache=False).logits
        return logits

    return _run(settings, session, settings.seq, settings.seq, step, probe)


def run_decode(settings: Decode, session: Session) -> list[Result]:
    """Greedy tokens, one after the other, from a prompt that was read before."""
    _check_cache(settings, session.device)

    def step(model: nn.Module, ids: Tensor) -> float:
        write, _ = _writer(model, ids, settings)
        return calls(write, settings.new, session.device) * settings.new

    def probe(model: nn.Module, ids: Tensor) -> Tensor:
        write, token = _writer(model, ids, settings)
        found = []
        for column in range(min(_GATE_WRITTEN, settings.new)):
            token.copy_(ids[:, column : column + 1])  # the same in every arm
            found.append(write().clone())
        return torch.cat(found)

    return _run(settings, session, settings.prompt, settings.new, step, probe)


def _check_cache(settings: Decode, device: torch.device) -> None:
    if settings.cache not in ("dynamic", "static", "graph"):
        raise HirankError(f"--cache got {settings.cache!r}: give dynamic, static or graph.")
    if settings.cache == "graph" and device.type != "cuda":
        raise HirankError("--cache graph needs a GPU: on a CPU give dynamic or static.")


def _writer(model: nn.Module, ids: Tensor, settings: Decode) -> tuple[Callable[[], Tensor], Tensor]:
    """A call that writes one more token, and the token [batch, 1] that it reads and replaces.

    The call returns logits [batch, 1, vocabulary]; those of a graph are overwritten by the next.
    """
    fixed = settings.cache != "dynamic"
    room = static_cache(model, settings.prompt + settings.new + _WARM) if fixed else {}
    out = model(input_ids=ids, logits_to_keep=1, use_cache=True, **room)
    kept, token = room or kept_keys_and_values(out), out.logits[:, -1:].argmax(-1)

    def write() -> Tensor:
        logits: Tensor = model(input_ids=token, **kept, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))
        return logits

    if settings.cache != "graph":
        return write, token
    first = token.clone()
    replay = _captured(write)
    rewind(kept, settings.prompt)
    token.copy_(first)
    return replay, token


def _captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`call` from a CUDA graph, after two runs of its own on a side stream."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay(owner: object = call) -> Tensor:  # what the graph reads must not be freed
        graph.replay()
        return out

    return replay


def _run(
    settings: Prefill | Decode,
    session: Session,
    prompt: int,
    tokens: int,
    seconds: Callable[[nn.Module, Tensor], float],
    logits: Callable[[nn.Module, Tensor], Tensor],
) -> list[Result]:
    base, names = session.base(settings.model), session.chosen(ARMS)
    ids = _prompt(base, settings.batch, prompt, session.device)
    models = arms_.build(base, with_judges(names), rank=settings.rank)
    cached = getattr(settings, "cache", "") != "graph"  # casts are part of a graph
    precision = _precision(models, settings.half, session.device, cached)

    def probe(model: nn.Module) -> Tensor:
        with torch.inference_mode(), precision():
            return logits(model.eval(), ids)

    def step_of(model: nn.Module) -> Callable[[], Sample]:
        def step() -> Sample:
            with torch.inference_mode(), precision():
                taken = seconds(model.eval(), ids)
            return {"wall_s": taken, "tokens_per_s": settings.batch * tokens / taken}

        return step

    agreements = session.judge(base, models, probe)
    steps, samples = session.measure({name: step_of(models[name]) for name in names})
    more = {name: profiled(step, session.device) for name, step in steps.items()}
    return results(samples, "wall_s", agreements=agreements, more=more)


def _prompt(base: Any, batch: int, length: int, device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, base.config.vocab_size, (batch, length), generator=draw).to(device)


def _precision(
    models: dict[str, nn.Module], half: bool, device: torch.device, cached: bool
) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast over fp32 adapters, or adapters in bf16 and no autocast. The magnitude stays."""
    if not half or device.type != "cuda":
        return lambda: arms_.autocast(device, cached=cached)
    for model in models.values():
        for name, parameter in arms_.trainable(model).items():
            if arms_.MAGNITUDE not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return nullcontext

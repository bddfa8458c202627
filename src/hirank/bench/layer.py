"""Suite `layer`: forward and backward of one adapted layer, norms already known where kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hirank.bench import arms as arms_
from hirank.bench.bases import dequantised, quantised
from hirank.bench.gate import with_judges
from hirank.bench.kinds import kind_of
from hirank.bench.memory import saved_bytes
from hirank.bench.profiling import profiled
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Layer
from hirank.bench.shapes import linears
from hirank.bench.timing import Sample, calls
from hirank.errors import HirankError

__all__ = ["ARMS", "run"]

ARMS = arms_.ARMS


class OneLayer(nn.Module):
    """A model that is one layer without bias: what PEFT needs to adapt just that."""

    def __init__(self, layer: nn.Module, base: str = "plain") -> None:
        super().__init__()
        if base != "plain" and not isinstance(layer, nn.Linear):
            raise HirankError(f"--base got {base!r}: only --kind linear has it.")
        self.layer = quantised(layer, base) if isinstance(layer, nn.Linear) else layer
        self.is_loaded_in_4bit = base != "plain"  # where PEFT looks

    def by_definition(self) -> nn.Module:
        """The same with the weight as floats, to be judged by."""
        other, layer = copy.copy(self), self.layer
        other._modules = {"layer": dequantised(layer) if isinstance(layer, nn.Linear) else layer}
        return other

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's."""
        out: Tensor = self.layer(x)
        return out


def run(settings: Layer, session: Session) -> list[Result]:
    """All arms on every shape of the set; the shape is part of an arm's metrics."""
    found = []
    for n_in, n_out in linears(settings.shape):
        shape = {"in": n_in, "out": n_out}
        for result in _one_shape(n_in, n_out, settings, session):
            found.append(Result(result.arm, result.metrics | shape))
    return found


def _one_shape(n_in: int, n_out: int, settings: Layer, session: Session) -> list[Result]:
    device, kind = session.device, kind_of(settings.kind)
    where: dict[str, Any] = {"device": device, "dtype": arms_.base_dtype(device)}
    torch.manual_seed(0)
    base = OneLayer(kind.make(n_in, n_out, **where), settings.base).requires_grad_(False)
    names = [name for name in session.chosen(ARMS) if name not in kind.lacks]
    models = arms_.build(
        base, with_judges(names), rank=settings.rank, dropout=settings.dropout, targets=["layer"]
    )
    x = kind.feed(settings.tokens, n_in, **where)
    with torch.no_grad():
        dy = torch.randn_like(base(x))

    def probe(model: nn.Module) -> Tensor:
        return _both(model, x, dy, device)

    agreements = session.judge(
        base.by_definition(), models, probe, dropout=settings.dropout, of=f"{n_in}x{n_out} "
    )
    steps = {name: _step(models[name], x, dy, settings, device) for name in names}
    _, samples = session.measure(steps)
    more = {name: _facts(models[name], x, dy, device) for name in samples}
    return results(samples, "both_s", agreements=agreements, more=more)


def _forward(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    with arms_.autocast(device):
        y: Tensor = model(x)
    return y


def _both(model: nn.Module, x: Tensor, dy: Tensor, device: torch.device) -> Tensor:
    y = _forward(model, x, device)
    y.backward(dy.to(y.dtype))  # type: ignore[no-untyped-call]
    x.grad = None
    return y


def _step(
    model: nn.Module, x: Tensor, dy: Tensor, settings: Layer, device: torch.device
) -> Callable[[], Sample]:
    parameters = list(arms_.trainable(model).values())

    def both() -> None:
        _both(model, x, dy, device)
        for parameter in parameters:
            parameter.grad = None

    def step() -> Sample:
        both_s = calls(both, settings.calls, device)
        forward_s = calls(lambda: _forward(model, x, device), settings.calls, device)
        return {"both_s": both_s, "forward_s": forward_s}

    return step


def _facts(model: nn.Module, x: Tensor, dy: Tensor, device: torch.device) -> dict[str, Any]:
    """Bytes kept for the backward besides weights and the input; what a GPU does in one call."""
    owned = [*model.parameters(), x]
    saved = saved_bytes(lambda: _forward(model, x, device), owned)
    facts = {"kept_bytes": saved} | profiled(lambda: _both(model, x, dy, device), device)
    for parameter in arms_.trainable(model).values():
        parameter.grad = None
    return facts

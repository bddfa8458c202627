"""A whole adapted layer as one op of the compiler's, with its gradients.

    NAME            the layer with one adapter: y, and in training h, which its backward needs
    NAME_backward   gradients of x, A, B, magnitude and bias; empty where none is needed

The two kinds differ in what `base` is, and in how they compute: `adapters/traced` is given the
weight, `adapters/traced_quantised` the handle of a layer.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._backend import GainPass, gain_pass_for
from hirank.kernels._ops import register_op

__all__ = ["Operands", "called", "no_autocast", "register_layer", "scaled_by"]


class Operands(NamedTuple):
    """One adapter of one layer, and what it is called with; x and bias in the compute dtype."""

    x: Tensor  # [..., K]
    base: Tensor  # the weight [N, K], or a handle
    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    bias: Tensor | None  # [N]
    scale: float
    backend: str

    def gain_pass(self, training: bool) -> GainPass:
        """As uncompiled code chooses it; an op itself runs without gradients."""
        with torch.set_grad_enabled(training):
            return gain_pass_for(self.backend, self.x, self.lora_B.shape[0])


Forward = Callable[[Operands, bool], tuple[Tensor, Tensor]]
"""From operands, and whether gradients are wanted: y [..., N] and h [M, R]."""
Backward = Callable[[Operands, Tensor, Tensor, Tensor | None, Sequence[bool]], Sequence[Any]]
"""From operands, dy, h, y (where dm needs it) and what is needed: gradients, None for others."""

_OPERANDS = (
    "Tensor x, Tensor base, Tensor lora_A, Tensor lora_B, Tensor? magnitude, Tensor? bias,"
    " Tensor? live, float scale, str backend"
)
_TRAINED = (0, 2, 3, 4, 5)  # x, A, B, magnitude and bias among them


def _operands(given: Sequence[Any]) -> Operands:
    x, base, A, B, magnitude, bias, live, scale, backend = given
    scale = scale if live is None else live.item()
    return Operands(x, base, A, B, magnitude, bias, scale, backend)


def register_layer(name: str, forward: Forward, backward: Backward) -> Callable[..., Any]:
    """The op of a kind of layer, to be called by `called`."""

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        operands, training = _operands(given[:-1]), given[-1]
        with torch.no_grad(), no_autocast(operands.x):
            y, h = forward(operands, training)
        return y, h if training else operands.x.new_empty(0)

    def run_backward(dy: Tensor, h: Tensor, y: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        operands, needs = _operands(given[:-1]), given[-1]
        with torch.no_grad(), no_autocast(operands.x):
            grads = backward(operands, dy, h, y, needs)
        return tuple(operands.x.new_empty(0) if g is None else g.contiguous() for g in grads)

    op = register_op(
        f"{name}({_OPERANDS}, bool training) -> (Tensor, Tensor)",
        reference=run,
        fused=run,
        fake=_like,
    )
    gradients = register_op(
        f"{name}_backward(Tensor dy, Tensor h, Tensor? y, {_OPERANDS}, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        reference=run_backward,
        fused=run_backward,
        fake=_like_backward,
    )
    differentiate = _differentiated(gradients)
    torch.library.register_autograd(f"hirank::{name}", differentiate, setup_context=_save)
    return op


def called(
    op: Callable[..., Any], tensors: Sequence[Tensor | None], scale: float | Tensor, backend: str
) -> Tensor:
    """y by such an op; `scale` is a constant, or a 0-d tensor on the CPU, which a graph reads."""
    live = isinstance(scale, Tensor)
    scales = (scale, 0.0) if live else (None, scale)
    y: Tensor = op(*tensors, *scales, backend, torch.is_grad_enabled())[0]
    return y


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """All is cast by then; whoever runs a graph may have autocast on, or not."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def _like(x: Tensor, base: Tensor, lora_A: Tensor, lora_B: Tensor, *rest: Any) -> Any:
    y, training = x.new_empty(*x.shape[:-1], lora_B.shape[0]), rest[-1]
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return y, x.new_empty(rows, lora_A.shape[0]) if training else x.new_empty(0)


def _like_backward(dy: Tensor, h: Tensor, y: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    x, needs = given[0], given[-1]
    inputs = [given[i] for i in _TRAINED]
    return tuple(
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.backend, _ = inputs
    y, h = output
    ctx.mark_non_differentiable(h)
    ctx.save_for_backward(h, y if ctx.needs_input_grad[4] else None, *tensors)


def _differentiated(gradients: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        h, y, *tensors = ctx.saved_tensors
        needs = [bool(ctx.needs_input_grad[i]) for i in _TRAINED]
        found = gradients(dy, h, y, *tensors, ctx.scale, ctx.backend, needs)
        grads: list[Tensor | None] = [None] * 10
        for place, grad, need in zip(_TRAINED, found, needs, strict=True):
            if need:
                grads[place] = grad
        return tuple(grads)

    return backward


def scaled_by(lora_B: Tensor, live: Tensor) -> Tensor:
    """s B, rounded once: a scale that is no constant is none for a product to take along."""
    return lora_B.to(torch.promote_types(lora_B.dtype, torch.float32)) * live

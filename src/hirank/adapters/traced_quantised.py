"""DoRA over four bits as `torch.compile` sees it: one opaque op for a whole layer.

As `adapters/traced`: nothing about steps or caches enters a graph. How the weight is to be read is
more than tensors, so an op is given a handle, a tensor with a number by which it finds the layer
when it runs. The number is an input of the graph, not part of it: layers that are alike share one.

    adapted_quantised            the layer with one adapter; saves what the uncompiled layer saves
    adapted_quantised_backward   its gradients
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.dequantise import Packed, kind_of
from hirank.adapters.quantised import forward_parts
from hirank.adapters.quantised_norms import QuantisedNorms
from hirank.kernels._backend import gain_pass_for
from hirank.kernels._ops import register_op
from hirank.kernels.dora_linear import dora_linear_bwd_ref

__all__ = ["handle_for", "traced_quantised"]

_NUMBERS = itertools.count(1)
_LAYERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def handle_for(layer: Any) -> Tensor:
    """A new handle of a layer; a copy of the layer needs one of its own."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number)


def _found(handle: Tensor) -> Any:
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise RuntimeError(
            "A compiled layer over four bits is gone, and with it the weight that its backward "
            "pass reads: keep the model until after backward."
        )
    return layer


def _norm(layer: Any, packed: Packed, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """The norm that the layer keeps for the adapter with these weights; computed if it has none."""
    norms, A, B = QuantisedNorms(), lora_A, lora_B
    for name, module in layer.lora_A.items():
        own = module.weight, layer.lora_B[name].weight
        if (own[0].data_ptr(), own[1].data_ptr()) == (lora_A.data_ptr(), lora_B.data_ptr()):
            norms, (A, B) = layer.norms_of(name), own
            break
    return norms.norm(packed, A, B, scale)


def _packed(layer: Any, x: Tensor, training: bool) -> Packed:
    kind = kind_of(layer.base_layer)
    assert kind is not None
    return Packed(layer.base_layer, kind, x, training)


def _run(
    handle: Tensor,
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor,
    bias: Tensor | None,
    scale: float,
    training: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """y [..., N], and h [M, R] in training; x and bias are in the compute dtype."""
    layer = _found(handle)
    packed = _packed(layer, x, training)
    with torch.set_grad_enabled(training):  # the norms ask whether a backward pass will follow
        norm = _norm(layer, packed, lora_A, lora_B, scale)
        gain_pass = gain_pass_for(backend, x, lora_B.shape[0])
    with torch.no_grad():
        y, h = forward_parts(x, lora_A, lora_B, magnitude, bias, packed, norm, scale, gain_pass)
    return y, h if training else x.new_empty(0)


def _like(handle: Tensor, x: Tensor, lora_A: Tensor, lora_B: Tensor, *rest: Any) -> Any:
    y, training = x.new_empty(*x.shape[:-1], lora_B.shape[0]), rest[-2]
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return y, x.new_empty(rows, lora_A.shape[0]) if training else x.new_empty(0)


def _run_backward(
    handle: Tensor,
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor,
    bias: Tensor | None,
    scale: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    """Gradients of x, A, B, magnitude and bias; empty where none is needed."""
    layer = _found(handle)
    packed = _packed(layer, x, True)
    with torch.enable_grad():
        norm = _norm(layer, packed, lora_A, lora_B, scale)
        gain_pass = gain_pass_for(backend, x, lora_B.shape[0])
    with torch.no_grad():
        grads = dora_linear_bwd_ref(
            dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), h,
            None if y is None else y.reshape(-1, y.shape[-1]), packed.weight(), lora_A, lora_B,
            magnitude, norm, bias, scale, needs=needs, gain_pass=gain_pass,
        )  # fmt: skip
    dx, *others = grads
    found = (None if dx is None else dx.view(x.shape), *others)
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in found)


def _like_backward(
    handle: Tensor,
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor,
    bias: Tensor | None,
    scale: float,
    needs: Sequence[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    inputs = (x, lora_A, lora_B, magnitude, bias)
    return tuple(
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


_linear = register_op(
    "adapted_quantised(Tensor handle, Tensor x, Tensor lora_A, Tensor lora_B, Tensor magnitude,"
    " Tensor? bias, float scale, bool training, str backend) -> (Tensor, Tensor)",
    reference=_run,
    fused=_run,
    fake=_like,
)
_linear_backward = register_op(
    "adapted_quantised_backward(Tensor handle, Tensor dy, Tensor x, Tensor h, Tensor? y,"
    " Tensor lora_A, Tensor lora_B, Tensor magnitude, Tensor? bias, float scale, bool[] needs,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_run_backward,
    fused=_run_backward,
    fake=_like_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    handle, x, lora_A, lora_B, magnitude, bias, ctx.scale, _, ctx.backend = inputs
    y, h = output
    ctx.mark_non_differentiable(h)
    kept = y if ctx.needs_input_grad[4] else None
    ctx.save_for_backward(handle, x, h, kept, lora_A, lora_B, magnitude, bias)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    handle, *tensors = ctx.saved_tensors
    given, places = (tensors[0], *tensors[3:]), (1, 2, 3, 4, 5)
    needs = [bool(ctx.needs_input_grad[i]) for i in places]
    found = _linear_backward(handle, dy, *tensors, ctx.scale, needs, ctx.backend)
    grads = [
        grad if need and t is not None else None
        for grad, need, t in zip(found, needs, given, strict=True)
    ]
    return None, *grads, None, None, None


torch.library.register_autograd("hirank::adapted_quantised", _backward, setup_context=_save)


def traced_quantised(
    handle: Tensor,
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor,
    bias: Tensor | None,
    scale: float,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The layer with one DoRA adapter, computed in `dtype`: x [..., K] to [..., N] in x's."""
    narrow = None if bias is None else bias.to(dtype)
    training = torch.is_grad_enabled()
    y: Tensor = _linear(
        handle, x.to(dtype), lora_A, lora_B, magnitude, narrow, scale, training, backend
    )[0]
    return y.to(x.dtype)

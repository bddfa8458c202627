"""DoRA over a quantised base as `torch.compile` sees it: one opaque op for a whole layer.

As `adapters/traced`: nothing about steps or caches enters a graph. How the weight is to be read is
more than tensors, so the op is given the handle of its layer, see `adapters/traced_handles`.

    adapted_quantised   the layer with one adapter, see `adapters/traced_op`
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.dequantise import Kind, Packed, kind_of
from hirank.adapters.quantised import forward_parts
from hirank.adapters.quantised_norms import QuantisedNorms
from hirank.adapters.traced_handles import found_layer
from hirank.adapters.traced_op import Operands, called, register_layer
from hirank.kernels.dora_linear import dora_linear_bwd_ref

__all__ = ["norm_now", "packed_now", "traced_quantised"]


def packed_now(handle: Tensor, x: Tensor, training: bool) -> Packed:
    """The weight of the layer of a handle, for a call with x in the compute dtype."""
    base = found_layer(handle).base_layer
    packed = Packed(base, _kind(base), x, training)
    packed.dtype = x.dtype  # some kinds ask autocast, which may be off when a graph runs
    return packed


def _kind(base: Any) -> Kind:
    """Raises RuntimeError: something came between this layer and hirank since it was compiled."""
    kind = kind_of(base)
    obstacle = "it is of no kind that hirank knows" if kind is None else kind.obstacle(base)
    if kind is None or obstacle is not None:
        raise RuntimeError(
            f"A compiled layer over a {type(base).__name__} cannot run ({obstacle}): mend that, or "
            "compile the model again."
        )
    return kind


def norm_now(
    handle: Tensor, packed: Packed, lora_A: Tensor, lora_B: Tensor, scale: float, training: bool
) -> Tensor:
    """The norm that the layer keeps for the adapter with these weights; computed if it has none."""
    layer = found_layer(handle)
    norms, A, B = QuantisedNorms(), lora_A, lora_B
    for name, module in layer.lora_A.items():
        own = module.weight, layer.lora_B[name].weight
        if (own[0].data_ptr(), own[1].data_ptr()) == (lora_A.data_ptr(), lora_B.data_ptr()):
            norms, (A, B) = layer.norms_of(name), own
            break
    with torch.set_grad_enabled(training):  # it asks whether a backward pass will follow
        return norms.norm(packed, A, B, scale)


def _packed_and_norm(given: Operands, training: bool) -> tuple[Packed, Tensor | None]:
    x, handle, A, B, magnitude, _, scale, _ = given
    packed = packed_now(handle, x, training)
    if magnitude is None:
        return packed, None
    return packed, norm_now(handle, packed, A, B, scale, training)


def _run(given: Operands, training: bool) -> tuple[Tensor, Tensor]:
    x, _, A, B, magnitude, bias, scale, _ = given
    packed, norm = _packed_and_norm(given, training)
    operands = x, A, B, magnitude, bias, packed, norm, scale
    return forward_parts(*operands, given.gain_pass(training))


def _run_backward(
    given: Operands, dy: Tensor, h: Tensor, y: Tensor | None, needs: Sequence[bool]
) -> Sequence[Any]:
    x, _, A, B, magnitude, bias, scale, _ = given
    packed, norm = _packed_and_norm(given, True)
    operands = packed.weight(), A, B, magnitude, norm, bias, scale
    return dora_linear_bwd_ref(dy, x, h, y, *operands, needs, given.gain_pass(True))


_linear = register_layer("adapted_quantised", _run, _run_backward)


def traced_quantised(
    handle: Tensor,
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    bias: Tensor | None,
    scale: float | Tensor,
    dtype: torch.dtype,
    backend: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The layer with one adapter, computed in `dtype`: x [..., K] to [..., N] in `out_dtype`.

    `scale` as in `traced_linear`; `out_dtype` None: that of x.
    """
    narrow = None if bias is None else bias.to(dtype)
    tensors = x.to(dtype), handle, lora_A, lora_B, magnitude, narrow
    return called(_linear, tensors, scale, backend).to(out_dtype or x.dtype)

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
from hirank.adapters.traced_handles import found_layer, handle_for
from hirank.adapters.traced_op import Operands, called, register_layer
from hirank.kernels.dora_linear import dora_linear_bwd_ref

__all__ = ["handle_for", "traced_quantised"]


def _packed_and_norm(given: Operands, training: bool) -> tuple[Packed, Tensor | None]:
    layer = found_layer(given.base)
    packed = Packed(layer.base_layer, _kind(layer.base_layer), given.x, training)
    packed.dtype = given.x.dtype  # cast by then; autocast, which some kinds ask for, may be off
    if given.magnitude is None:
        return packed, None
    with torch.set_grad_enabled(training):  # the norms ask whether a backward pass will follow
        return packed, _norm(layer, packed, given.lora_A, given.lora_B, given.scale)


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


def _norm(layer: Any, packed: Packed, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """The norm that the layer keeps for the adapter with these weights; computed if it has none."""
    norms, A, B = QuantisedNorms(), lora_A, lora_B
    for name, module in layer.lora_A.items():
        own = module.weight, layer.lora_B[name].weight
        if (own[0].data_ptr(), own[1].data_ptr()) == (lora_A.data_ptr(), lora_B.data_ptr()):
            norms, (A, B) = layer.norms_of(name), own
            break
    return norms.norm(packed, A, B, scale)


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

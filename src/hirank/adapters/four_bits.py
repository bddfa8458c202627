"""bitsandbytes' Linear4bit: how its weight lies, and how it is read.

nf4 and fp4, scales nested or not, and the layout for CPUs that multiply bf16. Nothing is imported
before such a layer is there.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLOATS", "dtypes_4bit", "is_packed", "obstacle_4bit", "own_4bit", "sharded"]
__all__ += ["state_4bit", "stored_4bit", "unpacked_4bit", "weight_4bit"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")


def _copied(state: Any) -> Any:
    """As `copy.copy`, which takes a tenth of a millisecond."""
    made = object.__new__(type(state))
    vars(made).update(vars(state))
    return made


def state_4bit(layer: Any) -> Any:
    """How the weight is to be read; FSDP leaves that with the layer, not with its weight."""
    found = getattr(layer.weight, "quant_state", None)
    return layer.quant_state if found is None else found


def unpacked_4bit(layer: Any) -> tuple[Tensor, Any]:
    """Data and state of the weight in the order in which it was quantised.

    On a CPU that multiplies bf16, bitsandbytes lays a weight out anew at its first call in
    inference. Its scales are bf16 and no longer nested from then on.
    """
    state, data = _copied(state_4bit(layer)), layer.weight.data
    if is_packed(layer):
        state.original_nested = False
        absmax = state.absmax.T.reshape(-1).float()
        data, state = _functional()._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax = absmax
    return data, state


def is_packed(layer: Any) -> bool:
    """Whether the weight lies as a CPU's own kernels multiply it."""
    return bool(getattr(state_4bit(layer), "packing_format_for_cpu", False))


def weight_4bit(layer: Any, dtype: torch.dtype) -> Tensor:
    data, state = unpacked_4bit(layer)
    if state.absmax.device != data.device:
        state.to(data.device)
    state.dtype = dtype if dtype in FLOATS[1:] else torch.float32
    found: Tensor = _functional().dequantize_4bit(data, state)
    return found.to(dtype)


def dtypes_4bit(layer: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    if not layer.compute_type_is_set:
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    return x.dtype if layer.compute_dtype is None else layer.compute_dtype, x.dtype


def stored_4bit(layer: Any) -> list[Tensor]:
    state = state_4bit(layer)
    nested = getattr(state, "state2", None)
    return [layer.weight.data, state.absmax, *([] if nested is None else [nested.absmax])]


def own_4bit(layer: Any, x: Tensor, gradients: bool) -> bool:
    """Its kernels for few tokens read the four bits; for many it makes floats, as we do."""
    if x.is_cuda:
        return not gradients and x.numel() // max(x.shape[-1], 1) <= _FEW
    return is_packed(layer)


_FEW = 16  # tokens; where bitsandbytes' own choice lies differs by GPU, its table is not ours


def obstacle_4bit(layer: Any) -> str | None:
    if state_4bit(layer) is None:
        return "the base weight is not quantised yet: move the model to its device first"
    if layer.weight.is_meta:
        return None
    n, k = layer.out_features, layer.in_features
    held = 2 * layer.weight.numel() * layer.weight.element_size()
    if sharded(layer.weight) or held < n * k or tuple(state_4bit(layer).shape) != (n, k):
        return "the base weight is sharded or was quantised transposed"
    return None


def sharded(weight: Any) -> bool:
    """By FSDP2 or ZeRO-3, and not gathered."""
    return hasattr(weight, "placements") or hasattr(weight, "ds_id")

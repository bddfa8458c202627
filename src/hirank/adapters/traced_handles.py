"""How compiled code finds a layer again, and what may have changed there since it was compiled.

What a graph reads from a layer becomes part of it, and compiles anew when it changes. So an op is
given a handle, a tensor with a number by which it finds the layer when it runs. The number is an
input of the graph: layers that are alike share one.

A scale is read so, too, unless CUDA graphs may be recorded from the graph: they would go on with
the value of their recording. There it is a constant, and a new one compiles anew.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._ops import register_op

__all__ = ["found_layer", "handle_for", "live_scale"]

_NUMBERS = itertools.count(1)
_LAYERS: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def handle_for(layer: Any) -> Tensor:
    """A new handle of a layer; a copy of the layer needs one of its own."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def found_layer(handle: Tensor) -> Any:
    """The layer of a handle. Raises RuntimeError: it is gone."""
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise RuntimeError(
            "A compiled adapted layer is gone, and with it what its graph has to read: keep the "
            "model until after backward."
        )
    return layer


def _scale(handle: Tensor, name: str) -> Tensor:
    return torch.tensor(float(found_layer(handle).scaling[name]), dtype=torch.float64, device="cpu")


def _like_scale(handle: Tensor, name: str) -> Tensor:
    return handle.new_empty((), dtype=torch.float64)


_scale_now = register_op(
    "adapter_scale(Tensor handle, str name) -> Tensor",
    reference=_scale,
    fused=_scale,
    fake=_like_scale,
)


def live_scale(handle: Tensor, name: str, on_gpu: bool) -> Tensor | None:
    """The scale of an adapter as it is when the graph runs; None: it has to be a constant."""
    if _outlives_its_layer(on_gpu):
        return None
    found: Tensor = _scale_now(handle, name)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _outlives_its_layer(on_gpu: bool) -> bool:
    """Whether what is being made may run and not ask: exported, or recorded as a CUDA graph.

    Asked while compiling, of the compiler itself, which no public function does.
    """
    if torch.compiler.is_exporting():
        return True
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    return bool(output.export) or (on_gpu and _may_record(output.compiler_fn))


def _may_record(backend: Any) -> bool:
    """Any may, but inductor without CUDA graphs."""
    from torch._inductor import config

    chosen = getattr(backend, "config", None)
    if not isinstance(chosen, dict):
        return True
    return bool(chosen.get("triton.cudagraphs", config.triton.cudagraphs))

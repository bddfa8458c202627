"""How compiled code finds a layer again, and what may have changed there since it was compiled.

What a graph reads from a layer becomes part of it, and compiles anew when it changes. So an op is
given a handle, a tensor with a number by which it finds the layer when it runs. The number is an
input of the graph: layers that are alike share one.

A scale is read so, too, unless CUDA graphs may be recorded from the graph or the model is exported:
they would go on with the value they were made with. There it is a constant, and a new one compiles
anew. So it is where PEFT has made it a tensor.
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._ops import register_op

__all__ = ["found_layer", "handle_for", "live_scale", "reads_scales"]

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
    scale = found_layer(handle).scaling[name]
    if isinstance(scale, Tensor):
        raise RuntimeError(
            f"The scale of adapter {name!r} became a tensor after the model was compiled (PEFT's "
            "prepare_model_for_compiled_hotswap makes it one): compile the model again."
        )
    return torch.scalar_tensor(scale, dtype=torch.float64, device="cpu")


def _like_scale(handle: Tensor, name: str) -> Tensor:
    return handle.new_empty((), dtype=torch.float64)


_scale_now = register_op(
    "adapter_scale(Tensor handle, str name) -> Tensor",
    reference=_scale,
    fused=_scale,
    fake=_like_scale,
)


def live_scale(layer: Any, name: str) -> Tensor:
    """The scale of an adapter as it is when the graph runs: 0-d, fp64, on the CPU."""
    found: Tensor = _scale_now(layer._hirank_handle, name)
    return found


def reads_scales(layer: Any, on_gpu: bool) -> bool:
    """Whether a graph may read the scales of a layer when it runs; else they are constants."""
    return bool(_may_read(on_gpu))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_read(on_gpu: bool) -> bool:
    """Asked while compiling, of the compiler itself, which no public function does.

    The layer is taken from the frame above: as an argument it would be one that a graph is for.
    """
    if torch.compiler.is_exporting():
        return False
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output: Any = InstructionTranslator.current_tx().output
        layer = output.current_tx.symbolic_locals["layer"].value
        exported, backend = output.export, output.compiler_fn
    except (AttributeError, ImportError, KeyError):  # a PyTorch that keeps these elsewhere
        return False
    floats = layer._hirank_handle is not None and all(
        isinstance(scale, (int, float)) for scale in layer.scaling.values()
    )
    return floats and not exported and not (on_gpu and _may_record(backend))


def _may_record(backend: Any) -> bool:
    """Whether CUDA graphs may be recorded: by any backend, but inductor without them."""
    from torch._inductor import config

    chosen = getattr(backend, "config", None)
    if not isinstance(chosen, dict):
        return True
    return bool(chosen.get("triton.cudagraphs", config.triton.cudagraphs))

"""Linears whose weight is stored in a few bits, as adapters need to see them.

An adapter asks four things of such a layer: its weight as floats (for dx and for the norm of DoRA),
in which dtype it computes, whether its own forward does without those floats, and which tensors
hold the weight (to notice when it changes). Known are, by the name of their class, so that no
library is imported:

    bitsandbytes    Linear4bit (nf4 and fp4, nested or not), Linear8bitLt
    HQQ             HQQLinear
    torchao         nn.Linear over an integer weight-only tensor

and whatever was registered with `register_quantised_linear`.

Shapes     W [N, K]; `square_sum` [N].   N out features, K in features.
Memory     `weight` makes one [N, K] in the dtype asked for and nothing wider; bitsandbytes, asked
           for its own dtype, would go through fp32 where the model was loaded in fp32.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hirank.adapters.four_bits import (
    FLOATS,
    dtypes_4bit,
    is_packed,
    obstacle_4bit,
    own_4bit,
    sharded,
    state_4bit,
    stored_4bit,
    weight_4bit,
)
from hirank.errors import HirankError
from hirank.kernels._triton import direct, interpreting
from hirank.kernels.dora_norm import CHUNK_BYTES, row_square_sum
from hirank.kernels.nf4 import Nf4, dequantize_nf4, reads_nf4

__all__ = ["Kind", "Packed", "is_registered", "kind_of", "register_quantised_linear", "weight_of"]


class Kind(NamedTuple):
    """What is known about one class of quantised linear."""

    name: str
    weight: Callable[[Any, torch.dtype], Tensor]
    """The layer's weight [N, K] in that dtype, in memory of its own."""
    dtypes: Callable[[Any, Tensor], tuple[torch.dtype, torch.dtype]]
    """For an input: in which dtype the layer computes, and which one its output has."""
    stored: Callable[[Any], list[Tensor]]
    """The tensors that hold the weight."""
    square_sum: Callable[[Any], Tensor]
    """||W||^2 per row, whatever dtype a call computes in."""
    norm_dtype: Callable[[Any], torch.dtype | None]
    """In which dtype W makes that sum; None: not from floats."""
    multiplies_stored: Callable[[Any, Tensor, bool], bool]
    """Whether the layer's own forward is to give the output: without floats, or in its own way.
    The last argument says whether gradients are wanted."""
    obstacle: Callable[[Any], str | None]
    """Why this very layer cannot be computed by hirank."""


class Packed:
    """The weight of one layer for one call: made when first asked for, at most once.

    It lasts as long as the call; a backward pass makes its own.
    """

    __slots__ = ("_gradients", "_weight", "dtype", "kind", "layer", "out_dtype")

    def __init__(
        self, layer: nn.Module, kind: Kind, x: Tensor, gradients: bool | None = None
    ) -> None:
        """`gradients`: whether they are wanted; None: as PyTorch records them now."""
        self.layer, self.kind = layer, kind
        self.dtype, self.out_dtype = kind.dtypes(layer, x)
        self._gradients = torch.is_grad_enabled() if gradients is None else gradients
        self._weight: Tensor | None = None

    def weight(self) -> Tensor:
        """[N, K] in the compute dtype."""
        if self._weight is None:
            self._weight = self.fresh()
        return self._weight

    def fresh(self) -> Tensor:
        """The same, not kept."""
        return weight_of(self.kind, self.layer, self.dtype)

    def square_sum(self) -> Tensor:
        """||W||^2 per row, [N]."""
        if self.kind.norm_dtype(self.layer) == self.dtype:
            return row_square_sum(self.weight())
        with torch.no_grad():
            return self.kind.square_sum(self.layer)

    @property
    def bias(self) -> Tensor | None:
        found: Tensor | None = getattr(self.layer, "bias", None)
        return found

    def multiplies_stored(self, x: Tensor) -> bool:
        """Whether the layer's own forward gives the output for such an input."""
        return self.kind.multiplies_stored(self.layer, x, self._gradients)

    def output(self, x: Tensor) -> Tensor:
        """The frozen layer's output with bias, new memory: x [..., K] to [..., N], no gradient."""
        if self.multiplies_stored(x):
            y: Tensor = self.layer(x)
            return y.contiguous()
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return nn.functional.linear(x, self.weight(), bias)


def weight_of(kind: Kind, layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in that dtype, without gradient."""
    if not torch.is_grad_enabled():  # as inside a node of autograd
        return kind.weight(layer, dtype)
    with torch.no_grad():
        return kind.weight(layer, dtype)


_registered: dict[type, Kind] = {}


def is_registered(layer: nn.Module) -> bool:
    """Whether somebody registered the class of this layer, or one above it."""
    return any(cls in _registered for cls in type(layer).__mro__)


def kind_of(layer: nn.Module) -> Kind | None:
    """What is known about the class of a layer; None for all that is not quantised, or unknown."""
    cls = type(layer)
    if _registered:
        for above in cls.__mro__:
            if above in _registered:
                return _registered[above]
    if cls is nn.Linear:
        return _TORCHAO if _is_torchao(layer.weight) else None
    return _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")


def register_quantised_linear(
    layer_class: type[nn.Module], dequantize: Callable[[Any], Tensor]
) -> None:
    """Let hirank adapt a class of quantised linear that it, or PEFT's DoRA, does not know.

    The layer's own forward goes on computing the frozen output. `dequantize` is asked for the
    weight once for its norm and once a backward pass; with DoRA also once after every optimizer
    step. With `patch_peft` in force, PEFT then makes LoRA and DoRA adapters for such layers:

        hirank.register_quantised_linear(MyInt4Linear, lambda layer: layer.dequantize())
        with hirank.patch_peft():
            model = get_peft_model(base, LoraConfig(use_dora=True, ...))

    Such layers cannot be merged into.

    Args:
        layer_class: a module from x [..., K] to [..., N], frozen; its subclasses count as well. Its
            bias, if it has one, is called `bias`. Registering it again replaces `dequantize`.
        dequantize: from such a layer to the weight [N, K] that it multiplies by, any float dtype.

    Raises:
        HirankError: not a class of modules, or one that hirank computes without this.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
        raise HirankError(
            f"register_quantised_linear got {layer_class!r}: pass a class of torch modules."
        )
    if layer_class in (nn.Module, nn.Linear):
        raise HirankError(
            f"register_quantised_linear got {layer_class.__name__}, which stands for layers that "
            "are not quantised, too: pass the class of the quantised layer itself."
        )
    _registered[layer_class] = _of_own(layer_class.__name__, dequantize)


def _of_own(name: str, dequantize: Callable[[Any], Tensor]) -> Kind:
    def weight(layer: Any, dtype: torch.dtype) -> Tensor:
        found = dequantize(layer)
        if not isinstance(found, Tensor) or found.dim() != 2 or found.dtype not in FLOATS:
            raise HirankError(
                f"dequantize of {name} returned {_words(found)}: it must return the weight as a "
                "float tensor of shape [out features, in features]."
            )
        return found.detach().to(dtype)

    return Kind(
        name=name,
        weight=weight,
        dtypes=lambda layer, x: (x.dtype, x.dtype),
        stored=_all_but_bias,
        square_sum=lambda layer: row_square_sum(dequantize(layer).detach()),
        norm_dtype=lambda layer: None,
        multiplies_stored=lambda layer, x, gradients: True,
        obstacle=lambda layer: None,
    )


def _words(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    return f"{found.dtype} of shape {list(found.shape)}"


def _all_but_bias(layer: nn.Module) -> list[Tensor]:
    named = [*layer.named_parameters(), *layer.named_buffers()]
    return [tensor for name, tensor in named if name != "bias"]


# bitsandbytes, 8 bits


def _parts_8bit(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The integers [N, K] and the scale of each row [N]; once called, a layer has moved them."""
    weight, state = layer.weight, layer.state
    scale = state.SCB if state.SCB is not None else getattr(weight, "SCB", None)
    return weight.data if state.CB is None else state.CB, scale


def _scale_8bit(layer: Any) -> Tensor:
    integers, scale = _parts_8bit(layer)
    assert scale is not None  # else it would have been an obstacle
    return scale.to(integers.device).float().div(127).unsqueeze(1)


def _weight_8bit(layer: Any, dtype: torch.dtype) -> Tensor:
    integers, _ = _parts_8bit(layer)
    return integers.to(dtype).mul_(_scale_8bit(layer))  # exact, then rounded once


def _square_sum_8bit(layer: Any) -> Tensor:
    integers, _ = _parts_8bit(layer)
    height = max(1, CHUNK_BYTES // max(1, 4 * integers.shape[1]))
    sums = [block.float().square_().sum(1) for block in torch.split(integers, height)]
    return torch.cat(sums) * _scale_8bit(layer).squeeze(1).square()


def _obstacle_8bit(layer: Any) -> str | None:
    integers, scale = _parts_8bit(layer)
    if layer.state.has_fp16_weights:
        return "the base weight is quantised anew at every call (has_fp16_weights)"
    if integers.dtype != torch.int8:
        return "the base weight is not quantised yet: move the model to its device first"
    if sharded(layer.weight) or tuple(integers.shape) != (layer.out_features, layer.in_features):
        return "the base weight is sharded"
    if scale is None:
        return (
            "bitsandbytes lost the row scales (SCB) of the base weight, as a layer moved after its "
            "first call does: load the base model again"
        )
    return None


# HQQ


def _dtypes_hqq(layer: Any, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else layer.compute_dtype
    return dtype, dtype


def _stored_hqq(layer: Any) -> list[Tensor]:
    meta = (layer.meta.get(name) for name in ("scale", "zero", "scale_q", "zero_q", "zero_scale"))
    return [layer.W_q.data, *(part for part in meta if isinstance(part, Tensor))]


# torchao


def _is_torchao(weight: Any) -> bool:
    return type(weight).__module__.startswith("torchao.") and hasattr(weight, "dequantize")


def _inner(weight: Any) -> Iterator[Tensor]:
    names, _ = weight.__tensor_flatten__()
    for part in (getattr(weight, name) for name in names):
        yield from _inner(part) if hasattr(part, "__tensor_flatten__") else (part,)


def _weight_torchao(layer: Any, dtype: torch.dtype) -> Tensor:
    """torchao's own way goes through fp32 as a whole."""
    parts = vars(layer.weight)
    integers, scale = parts.get("qdata"), parts.get("scale")
    rows = isinstance(scale, Tensor) and tuple(scale.shape) == (layer.weight.shape[0], 1)
    if isinstance(integers, Tensor) and integers.dtype == torch.int8 and rows:
        zero = parts.get("zero_point")
        exact = integers.to(dtype) if zero is None else integers.to(dtype).sub_(zero)
        return exact.mul_(scale)  # rounded once
    found: Tensor = layer.weight.dequantize()
    return found.to(dtype)


def _obstacle_torchao(layer: Any) -> str | None:
    if getattr(layer.weight, "act_quant_kwargs", None) is not None:
        return "the base layer quantises activations, too"
    return "the base weight is trainable" if layer.weight.requires_grad else None


def _kind(**parts: Any) -> Kind:
    """A kind that computes in x's dtype and through floats, unless told otherwise."""
    weight, norm_dtype = parts["weight"], parts["norm_dtype"]
    usual: dict[str, Any] = {
        "dtypes": lambda layer, x: (x.dtype, x.dtype),
        "square_sum": lambda layer: row_square_sum(weight(layer, norm_dtype(layer))),
        "multiplies_stored": lambda layer, x, gradients: False,
        "obstacle": lambda layer: None,
    }
    return Kind(**(usual | parts))


def _weight_4bit(layer: Any, dtype: torch.dtype) -> Tensor:
    """In one launch where the kernel reads it; the bits are bitsandbytes' own."""
    state, shape = state_4bit(layer), (layer.out_features, layer.in_features)
    if dtype in FLOATS[1:] and state.quant_type == "nf4" and not is_packed(layer):
        given = _nf4(layer.weight.data, state)
        if (direct(given.data) or interpreting()) and reads_nf4(given, shape):
            return dequantize_nf4(given, shape, dtype)
    return weight_4bit(layer, dtype)


def _nf4(data: Tensor, state: Any) -> Nf4:
    two = getattr(state, "state2", None)  # gone where scales were laid out for a CPU
    nested = None if two is None else (two.absmax, two.code, state.offset, two.blocksize)
    return Nf4(data, state.absmax, state.code, state.blocksize, nested)


_4BIT = _kind(
    name="Linear4bit",
    weight=_weight_4bit,
    dtypes=dtypes_4bit,
    stored=stored_4bit,
    norm_dtype=lambda layer: layer.compute_dtype or state_4bit(layer).dtype,
    multiplies_stored=own_4bit,
    obstacle=obstacle_4bit,
)
_8BIT = _kind(
    name="Linear8bitLt",
    weight=_weight_8bit,
    stored=lambda layer: [part for part in _parts_8bit(layer) if part is not None],
    square_sum=_square_sum_8bit,
    norm_dtype=lambda layer: None,
    # integers are multiplied, except in training on a CPU, where it makes floats
    multiplies_stored=lambda layer, x, gradients: x.is_cuda or not layer.training,
    obstacle=_obstacle_8bit,
)
_HQQ = _kind(
    name="HQQLinear",
    weight=lambda layer, dtype: layer.dequantize().to(dtype),
    dtypes=_dtypes_hqq,
    stored=_stored_hqq,
    norm_dtype=lambda layer: layer.compute_dtype,
)
_TORCHAO = _kind(
    name="a torchao weight",
    weight=_weight_torchao,
    stored=lambda layer: list(_inner(layer.weight)),
    norm_dtype=lambda layer: layer.weight.dtype,
    obstacle=_obstacle_torchao,
)
_KNOWN = {
    "bitsandbytes.nn.modules.Linear4bit": _4BIT,
    "bitsandbytes.nn.modules.LinearNF4": _4BIT,
    "bitsandbytes.nn.modules.LinearFP4": _4BIT,
    "bitsandbytes.nn.modules.Linear8bitLt": _8BIT,
    "hqq.core.quantize.HQQLinear": _HQQ,
}

"""What an adapted convolution computes, in one, two or three dimensions.

    y_k = g_k (y_{k-1} - b + s_k B_k * (A_k * x)) + b        g_k = m_k / ||W + s_k B_k A_k||

One gain for each out channel. A is a convolution of the base's own geometry (stride, padding and
its mode, dilation) from all in channels to R; B is one of size 1, grouped as the base is. So the
layer is exactly a convolution with the kernel W + s B A, padded as the base pads.

Dropout d touches the adapter's branch only, as in `adapters/layers`:

    y = W * x + (g - 1) W * d(x) + g s B * A * d(x)    as PEFT does; a second base convolution
    y = g (W * x + s B * A * d(x))                     `single_gemm`: as LoRA does, then stretched

Shapes     x [I, C, ...]; W [N, C / G, *k]; A [R, C, *k]; B [N, R / G, 1 ...]; m, g, b [N];
           y [I, N, ...].   I images, C in and N out channels, k kernel, G groups, R rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.adapters.layers import Adapter
from hirank.adapters.owned_conv import (
    Moves,
    has_channels_last,
    owned_conv,
    planes,
    rows,
    to_images,
)
from hirank.adapters.viewed_norms import ViewedNormCache
from hirank.kernels._backend import check_backend
from hirank.kernels._triton import interpreting
from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.plane_compose import plane_compose

__all__ = ["Geometry", "conv_forward", "matrices"]

_CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


class Geometry(NamedTuple):
    """How the base convolution moves over its input."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    mode: str  # of padding: "zeros", "reflect", "replicate", "circular"
    margins: Sequence[int]  # as F.pad takes them, for every mode but "zeros"


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    adapters: Sequence[Adapter],
    backend: str = "auto",
) -> Tensor:
    """The layer with any number of adapters, with or without dropout, in the compute dtype.

    Args:
        x: [I, C, ...], or [C, ...] of one image.
        weight, bias: of the frozen convolution, [N, C / G, *k] and [N] or None.
        geometry: how it moves.
        adapters: in the order in which they stack; A [R, C, *k], B [N, R / G, 1 ...], and the
            magnitude of any shape with N entries.
        backend: as in `dora_compose`.

    Raises:
        ValueError: x and weight differ in dtype outside autocast.
    """
    if x.dim() == weight.dim() - 1:
        return conv_forward(x[None], weight, bias, geometry, adapters, backend)[0]
    dtype = _compute_dtype(x, weight)
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"a convolution got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, "
            "or run under autocast."
        )
    x = x.to(dtype)
    if len(adapters) == 1 and _ownable(x, weight, geometry, adapters[0]):
        return _owned(x, weight, bias, geometry, adapters[0], backend)
    given = _Given(x, _padded(x, geometry), weight, weight.to(dtype), _cast(bias, dtype), geometry)
    y = _convolved(given.padded, given.cast, given.bias, geometry)
    for adapter in adapters:
        y = _add_adapter(y, given, adapter, backend)
    return y


# asked now: not every compiler can trace the question
_AUTOCAST = [kind for kind in ("cuda", "cpu", "xpu") if torch.amp.is_autocast_available(kind)]


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What the base convolution would compute in."""
    kind = x.device.type
    if kind in _AUTOCAST and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def _ownable(x: Tensor, weight: Tensor, geometry: Geometry, adapter: Adapter) -> bool:
    """Whether one node of autograd is to stand for the whole layer.

    On a CPU its parts are fast; so are those of plain LoRA where a GPU waits for the host, as their
    gradients need no Python.
    """
    parts = adapter.magnitude is None and x.is_cuda and _waits_for_host(x, weight)
    return (
        (x.is_cuda or interpreting())
        and not parts
        and adapter.dropout is None
        and not isinstance(geometry.padding, str)
        and x.numel() > 0
        and not torch.compiler.is_compiling()
    )


def _waits_for_host(x: Tensor, weight: Tensor) -> bool:
    """Whether a GPU is done with all passes of a convolution before the host has launched them."""
    if torch.compiler.is_compiling():  # no guard on sizes
        return False
    return x.numel() // max(1, x.shape[1]) * weight.numel() < _BUSY


_BUSY = 2**36  # products; three times as many take an H200 a millisecond


def _owned(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    adapter: Adapter,
    backend: str,
) -> Tensor:
    A, B, magnitude, scale, *_ = adapter
    norm = _norm(adapter, weight, geometry.groups, x.dtype)
    zeros = geometry.mode == "zeros"
    margins = geometry.padding if zeros else [0] * len(geometry.stride)
    moves = Moves(geometry.stride, margins, geometry.dilation, geometry.groups)

    def formula(x: Tensor, A: Tensor, B: Tensor, m: Any, bias: Any, W: Tensor, norm: Any) -> Tensor:
        inner = geometry if zeros else geometry._replace(mode="zeros", padding=0)
        given = _Given(x, x, W, W.to(x.dtype), bias, inner)
        joined = _convolved(x, given.cast, bias, inner)
        hidden = _convolved(x, A.to(x.dtype), None, inner, groups=1)
        joined = _added(joined, hidden, B.to(x.dtype), scale, inner.groups)
        if m is None:
            return joined
        return _composed(None, joined, m.flatten(), norm, 1, given.bias, None, "torch")

    if backend != "auto":
        check_backend(backend, x.device)
    return owned_conv(
        _padded(x, geometry).to(x.dtype), weight, _cast(bias, x.dtype), A, B, magnitude, norm,
        scale=scale, moves=moves, plain=backend == "torch", formula=formula,
    )  # fmt: skip


def _norm(adapter: Adapter, weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor | None:
    """||W + s B A|| for each out channel; None with plain LoRA."""
    A, B, magnitude, scale, _, norms, *_ = adapter
    if magnitude is None or norms is None:
        return None
    if isinstance(norms, ViewedNormCache):
        return norms.norm(*norms.views(weight, A, B), scale, dtype)
    return norms.norm(*matrices(weight, A, B, groups), scale, dtype)


class _Given(NamedTuple):
    """The input and the frozen layer, in the compute dtype."""

    x: Tensor
    padded: Tensor
    weight: Tensor  # as it lies
    cast: Tensor
    bias: Tensor | None
    geometry: Geometry


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _padded(x: Tensor, geometry: Geometry) -> Tensor:
    """x with its margins, once for all that move over it; zeros are left to the convolution."""
    if geometry.mode == "zeros":
        return x
    return F.pad(x, list(geometry.margins), mode=geometry.mode)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, groups: int | None = None
) -> Tensor:
    padding = geometry.padding if geometry.mode == "zeros" else 0
    groups = geometry.groups if groups is None else groups
    convolve: Callable[..., Tensor] = _CONVOLVE[weight.dim()]
    return convolve(x, weight, bias, geometry.stride, padding, geometry.dilation, groups)


def _add_adapter(y: Tensor, given: _Given, adapter: Adapter, backend: str) -> Tensor:
    A, B, magnitude, scale, dropout, _, single_gemm = adapter
    geometry, dtype = given.geometry, y.dtype
    dropped = given.padded if dropout is None else _padded(dropout(given.x), geometry)
    hidden = _convolved(dropped, A.to(dtype), None, geometry, groups=1)
    norm = _norm(adapter, given.weight, geometry.groups, dtype)
    lean = _waits_for_host(given.x, given.weight)
    if magnitude is None or norm is None:
        return _added(y, hidden, B.to(dtype), scale, geometry.groups, lean)
    magnitude = magnitude.flatten()
    if dropout is not None and not single_gemm:
        frozen = _convolved(dropped, given.cast, None, geometry)
        lora = _pointwise(hidden, B.to(dtype), geometry.groups)
        return _composed(frozen, lora, magnitude, norm, scale, None, y, backend)
    joined = _added(y, hidden, B.to(dtype), scale, geometry.groups, lean)
    return _composed(None, joined, magnitude, norm, 1, given.bias, None, backend)


def _pointwise(hidden: Tensor, B: Tensor, groups: int) -> Tensor:
    convolve: Callable[..., Tensor] = _CONVOLVE[B.dim()]
    return convolve(hidden, B, groups=groups)


def _added(
    y: Tensor, hidden: Tensor, B: Tensor, scale: float, groups: int, lean: bool = False
) -> Tensor:
    """y + s B * hidden, on a GPU inside one GEMM where there are no groups.

    `lean`: by a convolution and a sum, whose gradients are fewer launches.

    Out of place: y is a view of the convolution's output, and autograd would copy its gradient.
    """
    if lean or groups > 1 or y.device.type == "cpu":
        return torch.add(y, _pointwise(hidden, B, groups), alpha=scale)
    factor = B.flatten(1)  # [N, R]
    if has_channels_last(y):
        return to_images(torch.addmm(rows(y), rows(hidden), factor.T, alpha=scale), y)
    factor = factor.expand(y.shape[0], *factor.shape)
    return torch.baddbmm(planes(y), factor, planes(hidden), alpha=scale).view(y.shape)


def _composed(
    base: Tensor | None,
    lora: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    scale: float,
    bias: Tensor | None,
    y: Tensor | None,
    backend: str,
) -> Tensor:
    """As `dora_compose`, whichever way the channels lie."""
    last = has_channels_last(lora)
    flat, compose = (rows, dora_compose) if last else (planes, plane_compose)
    out = compose(
        None if base is None else flat(base), flat(lora), magnitude, norm,
        scale=scale, bias=bias, y=None if y is None else flat(y), backend=backend,
    )  # fmt: skip
    return to_images(out, lora) if last else out.view(lora.shape)


def matrices(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B as the norm takes them: [N, C / G k], [R, C k], [N, R / G]. Views, where possible.

    Columns may come in any order, as long as it is the same for W and A.
    """
    with torch.enable_grad():  # a view of what is trained says so, also while nothing is recorded
        if groups == 1 and has_channels_last(weight):
            weight, lora_A = weight.movedim(1, -1), lora_A.movedim(1, -1)
        return weight.flatten(1), lora_A.flatten(1), lora_B.flatten(1)

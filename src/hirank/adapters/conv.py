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
from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_linear import compute_dtype
from hirank.kernels.plane_compose import plane_compose

__all__ = ["Geometry", "conv_forward", "matrices"]

_CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
    dtype = compute_dtype(x, weight)
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"a convolution got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, "
            "or run under autocast."
        )
    x = x.to(dtype)
    given = _Given(x, _padded(x, geometry), weight, weight.to(dtype), _cast(bias, dtype), geometry)
    y = _convolved(given.padded, given.cast, given.bias, geometry)
    for adapter in adapters:
        y = _add_adapter(y, given, adapter, backend)
    return y


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
    A, B, magnitude, scale, dropout, norms, single_gemm = adapter
    geometry, dtype = given.geometry, y.dtype
    dropped = given.padded if dropout is None else _padded(dropout(given.x), geometry)
    hidden = _convolved(dropped, A.to(dtype), None, geometry, groups=1)
    if magnitude is None or norms is None:
        return _added(y, hidden, B.to(dtype), scale, geometry.groups)
    magnitude = magnitude.flatten()
    norm = norms.norm(*matrices(given.weight, A, B, geometry.groups), scale, dtype)
    if dropout is not None and not single_gemm:
        frozen = _convolved(dropped, given.cast, None, geometry)
        lora = _pointwise(hidden, B.to(dtype), geometry.groups)
        return _composed(frozen, lora, magnitude, norm, scale, None, y, backend)
    joined = _added(y, hidden, B.to(dtype), scale, geometry.groups)
    return _composed(None, joined, magnitude, norm, 1, given.bias, None, backend)


def _pointwise(hidden: Tensor, B: Tensor, groups: int) -> Tensor:
    convolve: Callable[..., Tensor] = _CONVOLVE[B.dim()]
    return convolve(hidden, B, groups=groups)


def _added(y: Tensor, hidden: Tensor, B: Tensor, scale: float, groups: int) -> Tensor:
    """y + s B * hidden, inside one GEMM where there are no groups.

    Out of place: y is a view of the convolution's output, and autograd would copy its gradient.
    """
    if groups > 1:
        return torch.add(y, _pointwise(hidden, B, groups), alpha=scale)
    factor = B.flatten(1)  # [N, R]
    if _has_channels_last(y):
        rows = torch.addmm(_rows(y), _rows(hidden), factor.T, alpha=scale)
        return _images(rows, y)
    factor = factor.expand(y.shape[0], *factor.shape)
    return torch.baddbmm(_planes(y), factor, _planes(hidden), alpha=scale).view(y.shape)


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
    last = _has_channels_last(lora)
    flat, compose = (_rows, dora_compose) if last else (_planes, plane_compose)
    out = compose(
        None if base is None else flat(base), flat(lora), magnitude, norm,
        scale=scale, bias=bias, y=None if y is None else flat(y), backend=backend,
    )  # fmt: skip
    return _images(out, lora) if last else out.view(lora.shape)


def _has_channels_last(images: Tensor) -> bool:
    layout = _CHANNELS_LAST.get(images.dim())
    if layout is None or images.is_contiguous():
        return False
    return images.is_contiguous(memory_format=layout)


def _planes(images: Tensor) -> Tensor:
    """[I, N, ...] to [I, N, S]; a view where channels come before positions."""
    return images.reshape(*images.shape[:2], -1) if images.numel() else images.flatten(2)


def _rows(images: Tensor) -> Tensor:
    """[I, N, ...] to [I S, N]; a view where channels come last."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:
    """[I S, N] back to the shape of `like`."""
    return rows.view(like.shape[0], *like.shape[2:], rows.shape[1]).movedim(-1, 1)


def matrices(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B as the norm takes them: [N, C / G k], [R, C k], [N, R / G]. Views, where possible.

    Columns may come in any order, as long as it is the same for W and A.
    """
    with torch.enable_grad():  # a view of what is trained says so, also while nothing is recorded
        if groups == 1 and _has_channels_last(weight):
            weight, lora_A = weight.movedim(1, -1), lora_A.movedim(1, -1)
        return weight.flatten(1), lora_A.flatten(1), lora_B.flatten(1)

"""A and B as the products take them: cast to the compute dtype, both in one launch.

Two casts by PyTorch are two launches; at three calls a layer and step (forward, recomputation,
backward) that is host time worth saving. Keeping the casts instead would cost as much memory as
half the adapters. Layers whose order is known cast a few at a time: `cast_windows`.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._apart import lasting_bytes
from hirank.kernels._triton import Launcher, direct, jit, tl

__all__ = ["Cast", "brief_cast", "castable", "operands", "rides"]

_BLOCK = 4096
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, torch.nn.Parameter)


@jit
def _cast_kernel(
    out_A, out_B, lora_A, lora_B, a_count, b_count, a_blocks, a_factor, b_factor,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # the first a_blocks programs cast A, the rest B
    i = tl.program_id(0)
    if i < a_blocks:
        o_a = i * BLOCK + tl.arange(0, BLOCK)
        b_a = tl.load(lora_A + o_a, mask=o_a < a_count).to(tl.float32) * a_factor
        tl.store(out_A + o_a, b_a.to(out_A.dtype.element_ty), mask=o_a < a_count)
    else:
        o_b = (i - a_blocks) * BLOCK + tl.arange(0, BLOCK)
        b_b = tl.load(lora_B + o_b, mask=o_b < b_count).to(tl.float32) * b_factor
        tl.store(out_B + o_b, b_b.to(out_B.dtype.element_ty), mask=o_b < b_count)


_cast = Launcher(_cast_kernel)


def castable(lora_A: Tensor, lora_B: Tensor) -> bool:
    """Whether the kernel takes them: plain, on one GPU, one row after the other."""
    return (
        direct(lora_A)
        and type(lora_B) in _PLAIN
        and lora_A.get_device() == lora_B.get_device()
        and lora_A.dtype in _FLOATS
        and lora_B.dtype in _FLOATS
        and lora_A.is_contiguous()
        and lora_B.is_contiguous()
        and 0 < lora_A.numel() < 2**31
        and 0 < lora_B.numel() < 2**31
    )


def operands(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A [R, K] and B [N, R] in `dtype`; the tensors themselves where they are in it already."""
    if lora_A.dtype == dtype and lora_B.dtype == dtype:
        return lora_A, lora_B
    if not (dtype in _FLOATS and castable(lora_A, lora_B)):
        return lora_A.to(dtype), lora_B.to(dtype)
    A, B = torch.empty_like(lora_A, dtype=dtype), torch.empty_like(lora_B, dtype=dtype)
    _fill(_laid_out(A, B), lora_A, lora_B, 1.0, 1.0)
    return A, B


class Cast(NamedTuple):
    """A and B in the compute dtype."""

    A: Tensor  # [R, K], times `factor`
    A_t: Tensor  # [K, R], a view
    B: Tensor  # [N, R]
    factor: float = 1.0  # as `rides` allows


def rides(scale: float) -> bool:
    """Whether a scale can be multiplied into a cast without a rounding."""
    return math.frexp(scale)[0] in (0.5, -0.5) and 2.0**-32 < abs(scale) < 2.0**32


class _Place(NamedTuple):
    """Where a cast lies, and the launch that fills it."""

    cast: Cast
    grid: tuple[int, int, int]
    counts: tuple[int, int, int]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.places: dict[Any, _Place] = {}


_KEPT = _Kept()
_MOST = 256  # places that a thread keeps; models have a handful of shapes


def brief_cast(
    lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype, a_factor: float, b_factor: float
) -> Cast:
    """a_factor A and b_factor B in `dtype`, good until this thread casts again.

    They come to lie where the last ones did, as asking PyTorch for memory takes the host's time. A
    place belongs to one thread and one stream, whose launches follow each other. `castable` must
    have agreed.
    """
    device = lora_A.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    key = lora_A.shape, lora_B.shape, dtype, device, stream
    place = _KEPT.places.get(key)
    if place is None or (stream and torch.cuda.is_current_stream_capturing()):
        place = _new_place(key)
    _fill(place, lora_A, lora_B, a_factor, b_factor)
    return place.cast


def _new_place(key: tuple[Any, ...]) -> _Place:
    a_shape, b_shape, dtype, device, stream = key
    if (stream and torch.cuda.is_current_stream_capturing()) or len(_KEPT.places) >= _MOST:
        # a graph is played when nobody knows: what it writes is its own
        a, b = (torch.empty(s, dtype=dtype, device=f"cuda:{device}") for s in (a_shape, b_shape))
        return _laid_out(a, b)
    with torch.inference_mode(False), torch.no_grad():  # what is kept must serve training too
        a, b = (
            lasting_bytes(s.numel() * dtype.itemsize, device).view(dtype).view(s)
            for s in (a_shape, b_shape)
        )
        found = _KEPT.places[key] = _laid_out(a, b)
    return found


def _laid_out(A: Tensor, B: Tensor) -> _Place:
    a, b = A.numel(), B.numel()
    a_blocks = -(-a // _BLOCK)
    return _Place(Cast(A, A.t(), B), (a_blocks - (-b // _BLOCK), 1, 1), (a, b, a_blocks))


def _fill(place: _Place, lora_A: Tensor, lora_B: Tensor, a_factor: float, b_factor: float) -> None:
    cast, grid, counts = place
    _cast(
        grid, (cast.A, cast.B, lora_A, lora_B), (*counts, a_factor, b_factor),
        (_BLOCK,), num_warps=8,
    )  # fmt: skip

"""The products of an adapted linear with its small factors: h = s x A^T forward, tB = s t B back.

In bf16, adapters in fp32 are cast at every call, or lie in a window of casts. A scale that is a
power of two rides on a cast, where it rounds nothing, as a plain product takes the host less time
than one with a factor. Any other scale is a factor of the GEMM.

In fp16 a large s could make h overflow: a power of two of it goes on B instead.
"""

import math

import torch
from torch import Tensor

from hirank.kernels._operands import brief_cast, castable, operands, rides
from hirank.kernels.cast_windows import LayerCasts

__all__ = ["back_of", "hidden_of", "low_rank", "moved"]

_ORDINARY = 8  # up to here s takes 3 of the 15 bits above 1, and the multiplication of B is saved


def moved(dtype: torch.dtype, scale: float) -> float:
    """The power of two that goes on B."""
    if dtype != torch.float16 or not abs(scale) > _ORDINARY:
        return 1.0
    return 2.0 ** math.ceil(math.log2(abs(scale)))


def low_rank(x: Tensor, A: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """h [M, R] and B with h B^T = s x A^T B^T, where h does not overflow for s alone.

    A power of two moves from one to the other without a rounding.
    """
    power = moved(x.dtype, scale)
    h = _scaled_product(x, A.t(), scale / power)
    return h, B if power == 1 else B * power


def hidden_of(
    x: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, casts: LayerCasts | None = None
) -> tuple[Tensor, Tensor]:
    """As `low_rank`, for A and B as they lie; B is good until the next call of this thread."""
    cast = None if casts is None else casts.at(onward=True)
    if cast is not None:
        return _scaled_product(x, cast.A_t, scale / cast.factor), cast.B
    if not _brief(x, lora_A, lora_B):
        return low_rank(x, *operands(lora_A, lora_B, x.dtype), scale)
    factor = float(scale) if rides(scale) else 1.0  # one kernel serves 2 and 2.0
    cast = brief_cast(lora_A, lora_B, x.dtype, factor, 1.0)
    return _scaled_product(x, cast.A_t, scale / factor), cast.B


def back_of(
    t: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, casts: LayerCasts | None = None
) -> tuple[Tensor, Tensor, float]:
    """tB [M, R], A and f, with s t B A = tB A and s t B = f tB.

    A is good until the next call of this thread.
    """
    cast = None if casts is None else casts.at(onward=False)
    if cast is not None:
        return _scaled_product(t, cast.B, scale / cast.factor), cast.A, cast.factor
    if not _brief(t, lora_A, lora_B):
        A, B = operands(lora_A, lora_B, t.dtype)
        return _scaled_product(t, B, scale), A, 1.0
    factor = float(scale) if rides(scale) else 1.0  # one kernel serves 2 and 2.0
    cast = brief_cast(lora_A, lora_B, t.dtype, 1.0, factor)
    return _scaled_product(t, cast.B, scale / factor), cast.A, 1.0


def _brief(x: Tensor, lora_A: Tensor, lora_B: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and lora_A.dtype == torch.float32
        and lora_B.dtype == torch.float32
        and castable(lora_A, lora_B)
    )


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b, scaled inside the GEMM and rounded once."""
    if scale == 1:
        return torch.mm(a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    return out.addmm_(a, b, beta=0, alpha=scale)

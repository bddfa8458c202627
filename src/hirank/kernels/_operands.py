"""A and B as the products take them: cast to the compute dtype, both in one launch.

Two casts by PyTorch are two launches; at three calls a layer and step (forward, recomputation,
backward) that is host time worth saving. Keeping the casts instead would cost as much memory as
half the adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hirank.kernels._triton import Launcher, direct, jit, tl

__all__ = ["operands"]

_BLOCK = 4096
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _cast_kernel(out_A, out_B, lora_A, lora_B, a_count, b_count, a_blocks, BLOCK: tl.constexpr):
    # the first a_blocks programs cast A, the rest B
    i = tl.program_id(0)
    if i < a_blocks:
        o_a = i * BLOCK + tl.arange(0, BLOCK)
        b_a = tl.load(lora_A + o_a, mask=o_a < a_count)
        tl.store(out_A + o_a, b_a.to(out_A.dtype.element_ty), mask=o_a < a_count)
    else:
        o_b = (i - a_blocks) * BLOCK + tl.arange(0, BLOCK)
        b_b = tl.load(lora_B + o_b, mask=o_b < b_count)
        tl.store(out_B + o_b, b_b.to(out_B.dtype.element_ty), mask=o_b < b_count)


_cast = Launcher(_cast_kernel)


def operands(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A [R, K] and B [N, R] in `dtype`; the tensors themselves where they are in it already."""
    if lora_A.dtype == dtype and lora_B.dtype == dtype:
        return lora_A, lora_B
    if not _in_one_launch(lora_A, lora_B, dtype):
        return lora_A.to(dtype), lora_B.to(dtype)
    A, B = torch.empty_like(lora_A, dtype=dtype), torch.empty_like(lora_B, dtype=dtype)
    launch_cast(A, B, lora_A, lora_B)
    return A, B


def launch_cast(out_A: Tensor, out_B: Tensor, lora_A: Tensor, lora_B: Tensor) -> None:
    """out_A <- A, out_B <- B, all contiguous and not empty."""
    a, b = lora_A.numel(), lora_B.numel()
    a_blocks = -(-a // _BLOCK)
    grid = (a_blocks - (-b // _BLOCK), 1, 1)
    _cast(grid, (out_A, out_B, lora_A, lora_B), (a, b, a_blocks), (_BLOCK,), num_warps=8)


def _in_one_launch(lora_A: Tensor, lora_B: Tensor, dtype: torch.dtype) -> bool:
    return (
        direct(lora_A)
        and direct(lora_B)
        and lora_A.device == lora_B.device
        and {lora_A.dtype, lora_B.dtype, dtype} <= set(_FLOATS)
        and lora_A.is_contiguous()
        and lora_B.is_contiguous()
        and 0 < lora_A.numel() < 2**31
        and 0 < lora_B.numel() < 2**31
    )

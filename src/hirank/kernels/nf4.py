"""Four bits to floats in one launch: NormalFloat4 as bitsandbytes stores it.

    W[e] = code[q[e]] * a[e // size]        a = scales, or c[u] * t + o where scales are 8 bits, too

bitsandbytes does the same in three launches where scales are nested, and takes the host several
times as long. The products and the sum are rounded one by one as there, so the bits are the same.

Shapes     data [N K / 2, 1], two numbers a byte, the first in its high bits; scales [N K / size].
Precision  fp32, rounded once to the dtype asked for.
Cost       reads the four bits, writes W: the writing is all that counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels._triton import HAS_TRITON, Launcher, interpreting, jit, tl

__all__ = ["Nf4", "dequantize_nf4", "dequantize_nf4_ref", "reads_nf4"]


class Nf4(NamedTuple):
    """A weight in four bits."""

    data: Tensor  # uint8, [N K / 2, 1]
    scales: Tensor  # [N K / size]: fp32, or uint8 where they are nested
    code: Tensor  # [16] fp32
    size: int  # numbers that share a scale
    nested: tuple[Tensor, Tensor, Tensor, int] | None
    """t and c [256], fp32; o, one number; and how many scales share one of t."""


# What it means.


def dequantize_nf4_ref(given: Nf4, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """W [N, K] in `dtype`."""
    data, scales, code, size, nested = given
    if nested is not None:
        tops, table, offset, many = nested
        scales = table[scales.long()] * tops.repeat_interleave(many)[: len(scales)] + offset
    bits = data.flatten()
    numbers = torch.stack([bits >> 4, bits & 15], dim=1).long()
    return (code[numbers].view(-1, size) * scales[:, None]).view(shape).to(dtype)


# How the GPU does it.


@jit
def _kernel(
    out, data, scales, code, tops, table, offset, blocks,
    NESTED: tl.constexpr, MANY: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # one program reads BLOCKS blocks of HALF bytes
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < blocks
    if NESTED:
        b_u = tl.load(scales + o_b, mask=m_b, other=0).to(tl.int32)
        b_top = tl.load(tops + o_b // MANY, mask=m_b, other=0.0)
        b_scale = tl.load(table + b_u) * b_top
        b_scale = b_scale + tl.load(offset)
    else:
        b_scale = tl.load(scales + o_b, mask=m_b, other=0.0)
    o_byte = o_b[:, None] * HALF + tl.arange(0, HALF)[None, :]
    b_byte = tl.load(data + o_byte, mask=m_b[:, None], other=0).to(tl.int32)
    b_high = tl.load(code + (b_byte >> 4)) * b_scale[:, None]
    b_low = tl.load(code + (b_byte & 15)) * b_scale[:, None]
    b_both = tl.interleave(b_high, b_low).to(out.dtype.element_ty)
    o_out = o_b[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out + o_out, b_both, mask=m_b[:, None])


_launch = Launcher(_kernel)
_BYTES = 2048  # that a program reads


def reads_nf4(given: Nf4, shape: tuple[int, int]) -> bool:
    """Whether the kernel takes it: on a GPU (or interpreted), and laid out as it ought to be."""
    data, scales, code, size, nested = given
    entries = shape[0] * shape[1]
    return (
        ((HAS_TRITON and data.is_cuda) or interpreting())
        and data.dtype == torch.uint8
        and size & (size - 1) == 0
        and size <= 2 * _BYTES
        and entries > 0
        and data.numel() * 2 == entries == scales.numel() * size
        and scales.dtype == (torch.float32 if nested is None else torch.uint8)
        and code.shape == (16,)
        and data.is_contiguous()
        and scales.is_contiguous()
        and data.device == scales.device == code.device
        and (nested is None or nested[0].device == data.device)
    )


def dequantize_nf4(given: Nf4, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """W [N, K] in fp32, bf16 or fp16, new memory; `reads_nf4` must have agreed."""
    data, scales, code, size, nested = given
    out = torch.empty(shape, dtype=dtype, device=data.device)
    tops, table, offset, many = (code, code, code, 1) if nested is None else nested
    high = 2 * _BYTES // size
    _launch(
        (-(-scales.numel() // high), 1, 1),
        (out, data, scales, code, tops, table, offset),
        (scales.numel(),),
        (nested is not None, many, size // 2, high),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out

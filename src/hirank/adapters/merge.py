"""Fold adapters into a base weight: accumulated in fp32, rounded once.

    W_k = g_k (W_{k-1} + s_k B_k A_k)        g_k = m_k / ||W_0 + s_k B_k A_k||, LoRA: g = 1

The same recurrence as the forward's, so merged equals unmerged up to that one rounding. Works a
block of rows at a time: the extra memory is one block of fp32, whatever the layer's size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels.dora_norm import CHUNK_BYTES, dora_gain, dora_norm

__all__ = ["Increment", "merge_into"]


class Increment(NamedTuple):
    """One adapter to fold in."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    scale: float


def _gain(weight: Tensor, part: Increment, acc: torch.dtype, chunk_bytes: int) -> Tensor | None:
    if part.magnitude is None:
        return None
    A, B = part.lora_A.to(acc), part.lora_B.to(acc)
    norm = dora_norm(weight, A, B, scale=part.scale, chunk_bytes=chunk_bytes)
    return dora_gain(part.magnitude.detach(), norm)


@torch.no_grad()
def merge_into(
    out: Tensor, weight: Tensor, parts: Sequence[Increment], *, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Write the merged weight of `weight` [N, K] and `parts`, applied in order, into `out`.

    `out` may be `weight` itself, or have another float dtype. All matrix products run in fp32
    (fp64 for fp64 weights). Blocks of rows take at most `chunk_bytes` together, at least one row.

    Returns:
        `out`.
    """
    acc = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(weight.device.type, enabled=False):
        gains = [_gain(weight, part, acc, chunk_bytes) for part in parts]  # before any overwrite
        height = max(1, chunk_bytes // (2 * weight.shape[1] * acc.itemsize))
        for start in range(0, weight.shape[0], height):
            rows = slice(start, start + height)
            block = weight[rows].to(acc, copy=True)
            for part, gain in zip(parts, gains, strict=True):
                block.addmm_(part.lora_B[rows].to(acc), part.lora_A.to(acc), alpha=part.scale)
                if gain is not None:
                    block.mul_(gain[rows, None])
            out[rows] = block
    return out

"""Fold adapters into a base weight: accumulated in fp32, rounded once.

    W_k = g_k (W_{k-1} + s_k B_k A_k)        g_k = m_k / ||W_0 + s_k B_k A_k||, LoRA: g = 1

The same recurrence as the forward's, so merged equals unmerged up to that one rounding. Works a
block of rows at a time: the extra memory is one block of fp32, whatever the layer's size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels.dora_norm import CHUNK_BYTES, dora_gain

__all__ = ["Block", "Increment", "merge_into", "merged_blocks"]

BUFFERS = 3  # of a block's size that are held at once
CACHE_BYTES = 6 * 2**20


class Increment(NamedTuple):
    """One adapter to fold in."""

    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]; None: plain LoRA
    scale: float


class Block(NamedTuple):
    """Some rows of a weight and what they become, both as wide as it is accumulated."""

    rows: slice
    before: Tensor  # [rows, K]
    after: Tensor  # [rows, K]
    dtype: torch.dtype  # of the weight that `before` was read from


@torch.no_grad()
def merged_blocks(
    weight: Tensor, parts: Sequence[Increment], *, chunk_bytes: int | None = None
) -> Iterator[Block]:
    """The rows of `weight` [N, K] with `parts` applied in order, block by block, unrounded.

    All matrix products run in fp32 (fp64 for fp64 weights). A block and what it is computed in take
    at most `chunk_bytes` (by default what a CPU's cache holds, or what a GPU is busy with), at
    least one row. `weight` may be overwritten behind the block that was yielded.
    """
    if chunk_bytes is None:
        chunk_bytes = CACHE_BYTES if weight.device.type == "cpu" else CHUNK_BYTES
    acc = torch.float64 if weight.dtype == torch.float64 else torch.float32
    height = max(1, chunk_bytes // (BUFFERS * max(1, weight.shape[1]) * acc.itemsize))
    factors = [(part.lora_A.to(acc), part.lora_B.to(acc)) for part in parts]
    for start in range(0, weight.shape[0], height):
        rows = slice(start, start + height)
        before = weight[rows].to(acc, copy=True)
        block = Block(rows, before, before.clone(), weight.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            for number, part in enumerate(parts):
                _fold(block, factors[number], part, first=number == 0)
        yield block


def _fold(block: Block, factors: tuple[Tensor, Tensor], part: Increment, first: bool) -> None:
    """One adapter into `after`. The rows are whole, so their norm is taken from themselves."""
    A, B = factors[0], factors[1][block.rows]
    block.after.addmm_(B, A, alpha=part.scale)
    if part.magnitude is None:
        return
    alone = block.after if first else torch.addmm(block.before, B, A, alpha=part.scale)
    norm = torch.linalg.vector_norm(alone, dim=1)
    gain = dora_gain(part.magnitude.detach()[block.rows], norm)
    block.after.mul_(gain[:, None])


def merge_into(
    out: Tensor, weight: Tensor, parts: Sequence[Increment], *, chunk_bytes: int | None = None
) -> Tensor:
    """Write the merged weight of `weight` [N, K] and `parts`, applied in order, into `out`.

    `out` may be `weight` itself, or have another float dtype; each number is rounded to it once.
    `chunk_bytes` as of `merged_blocks`.

    Returns:
        `out`.
    """
    with torch.no_grad():
        for block in merged_blocks(weight, parts, chunk_bytes=chunk_bytes):
            out[block.rows] = block.after
    return out

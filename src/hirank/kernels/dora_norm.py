"""Row norm of the adapted weight, without forming B A.

    norm[n] = || W[n] + s B[n] A ||        g = m / norm        (g = 1 where norm = 0)

Expanding the square gives three sums per row, none of them larger than [N, R]:

    norm^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>

The first does not change while the base is frozen: compute it once with `row_square_sum` and
pass it back as `base_sq`. Where W is close to -s B A the three terms cancel, and where the rows of
A are alike the ranks of B A cancel within the third. Against both, the sum is compared with what
it would be if W and the ranks were orthogonal,

    ||W||^2 + s^2 sum_r B[n, r]^2 ||A[r]||^2

and rows below `CANCELLED` of it are computed again from W + s B A itself, a few at a time in fp64.

That is the reference, and the way on a CPU. A GPU goes by the definition instead, tile by tile
over W + s B A: the same operations, nothing cancels, and W has to be read only once. The kernels
are those of `norm_table`, which takes many layers at once.

Shapes     weight [N, K]; lora_A [R, K]; lora_B [N, R]; norm, base_sq, magnitude [N].
           N out features, K in features, R rank.
Precision  sums in fp32 (fp64 if the weight is fp64), outside autocast, whatever the inputs are.
           Half weights are widened a block of columns at a time, never as a whole.
Memory     [N, R] a few times, plus blocks within `chunk_bytes`; on a GPU O(N).
Paper      DoRA, arXiv 2402.09353, eq. 5; factored norm: arXiv 2603.22276.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.norm_table import NormEntry, NormTable

__all__ = ["CANCELLED", "CHUNK_BYTES", "dora_gain", "dora_norm", "dora_norm_ref", "row_norm"]
__all__ += ["row_square_sum"]

CHUNK_BYTES = 256 * 2**20
"""Default budget in bytes for the blocks of one norm."""

CANCELLED = 1 / 16
"""What is left of a sum that has lost 4 bits to cancellation."""

_ALIGN = 64  # columns; keeps every block on whole cache lines and tensor-core tiles


def _accumulator(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _column_blocks(weight: Tensor, rank: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices of K. Widened blocks stay within the budget, and below a full-size copy of W."""
    rows, columns = weight.shape
    acc = _accumulator(weight)
    if weight.dtype == acc:
        yield slice(0, columns)  # nothing to widen: a view is free
        return
    fitting = chunk_bytes // max(1, 2 * (rows + rank) * acc.itemsize)  # the rest is for [N, R]
    width = max(_ALIGN, min(fitting, columns // 2) // _ALIGN * _ALIGN)
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def _row_blocks(rows: int, columns: int, itemsize: int, chunk_bytes: int) -> Iterator[slice]:
    height = max(1, chunk_bytes // max(1, 2 * columns * itemsize))
    for start in range(0, rows, height):
        yield slice(start, min(start + height, rows))


def _square_sum(block: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(block, dim=1)
    return norm.square_()


@torch.no_grad()
def row_square_sum(weight: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """||W[n]||^2 for every row: [N] fp32 (fp64 for an fp64 weight [N, K])."""
    acc = _accumulator(weight)
    if fits_triton(as_it_lies(weight)):
        return _without_adapter(weight, root=False)
    total = torch.zeros(weight.shape[0], dtype=acc, device=weight.device)
    for columns in _column_blocks(weight, 0, chunk_bytes):
        total += _square_sum(weight[:, columns].to(acc))
    return total


@torch.no_grad()
def row_norm(weight: Tensor) -> Tensor:
    """||W[n]|| for every row, [N]: to the bit what `dora_norm` gives for B = 0."""
    if fits_triton(as_it_lies(weight)):
        return _without_adapter(weight, root=True)
    return row_square_sum(weight).sqrt_()


def _without_adapter(weight: Tensor, *, root: bool) -> Tensor:
    out = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    none = weight.new_empty(0, weight.shape[1]), weight.new_empty(weight.shape[0], 0)
    _launch(NormEntry(weight, *none, 0.0, out), root=root)
    return out


def _dense_rows(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, rows: Tensor, chunk_bytes: int
) -> Tensor:
    """||W + s B A||^2 of the chosen rows by the definition, in fp64: sums in B A cancel, too."""
    A = lora_A.double()  # [R, K]
    out = torch.empty(rows.numel(), dtype=_accumulator(weight), device=weight.device)
    for part in _row_blocks(rows.numel(), weight.shape[1], A.itemsize, chunk_bytes):
        chosen = rows[part]
        out[part] = _square_sum(
            torch.addmm(weight[chosen].double(), lora_B[chosen].double(), A, alpha=scale)
        ).to(out.dtype)
    return out


@torch.no_grad()
def dora_norm_ref(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scale: float,
    base_sq: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """The factored norm in plain PyTorch: [N], fp32 (fp64 for fp64 weights)."""
    if base_sq is None:
        base_sq = row_square_sum(weight, chunk_bytes=chunk_bytes)
    if scale == 0 or lora_A.shape[0] == 0:
        return base_sq.sqrt()
    with torch.autocast(weight.device.type, enabled=False):
        acc = _accumulator(weight)
        B = lora_B.to(acc)  # [N, R]
        U = torch.zeros_like(B)  # W A^T [N, R]
        G = torch.zeros(B.shape[1], B.shape[1], dtype=acc, device=B.device)  # A A^T [R, R]
        for columns in _column_blocks(weight, lora_A.shape[0], chunk_bytes):
            A_c = lora_A[:, columns].to(acc)
            U.addmm_(weight[:, columns].to(acc), A_c.T)
            G.addmm_(A_c, A_c.T)
        cross = U.mul_(B).sum(1)
        gram = torch.mm(B, G, out=U).mul_(B).sum(1)
        squared = base_sq + 2 * scale * cross + scale * scale * gram
        apart = torch.mul(B, B, out=U) @ G.diagonal()  # were the ranks orthogonal
        lost = squared < CANCELLED * (base_sq + scale * scale * apart)
        rows = lost.nonzero().squeeze(1)
        if rows.numel():
            squared[rows] = _dense_rows(weight, lora_A, lora_B, scale, rows, chunk_bytes)
        return squared.clamp_(min=0).sqrt_()


# How the GPU does it: as a table of one layer, kept for the next call on the same memory.

_KEPT = 512  # tables; each is a few kilobytes
_TABLES: dict[tuple[Any, ...], NormTable] = {}


def _launch(entry: NormEntry, *, root: bool) -> None:
    tensors = entry.weight, entry.lora_A, entry.lora_B, entry.norm
    key = (
        root, entry.scale, entry.weight.device, entry.weight.dtype, entry.lora_A.dtype,
        entry.weight.is_contiguous(), *(t.shape for t in tensors), *(t.data_ptr() for t in tensors),
    )  # fmt: skip
    table = _TABLES.get(key)
    if table is None:
        if len(_TABLES) >= _KEPT:
            _TABLES.clear()
        table = _TABLES[key] = NormTable([entry], entry.lora_A.dtype, root=root)
    table.compute()


def fits_triton(*tensors: Tensor) -> bool:
    """Whether the kernels take these: on a GPU (or interpreted), fp32 or half, contiguous."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return all(
        ((t.is_cuda and HAS_TRITON) or interpreting()) and t.dtype in floats and t.is_contiguous()
        for t in tensors
    )


def as_it_lies(weight: Tensor) -> Tensor:
    """A weight of an embedding, which comes as a transpose, turned back; else the weight."""
    return weight if weight.is_contiguous() else weight.t()


def dora_gain(magnitude: Tensor, norm: Tensor) -> Tensor:
    """g = m / norm in the norm's dtype, [N]; differentiable in m, constant in the norm.

    A row of norm zero has no direction for m to stretch: g = 1 there, so that the row behaves as
    LoRA, stays finite and can leave zero (m / 0 would be NaN, and g = 0 would pin it for good).
    """
    alive = norm > 0
    return torch.where(alive, magnitude.to(norm.dtype) / torch.where(alive, norm, 1), 1)


def dora_norm(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    *,
    scale: float,
    base_sq: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    out: Tensor | None = None,
) -> Tensor:
    """Row norms of W + s B A, without gradient and without forming B A.

    Args:
        weight: [N, K], any float dtype.
        lora_A, lora_B: [R, K] and [N, R], as the forward will use them (cast to its dtype first
            if it casts them).
        scale: s, a plain number.
        base_sq: [N] from `row_square_sum`, if the caller kept it; a GPU does not need it.
        chunk_bytes: budget for widened blocks, in bytes; a block is at least 64 columns wide.
        out: [N] to write into instead of a new tensor.

    Returns:
        [N], fp32, or fp64 for an fp64 weight.

    Raises:
        ValueError: shapes do not fit together.
    """
    (n, k), (r, k_a) = weight.shape, lora_A.shape
    if k_a != k or tuple(lora_B.shape) != (n, r):
        raise ValueError(
            f"dora_norm got weight {n}x{k} with A {r}x{k_a} and B {tuple(lora_B.shape)}: "
            f"A must be [R, {k}] and B [{n}, R] of one rank R."
        )
    if not _fused_here(weight, lora_A, lora_B, out):
        norm = dora_norm_ref(weight, lora_A, lora_B, scale, base_sq, chunk_bytes)
        return norm if out is None else out.copy_(norm)
    with torch.no_grad():
        norm = torch.empty(n, dtype=torch.float32, device=weight.device) if out is None else out
        _launch(NormEntry(weight, lora_A, lora_B, scale, norm), root=True)
        return norm


def _fused_here(weight: Tensor, lora_A: Tensor, lora_B: Tensor, out: Tensor | None) -> bool:
    return (
        fits_triton(as_it_lies(weight), lora_A, lora_B)
        and weight.dtype == lora_A.dtype == lora_B.dtype
        and weight.device == lora_A.device == lora_B.device
        and (out is None or (fits_triton(out) and out.dtype == torch.float32))
    )

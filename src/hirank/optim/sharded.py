"""Parameters whose rows are spread over processes: FSDP2's DTensors.

A process holds rows `rows(p)` of an [m, n] weight and of its gradient. Projections are sums over
rows, so P'G is a sum of what each process finds in its own rows, r x n numbers instead of m x n; GQ
is put together from rows. R, the moments and the basis are then the same everywhere. The gradient
is gathered only where it is needed whole: for a refresh, and for Fira and APOLLO.

For an ordinary tensor every function here is the identity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.errors import HirankError
from hirank.optim.bases import Basis, Layout

__all__ = ["Norm", "everywhere", "is_sharded", "local", "norm", "project", "rows", "spread"]
__all__ += ["total", "total_over", "whole"]


class Norm(NamedTuple):
    """Of what is in this process, 0-dim and in fp32 at least, and how the rest is spread."""

    value: Tensor
    spread: Any


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor (told without importing it, which takes a second)."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def spread(tensor: Any) -> Any:
    """Equal for tensors that are spread alike over the same processes; None for others."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def local(tensor: Any) -> Tensor:
    """The part in this process; writing into it changes the tensor."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """All of it, gathered from all processes."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def rows(p: Any) -> slice:
    """The rows of p that are in this process."""
    if not is_sharded(p):
        return slice(0, p.shape[0])
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if tuple(shape[1:]) != tuple(p.shape[1:]):
        raise HirankError(
            f"A parameter of shape {tuple(p.shape)} is sharded as {p.placements}; shard its first "
            "axis, as fully_shard does by default."
        )
    return slice(offset[0], offset[0] + shape[0])


def norm(tensor: Any) -> Norm:
    """Of a gradient or of R; one pass, nothing of its size is made."""
    mine = local(tensor)
    wide = torch.promote_types(mine.dtype, torch.float32)
    return Norm(torch.linalg.vector_norm(mine, dtype=wide), spread(tensor))


def total(part: Tensor, p: Any) -> Tensor:
    """The sum over the processes that share p's rows."""
    return total_over(part, spread(p))


def total_over(part: Tensor, spread: Any) -> Tensor:
    """The same for tensors that are spread so."""
    if spread is None:
        return part
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh, placements = spread
    kinds = [Partial() if isinstance(kind, Shard) else kind for kind in placements]
    summed: Tensor = DTensor.from_local(part, mesh, kinds, run_check=False).full_tensor()
    return summed


def everywhere(ok: Tensor, p: Any) -> Tensor:
    """Whether `ok` (0-dim bool) holds in every process that shares p's rows."""
    return total((~ok).float(), p) == 0 if is_sharded(p) else ok


def project(basis: Basis, grad: Tensor, where: Layout) -> Tensor:
    """R of a gradient, the same in every process."""
    if not is_sharded(grad):
        return basis.project(grad.reshape(where.m, where.n))
    mine, part = rows(grad), local(grad).reshape(-1, where.n)
    left = None if basis.left is None else basis.left[mine]
    reduced = Basis(left, basis.right).project(part)
    if left is None:
        placed = reduced.new_zeros(where.reduced)
        placed[mine] = reduced
        reduced = placed
    return total(reduced, grad)

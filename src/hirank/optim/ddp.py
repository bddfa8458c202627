"""DDP that sends projected gradients: a communication hook.

    optimizer.project_reduction(ddp_model)

Of a parameter whose basis is not about to be replaced, and whose step needs the projection only,
the hook sends R instead of the gradient: r n numbers instead of m n. What DDP hands back is R's
mean projected back, the part of the mean gradient that the optimiser sees: its projection is that
mean again, so steps, clipping and `no_sync` accumulation work as usual. Clipping then sees the
projected norm. DDP's own buckets stay as large as the gradients; `gradient_as_bucket_view=True`
makes them the gradients.

A basis that was rounded (bf16, int4) or is Gaussian is not orthonormal; going back through its
pseudo-inverse makes the projection of what comes back exact all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hirank.optim import bases, rules
from hirank.optim.bases import Basis

if TYPE_CHECKING:
    from hirank.optim.optimizer import LowRankAdamW

__all__ = ["basis_to_send", "projected_all_reduce", "raised"]


def projected_all_reduce(optimizer: LowRankAdamW, bucket: Any) -> torch.futures.Future[Tensor]:
    """The mean over processes of a `GradBucket`'s gradients; for `register_comm_hook`."""
    grads: list[Tensor] = bucket.gradients()
    pairs = zip(bucket.parameters(), grads, strict=True)
    known = [basis_to_send(optimizer, p, grad) for p, grad in pairs]
    parts = [
        grad if basis is None else basis.project(grad.reshape(grad.shape[0], -1))
        for grad, basis in zip(grads, known, strict=True)
    ]
    sent = torch.cat([part.reshape(-1).float() for part in parts]).div_(dist.get_world_size())
    work: Any = dist.all_reduce(sent, async_op=True)

    def restore(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        pieces = torch.split(future.value()[0], [part.numel() for part in parts])
        for grad, part, basis, piece in zip(grads, parts, known, pieces, strict=True):
            mean = piece.view(part.shape)
            grad.copy_((mean if basis is None else raised(basis, mean)).view(grad.shape))
        whole: Tensor = bucket.buffer()
        return whole

    made: torch.futures.Future[Tensor] = work.get_future().then(restore)
    return made


def basis_to_send(optimizer: LowRankAdamW, p: Tensor, grad: Tensor) -> Basis | None:
    """The basis that p's next step will project with; None if it needs the gradient itself."""
    hyper, state = optimizer.hyper_of(p), optimizer.state[p]
    if not rules.is_projected(p, hyper) or rules.needs_dense(hyper) or bases.due(state):
        return None
    shape = bases.matrix_shape(p.shape)
    assert shape is not None
    return bases.load(state, bases.layout(shape, hyper), hyper, grad)


def raised(basis: Basis, reduced: Tensor) -> Tensor:
    """The [m, n] gradient within the basis's span whose projection is R."""
    if basis.left is not None:
        left = basis.left.to(reduced.dtype)
        reduced = left @ torch.linalg.solve(left.T @ left, reduced)
    if basis.right is not None:
        right = basis.right.to(reduced.dtype)
        reduced = torch.linalg.solve(right.T @ right, reduced, left=False) @ right.T
    return reduced

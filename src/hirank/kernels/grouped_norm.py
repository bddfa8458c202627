"""The norm of each out channel of a grouped convolution with an adapter.

The base sees only the in channels of its group; the adapter's first factor sees them all, and its
second is grouped. So the effective kernel is dense: out channel n of group j has

    norm^2 = || W[n] + s B[n] A[j, own] ||^2 + s^2 || B[n] A[j, others] ||^2

where A[j] are the ranks of group j, split into the columns of its own in channels and the rest.
Both terms are squares, so nothing cancels between them; within them the ranks may, and W. Against
that the sum is compared as in `dora_norm`, and such rows go by the definition in fp64.

Shapes     weight [N, K]; lora_A [R, G K]; lora_B [N, R / G]; norm [N].
           N out channels, K in channels of a group times kernel positions (in that order),
           R rank, G groups. N and R are multiples of G.
Precision  fp32 (fp64 if the weight is fp64), outside autocast, whatever the inputs are.
Memory     A once more, and blocks of groups within `chunk_bytes`, at least one group.
"""

import torch
from torch import Tensor

from hirank.kernels._ops import register_op
from hirank.kernels.dora_norm import CANCELLED, CHUNK_BYTES

__all__ = ["grouped_norm", "grouped_norm_op"]


@torch.no_grad()
def grouped_norm(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    *,
    scale: float,
    groups: int,
    chunk_bytes: int = CHUNK_BYTES,
    look: bool = True,
) -> Tensor:
    """Norms of the effective kernel, [N] fp32 (fp64 for an fp64 weight).

    Args:
        weight: [N, K], any float dtype.
        lora_A, lora_B: [R, G K] and [N, R / G], as the forward will use them.
        scale: s, a plain number.
        groups: G.
        chunk_bytes: budget for widened blocks, in bytes.
        look: at which rows have cancelled. False, while a CUDA graph is captured and nothing can be
            looked at: all rows by the definition.

    Raises:
        ValueError: shapes do not fit together.
    """
    (n, k), (r, k_a) = weight.shape, lora_A.shape
    if n % groups or r % groups or k_a != groups * k or tuple(lora_B.shape) != (n, r // groups):
        raise ValueError(
            f"grouped_norm got weight {n}x{k} in {groups} groups with A {r}x{k_a} and "
            f"B {tuple(lora_B.shape)}: A must be [R, {groups * k}] and B [{n}, R / {groups}]."
        )
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(weight.device.type, enabled=False):
        A = lora_A.to(wide).reshape(groups, r // groups, groups, k)
        B = lora_B.to(wide).reshape(groups, n // groups, r // groups)
        own = A.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [G, R/G, K]
        W = weight.reshape(groups, n // groups, k)
        squared = _own_square_sum(W, own, B, scale, chunk_bytes)
        squared += _others_square_sum(A, B).mul_(scale * scale)
        if look:
            lost = (squared < CANCELLED * _were_all_orthogonal(W, A, B, scale)).nonzero()
        else:
            rows = torch.arange(n, device=weight.device)
            lost = torch.stack([rows // (n // groups), rows % (n // groups)], dim=1)
        _by_definition_(squared, lost, W, A, B, scale, chunk_bytes)
        return squared.reshape(n).sqrt_()


def _own_square_sum(
    weight: Tensor, own: Tensor, B: Tensor, scale: float, chunk_bytes: int
) -> Tensor:
    """|| W + s B A[own] ||^2, [G, N / G]."""
    out = B.new_empty(weight.shape[:2])
    height = max(1, chunk_bytes // max(1, 2 * weight[0].numel() * B.itemsize))
    for start in range(0, weight.shape[0], height):
        part = slice(start, start + height)
        block = torch.baddbmm(weight[part].to(B.dtype), B[part], own[part], alpha=scale)
        out[part] = torch.linalg.vector_norm(block, dim=2).square_()
    return out


def _others_square_sum(A: Tensor, B: Tensor) -> Tensor:
    """|| B A[others] ||^2 without forming that product, [G, N / G]."""
    others = A.clone()
    others.diagonal(dim1=0, dim2=2).zero_()
    flat = others.flatten(2)  # [G, R/G, G K]
    gram = flat @ flat.transpose(1, 2)
    return (B @ gram).mul_(B).sum(2).clamp_(min=0)


def _were_all_orthogonal(weight: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """||W||^2 + s^2 sum_r B[n, r]^2 ||A[r]||^2, [G, N / G]."""
    lengths = torch.linalg.vector_norm(A, dim=(2, 3)).square_().unsqueeze(2)
    total: Tensor = torch.linalg.vector_norm(weight, dim=2, dtype=B.dtype).square_()
    return total.add_((B.square() @ lengths).squeeze(2), alpha=scale * scale)


def _by_definition_(
    squared: Tensor,
    lost: Tensor,
    weight: Tensor,
    A: Tensor,
    B: Tensor,
    scale: float,
    chunk_bytes: int,
) -> None:
    """Writes the norms^2 of the rows `lost` [L, 2], each a group and an out channel in it."""
    height = max(1, chunk_bytes // max(1, 16 * A[0].numel()))
    for group, row in (part.unbind(1) for part in torch.split(lost, height)):
        kernel = torch.einsum("lr,lrgk->lgk", B[group, row].double() * scale, A[group].double())
        kernel[torch.arange(len(group), device=group.device), group] += weight[group, row]
        squared[group, row] = kernel.square_().sum((1, 2)).to(squared.dtype)


# As `torch.compile` sees it: which rows have cancelled is no question for a graph.


def _run(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, groups: int) -> Tensor:
    return grouped_norm(weight, lora_A, lora_B, scale=scale, groups=groups)


def _like(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, groups: int) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.new_empty(weight.shape[0], dtype=wide)


grouped_norm_op = register_op(
    "grouped_norm(Tensor weight, Tensor lora_A, Tensor lora_B, float scale, int groups) -> Tensor",
    reference=_run,
    fused=_run,
    fake=_like,
)
"""`grouped_norm` as one op. No gradient: give it detached tensors."""

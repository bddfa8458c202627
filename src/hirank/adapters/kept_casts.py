"""Which adapters of a model stay cast to the compute dtype, and where.

Adapters in fp32 multiply in bf16: forward, recomputation and backward each cast A and B, at every
micro-batch, although the values change with the optimizer's step only. The norm needs the same
casts, once a step. So the table of norms writes them where they are kept (`NormEntry.cast`), and
they are as good as the norm is: the launch that notices a change writes them anew.

Memory     at most `SHARE` of the adapted weights' own, smallest adapters first: that saves the most
           launches. Of 8B parameters in bf16, 14 GB of them adapted, rank 16 takes 87 MB; rank 384
           would take 2.1 GB, and gets 1.7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hirank.kernels._operands import Cast, rides

__all__ = ["SHARE", "allowance", "kept_casts"]

SHARE = 0.125
"""Of the bytes of all adapted weights that kept casts may take."""
_WHOLE = 8  # rows are multiples of so many elements, as a tensor descriptor takes them


def kept_casts(
    layers: Sequence[tuple[Tensor, Tensor, Tensor, float]], dtype: torch.dtype
) -> list[Cast | None]:
    """For each W [N, K], A [R, K], B [N, R] and s of a model, the place of A and B cast to `dtype`.

    None: not kept. The values are whatever lies there: the table writes them. Nothing is kept of
    adapters that are in `dtype` already, or where the memory cannot be had. All on one device.
    """
    room, chosen = allowance([weight for weight, *_ in layers]), list[int]()
    factors = [(A, B) for _, A, B, _ in layers]
    for i in sorted(range(len(factors)), key=lambda i: _entries(factors[i])):
        room -= _entries(factors[i]) * dtype.itemsize
        if room < 0:
            break
        if _keeps(factors[i], dtype):
            chosen.append(i)
    casts: list[Cast | None] = [None] * len(factors)
    try:
        all_of_them = torch.empty(
            sum(_entries(factors[i]) for i in chosen), dtype=dtype, device=factors[0][0].device
        )
    except torch.OutOfMemoryError:
        return casts
    places = iter(torch.split(all_of_them, [t.numel() for i in chosen for t in factors[i]]))
    for i in chosen:
        A, B = (next(places).view(t.shape) for t in factors[i])
        scale = layers[i][3]
        casts[i] = Cast(A, A.t(), B, float(scale) if rides(scale) else 1.0)
    return casts


def allowance(weights: Sequence[Tensor]) -> int:
    """Bytes that the casts of the adapters of these weights may take. Shared ones count once."""
    sizes = {id(w): w.numel() * w.element_size() for w in weights}
    return int(SHARE * sum(sizes.values()))


def _entries(pair: tuple[Tensor, Tensor]) -> int:
    return sum(t.numel() for t in pair)


def _keeps(pair: tuple[Tensor, Tensor], dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and all(
        t.dtype == torch.float32 and t.numel() > 0 and t.shape[1] % _WHOLE == 0 for t in pair
    )

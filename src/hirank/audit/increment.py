"""What an adapter adds to a layer's weight, a block of rows at a time: g (W + s B A) - W.

Nothing larger than a block is formed. A grouped convolution is taken as the dense kernel that it
is with its adapter: W has zeros in the in channels of other groups.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.adapters.files import AdapterLayer
from hirank.audit.factors import blocks
from hirank.kernels.dora_norm import dora_gain, dora_norm
from hirank.kernels.grouped_norm import grouped_norm

__all__ = ["BLOCK", "Rows", "adapted_rows", "gain_of"]

BLOCK = 2**24
"""Entries of a block: 64 MB in fp32."""


class Rows(NamedTuple):
    """Some rows of one layer, in fp32."""

    where: slice
    base: Tensor
    """W."""
    adapted: Tensor
    """g (W + s B A)."""


@torch.no_grad()
def gain_of(layer: AdapterLayer, weight: Tensor) -> tuple[Tensor, Tensor]:
    """g and |W + s B A|, each [N] fp32, of a layer on its weight [N, K]; g is 1 for LoRA."""
    A, B, groups = layer.A.float(), layer.B.float(), len(blocks(layer))
    if groups > 1:
        norm = grouped_norm(weight.float(), A, B, scale=layer.scale, groups=groups)
    else:
        norm = dora_norm(weight, A, B, scale=layer.scale)
    m = layer.magnitude
    return (torch.ones_like(norm) if m is None else dora_gain(m.float(), norm)), norm


@torch.no_grad()
def adapted_rows(layer: AdapterLayer, weight: Tensor, gain: Tensor) -> Iterator[Rows]:
    """The rows of a layer's weight [N, K], with and without the adapter, `gain` [N] on them."""
    parts = blocks(layer)
    tall, wide = parts[0].B.shape[0], parts[0].A.shape[1]
    own = wide // len(parts) if layer.kind == "conv" else wide
    height = max(1, BLOCK // wide)
    for number, (B, A) in enumerate(parts):
        A = A.float()
        for start in range(0, tall, height):
            inner = slice(start, min(start + height, tall))
            where = slice(number * tall + inner.start, number * tall + inner.stop)
            base = torch.zeros(inner.stop - inner.start, wide)
            base[:, number * own : number * own + own] = weight[where]
            adapted = torch.addmm(base, B[inner].float(), A, alpha=layer.scale)
            yield Rows(where, base, adapted.mul_(gain[where, None]))

"""An adapted layer as a product of two matrices, or as one product for each group of channels.

A grouped convolution has a second factor for each group of out channels; its first factor sees all
in channels. So group j adds `s B[j] A[j]`, [N / G, K], to its rows.
"""

from hirank.adapters.files import AdapterLayer
from hirank.audit.spectrum import Factors

__all__ = ["blocks", "groups_of", "whole"]


def groups_of(layer: AdapterLayer) -> int:
    """G: how many ranks there are for each column of B."""
    return layer.rank // layer.B.shape[1]


def blocks(layer: AdapterLayer) -> list[Factors]:
    """B [N / G, R / G] and A [R / G, K] of each group; of most layers there is one."""
    count = groups_of(layer)
    pairs = zip(layer.B.chunk(count), layer.A.chunk(count), strict=True)
    return [Factors(B, A) for B, A in pairs]


def whole(layer: AdapterLayer) -> Factors:
    """B [N, R] and A [R, K] with B A what the layer adds, over s."""
    found = blocks(layer)
    if len(found) == 1:
        return found[0]
    (n, r), A = found[0].B.shape, layer.A
    B = layer.B.new_zeros(n * len(found), r * len(found))
    for j, part in enumerate(found):
        B[j * n : (j + 1) * n, j * r : (j + 1) * r] = part.B
    return Factors(B, A)

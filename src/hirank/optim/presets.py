"""The published methods, each a line of settings of the one engine.

All take a model, parameters or parameter groups, and any field of `Hyper` as a keyword; see
`LowRankAdamW`.
"""

from __future__ import annotations

from typing import ClassVar

from hirank.optim.hyper import Hyper
from hirank.optim.optimizer import LowRankAdamW
from hirank.optim.published import PUBLISHED

__all__ = ["Apollo", "ApolloMini", "Fira", "GaLoreAdamW", "QGaLoreAdamW"]


class GaLoreAdamW(LowRankAdamW):
    """GaLore (Zhao et al., ICML 2024, arXiv 2403.03507), Alg. 2: one side, moments kept.

    The paper's settings: lr 0.01, scale 0.25, gap 200, betas 0.9 and 0.999, eps 1e-8, no weight
    decay; its rank is a quarter to a half of the width. Ours: the basis comes from one warm-started
    subspace iteration; `basis="svd"` is the paper's. Needs (m + 2n) r numbers of state for an
    [m, n] weight, m the shorter side. Full rank is not AdamW: Adam acts in rotated coordinates.
    """

    settings: ClassVar[Hyper] = PUBLISHED["galore"]


class QGaLoreAdamW(LowRankAdamW):
    """Q-GaLore (Zhang et al., 2024, arXiv 2407.08296): int8 weights, int8 moments, int4 bases.

    The paper's settings: lr 0.01, scale 0.25, gap 200, blocks of 256, laziness threshold 0.4 over 5
    refreshes, then twice the gap. Ours: the overlap of whole subspaces instead of the cosine of
    first singular vectors, and a gap of at most 3200. Given a model, linear weights become int8 in
    place; `hirank.optim.weights` has what saving needs.
    """

    settings: ClassVar[Hyper] = PUBLISHED["qgalore"]


class Fira(LowRankAdamW):
    """Fira (Chen et al., 2024, arXiv 2410.01623): GaLore, and the rest of the gradient scaled.

    The paper's settings: GaLore's, and a limiter of 1.01 on the growth of the rest's norm.
    """

    settings: ClassVar[Hyper] = PUBLISHED["fira"]


class Apollo(LowRankAdamW):
    """APOLLO (Zhu et al., MLSys 2025, arXiv 2412.05270): the gradient, scaled per channel.

    The paper's settings: Gaussian projection from a seed, drawn anew every 200 steps and never
    stored, rank 256, scale 1, limiter 1.01.
    """

    settings: ClassVar[Hyper] = PUBLISHED["apollo"]


class ApolloMini(LowRankAdamW):
    """APOLLO-Mini (arXiv 2412.05270): rank 1, one scale for a whole weight.

    The paper's settings: as `Apollo`, with rank 1 and scale sqrt(128).
    """

    settings: ClassVar[Hyper] = PUBLISHED["apollo-mini"]

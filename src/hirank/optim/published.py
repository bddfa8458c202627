"""The settings of the published methods, apart from the optimisers because they need no torch."""

from __future__ import annotations

from hirank.optim.hyper import Hyper

__all__ = ["PUBLISHED"]

PUBLISHED: dict[str, Hyper] = {
    "galore": Hyper(),
    "qgalore": Hyper(
        state="int8",
        basis_store="int4",
        weights="int8",
        weight_rounding="stochastic",
        lazy=0.4,
        lazy_patience=5,
    ),
    "fira": Hyper(residual="fira", limiter=1.01),
    "apollo": Hyper(
        rank=256,
        scale=1.0,
        basis="gaussian",
        basis_store="seed",
        scale_by="channel",
        limiter=1.01,
    ),
    "apollo-mini": Hyper(
        rank=1,
        scale=128**0.5,
        basis="gaussian",
        basis_store="seed",
        scale_by="tensor",
        limiter=1.01,
    ),
}
"""By the name that `hirank train` has for a method; `presets` says where they are from."""

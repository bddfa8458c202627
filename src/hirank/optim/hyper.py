"""Every choice of the low-rank optimisers, each independent of the others; the presets fill it in.

The fields are also the keys of a parameter group, so schedulers change `lr` as in any optimiser,
and one group may differ from another in any of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, get_args, get_type_hints

from hirank.errors import HirankError

__all__ = ["ALIASES", "Hyper", "fixed", "hyper_of", "read_options"]

Sides = Literal["short", "long", "left", "right", "two"]
BasisKind = Literal["subspace", "svd", "eigh", "randomised", "random", "gaussian", "identity"]


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What one step of one parameter depends on, besides its gradient and its state."""

    lr: float = 0.01
    """Learning rate; a scheduler changes it in the parameter group."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and of the second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment, after its bias correction, as torch's AdamW does."""

    weight_decay: float = 0.0
    """Decoupled: the old weights shrink by lr * weight_decay before the update."""

    rank: int | None = 128
    """Directions kept of a gradient, at most its shorter side; None is plain AdamW."""

    gap: int = 200
    """Steps from one refresh of the basis to the next; a change counts from the next one on."""

    scale: float = 0.25
    """Multiplies the update, in effect the learning rate, but not weight decay."""

    sides: Sides = "short"
    """short: project the shorter side (GaLore's Alg. 2; of a square matrix the right one, as
    galore-torch does). long, left (rows), right (columns): that side. two: both sides."""

    rotate: bool = True
    """For two sides: turn one basis by a fixed random rotation. Without it P'GQ is diagonal after
    a refresh and Adam amplifies the rounding noise around the diagonal."""

    basis: BasisKind = "subspace"
    """subspace: one warm-started subspace iteration (randomised when cold). svd, eigh: exact.
    randomised: a randomised SVD. random: orthonormal from a seed. gaussian: entries of variance
    1/rank from a seed (APOLLO). identity: the first coordinates."""

    basis_store: Literal["fp32", "bf16", "int4", "seed"] = "fp32"
    """How a basis is kept; it is used as it is stored. seed: drawn anew at every step, for random
    and gaussian."""

    moments: Literal["keep", "project", "reset"] = "keep"
    """On a refresh: keep the moments as they are (GaLore), project them into the new basis, or
    start them again."""

    residual: Literal["none", "fira"] = "none"
    """fira: add what the basis does not see, scaled per column as Adam scaled what it does see."""

    scale_by: Literal["element", "channel", "tensor"] = "element"
    """element: Adam. channel, tensor: the gradient itself, scaled as Adam scales its projection,
    per column or as a whole (APOLLO)."""

    limiter: float = 0.0
    """The residual (fira) or the scaled gradient (channel, tensor) may grow by this factor in norm
    from step to step; 0 is off."""

    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """How moments are kept; int8 is block-wise. Tensors under 4096 numbers stay in fp32."""

    rounding: Literal["stochastic", "feedback"] = "stochastic"
    """How int8 moments are rounded: up or down at random, or to the nearest with the error kept, in
    int8 too, and added at the next step. bf16 moments are always rounded stochastically."""

    weight_rounding: Literal["nearest", "stochastic"] = "nearest"
    """How bf16 weights are rounded after an update; int8 weights always stochastically."""

    weights: Literal["keep", "int8"] = "keep"
    """int8: linear weights of a model given to the optimiser are turned into 8 bits in place."""

    lazy: float = 0.0
    """Skip a refresh if the old basis, after one subspace iteration, overlaps with itself by this
    share (0 to 1, blind to signs and rotations); 0 is off."""

    lazy_patience: int = 1
    """Refreshes skipped in a row until the gap grows."""

    lazy_growth: float = 2.0
    """Factor by which the gap grows then."""

    lazy_max_gap: int = 3200
    """The gap does not grow further."""

    stagger: bool = False
    """Spread the refreshes of the parameters over the first gap, so that no step pays for all."""

    refresh_from: Literal["sum", "first"] = "sum"
    """When stepping in backward: compute a basis from the whole accumulated gradient, which is then
    held in full for that step, or from its first micro-batch."""

    seed: int = 0
    """Of random bases and stochastic rounding, together with the step and the parameter's index."""

    def __post_init__(self) -> None:
        """Raise HirankError for a value out of range or two that exclude each other."""
        _check_choices(self)
        _check_numbers(self)
        _check_pairs(self)


_HINTS = get_type_hints(Hyper)
_NAMES = tuple(field.name for field in fields(Hyper))
_values_of = itemgetter(*_NAMES)  # by C alone: this is asked for every parameter of every step


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The settings of a parameter group, lr as a number if a scheduler made it a tensor."""
    values = _values_of(group)
    if type(group["lr"]) is not float or type(group["betas"]) is not tuple:
        named = dict(zip(_NAMES, values, strict=True))
        values = (named | {"lr": float(group["lr"]), "betas": tuple(group["betas"])}).values()
    return _made(*values)


@lru_cache(maxsize=256)
def _made(*values: Any) -> Hyper:
    """Checked once, not for every parameter of every step."""
    return Hyper(**dict(zip(_NAMES, values, strict=True)))


_FIXED = ("rank", "sides", "state", "basis_store", "rounding")


@lru_cache(maxsize=256)
def fixed(hyper: Hyper) -> tuple[tuple[str, Any], ...]:
    """The settings that a parameter's state is built for, which cannot change once it is there."""
    kept = [(name, getattr(hyper, name)) for name in _FIXED]
    return (*kept, ("limiter above 0", hyper.limiter > 0))


# What is refused.


def _check_choices(hyper: Hyper) -> None:
    for name, hint in _HINTS.items():
        choices, value = get_args(hint), getattr(hyper, name)
        if choices and isinstance(choices[0], str) and value not in choices:
            known = ", ".join(choices)
            raise HirankError(f"{name} is {value!r}, which is no choice; use one of {known}.")


_RANGES = {
    # name: lowest, whether the lowest is allowed, highest
    "lr": (0.0, True, float("inf")),
    "eps": (0.0, True, float("inf")),
    "weight_decay": (0.0, True, float("inf")),
    "scale": (0.0, False, float("inf")),
    "gap": (1, True, float("inf")),
    "limiter": (0.0, True, float("inf")),
    "lazy": (0.0, True, 1.0),
    "lazy_patience": (1, True, float("inf")),
    "lazy_growth": (1.0, True, float("inf")),
    "lazy_max_gap": (1, True, float("inf")),
}


def _check_numbers(hyper: Hyper) -> None:
    for name, (low, closed, high) in _RANGES.items():
        value = float(getattr(hyper, name))  # a scheduler may keep lr as a tensor
        if not (low <= value <= high) or (value == low and not closed):
            bound = "at least" if closed else "above"
            top = "" if high == float("inf") else f" and at most {high:g}"
            raise HirankError(f"{name} is {value:g}; give a number {bound} {low:g}{top}.")
    if not all(0 <= beta < 1 for beta in hyper.betas):
        raise HirankError(f"betas are {hyper.betas}; give two numbers from 0 to below 1.")
    if hyper.rank is not None and hyper.rank < 1:
        raise HirankError(f"rank is {hyper.rank}; give at least 1, or None for plain AdamW.")


def _check_pairs(hyper: Hyper) -> None:
    drawn = hyper.basis in ("random", "gaussian", "identity")
    dense = hyper.residual != "none" or hyper.scale_by != "element"
    refusals = [
        (
            hyper.basis_store == "seed" and hyper.basis not in ("random", "gaussian"),
            f"basis_store='seed' needs a basis that is drawn, not {hyper.basis!r}; "
            "use basis='random' or 'gaussian'.",
        ),
        (
            hyper.residual != "none" and hyper.scale_by != "element",
            f"residual={hyper.residual!r} and scale_by={hyper.scale_by!r} both use the whole "
            "gradient; choose one.",
        ),
        (
            hyper.sides == "two" and dense,
            "sides='two' leaves no columns to scale; use sides='short' with residual='fira', "
            "scale_by='channel' or 'tensor'.",
        ),
        (
            hyper.lazy > 0 and drawn,
            f"lazy={hyper.lazy:g} asks whether the basis still fits, but basis={hyper.basis!r} "
            "does not look at the gradient; use lazy=0.",
        ),
        (
            hyper.limiter > 0 and not dense,
            f"limiter={hyper.limiter:g} limits a residual or a scaled gradient, and there is none; "
            "use limiter=0, residual='fira' or scale_by='channel'.",
        ),
    ]
    for wrong, sentence in refusals:
        if wrong:
            raise HirankError(sentence)


# Names that users bring along.

_PROJ_TYPES = {
    "std": "short",
    "reverse_std": "long",
    "left": "left",
    "right": "right",
    "full": "two",
}
ALIASES = {
    "update_proj_gap": "gap",
    "galore_update_proj_gap": "gap",
    "galore_update_interval": "gap",
    "galore_rank": "rank",
    "galore_scale": "scale",
    "proj_type": "sides",
    "galore_proj_type": "sides",
    "cos_threshold": "lazy",
    "gamma_proj": "lazy_growth",
    "queue_size": "lazy_patience",
}
"""Option names of galore_torch, q_galore_torch, Transformers, ms-swift and LLaMA-Factory."""


_TORCHS = ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")
"""Switches of torch's AdamW, which trainers hand on as None or False."""


def _refuse_torchs(name: str, value: Any) -> None:
    if value:
        raise HirankError(
            f"{name}={value!r} is a switch of torch's AdamW that the low-rank optimisers do not "
            "have; leave it out."
        )


def read_options(options: Mapping[str, Any], base: Hyper | None = None) -> dict[str, Any]:
    """Our names for `options`, values of `proj_type` translated, types as the fields have them.

    Raises:
        HirankError: an option that nobody knows, with the nearest one that is known.
    """
    named = {}
    for key, value in options.items():
        name = ALIASES.get(key, key)
        if name in _TORCHS:
            _refuse_torchs(name, value)
            continue
        if name not in _NAMES:
            near = difflib.get_close_matches(key, [*_NAMES, *ALIASES], n=1)
            hint = f"; the nearest known one is {near[0]}" if near else ""
            raise HirankError(f"There is no option {key}{hint}.")
        named[name] = _PROJ_TYPES.get(value, value) if name == "sides" else value
    if "betas" in named:
        named["betas"] = tuple(named["betas"])
    replace(base or Hyper(), **named)  # checks them
    return named

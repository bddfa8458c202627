"""Which methods there are, and the settings of one: a table, one entry a method.

A further adapter is one more entry of METHODS and, if it needs more than PEFT's LoRA, one more
branch of `methods.apply`. A low-rank optimiser is an entry that names its class, see lowrank.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hirank.errors import HirankError
from hirank.optim.hyper import BasisKind, Sides, read_options
from hirank.train import lowrank
from hirank.train.strict import Strict

__all__ = ["METHODS", "Method", "MethodConfig"]


@dataclass(frozen=True)
class Method:
    """How one method differs from the others."""

    summary: str
    adapter: bool = True
    """A small set of new weights is trained and saved in PEFT's format; else the model itself."""
    learning_rate: float = 2e-4
    """What optim.lr means if it is not set."""
    rank: int = 16
    """What method.r means if it is not set."""
    optimizer: str | None = None
    """The class in hirank.optim.presets that moves the weights; None is torch's AdamW."""
    lora: dict[str, Any] = field(default_factory=dict)
    """What PEFT's LoraConfig is told beside rank, alpha, dropout and targets."""


def _all_weights(optimizer: str, summary: str, rank: int, lr: float) -> Method:
    """Of a low-rank optimiser; `lr` times its scale is the 1e-5 of `full`."""
    return Method(
        f"all weights: {summary}",
        adapter=False,
        learning_rate=lr,
        rank=rank,
        optimizer=optimizer,
    )


METHODS = {
    "lora": Method("low-rank adapter"),
    "rslora": Method("low-rank adapter with rank-stabilised scale", lora={"use_rslora": True}),
    "dora": Method("low-rank adapter with trained magnitudes", lora={"use_dora": True}),
    "full": Method("all weights", adapter=False, learning_rate=1e-5),
    "galore": _all_weights("GaLoreAdamW", "AdamW in a subspace of the gradient", 128, 4e-5),
    "qgalore": _all_weights("QGaLoreAdamW", "the same on int8 weights, int8 moments", 128, 4e-5),
    "fira": _all_weights("Fira", "GaLore, and the rest of the gradient scaled", 128, 4e-5),
    "apollo": _all_weights("Apollo", "the gradient scaled by channel", 256, 1e-5),
    "apollo-mini": _all_weights("ApolloMini", "the gradient scaled as a whole", 1, 1e-5),
}
ADAPTER_ONLY = (
    "alpha",
    "dropout",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "accelerate",
)


class MethodConfig(Strict):
    """Which method, and how large the adapter is."""

    name: str = "dora"
    """An adapter: lora, rslora or dora. All weights: full, or with a low-rank optimiser galore,
    qgalore, fira, apollo or apollo-mini."""

    r: PositiveInt = 16
    """Rank of the adapter, or of what a low-rank optimiser keeps of a gradient. Default: 16 for
    adapters, 128 for galore, qgalore and fira, 256 for apollo, 1 for apollo-mini."""

    alpha: float | None = Field(default=None, gt=0)
    """Numerator of the scale. Default: 2 r for lora and dora, which makes the scale 2 at every
    rank; 8 for rslora, which makes it 2 at rank 16 and lets it fall with the root of the rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""

    target_modules: str | list[str] = "all-linear"
    """Layers to adapt: all-linear (without the output head), a list of name endings, or a regex.
    For a low-rank optimiser, layers whose gradients are projected; the others get plain AdamW. A
    part of a name is enough in its list, as in Transformers."""

    modules_to_save: list[str] = []
    """Modules trained whole beside the adapter, by name ending."""

    rank_pattern: dict[str, PositiveInt] = {}
    """Other ranks for the layers whose names match a regex."""

    alpha_pattern: dict[str, PositiveFloat] = {}
    """Other alphas for the layers whose names match a regex."""

    accelerate: bool = True
    """Use hirank's layers; false leaves PEFT's own."""

    # Of the low-rank optimisers; what is not set is as in the method's paper.

    gap: PositiveInt | None = None
    """Steps from one refresh of a basis to the next."""

    scale: PositiveFloat | None = None
    """Multiplies the update of projected weights, in effect their learning rate."""

    sides: Sides | None = None
    """short: project the shorter side of a matrix. long, left, right: that side. two: both."""

    basis: BasisKind | None = None
    """subspace: one warm-started subspace iteration. svd, eigh: exact. randomised: a randomised
    SVD. random, gaussian: from a seed. identity: the first coordinates."""

    basis_store: Literal["fp32", "bf16", "int4", "seed"] | None = None
    """How a basis is kept; seed: drawn anew at every step, for random and gaussian."""

    moments: Literal["keep", "project", "reset"] | None = None
    """What becomes of Adam's moments when the basis is replaced."""

    state: Literal["fp32", "bf16", "int8"] | None = None
    """How moments are kept, those of plain AdamW included."""

    weights: Literal["keep", "int8"] | None = None
    """int8: the projected weights are in 8 bits while they are trained, and plain when saved."""

    scale_by: Literal["channel", "tensor"] | None = None
    """For apollo: one factor for a channel of the gradient, or one for the whole of it."""

    limiter: NonNegativeFloat | None = None
    """For fira and apollo: growth in norm allowed from one step to the next; 0 is off."""

    lazy: float | None = Field(default=None, ge=0, le=1)
    """Overlap of the old subspace and the new from which a refresh counts as needless; 0: off."""

    lazy_patience: PositiveInt | None = None
    """Needless refreshes in a row until the gap grows."""

    lazy_growth: float | None = Field(default=None, ge=1)
    """Factor by which the gap grows then."""

    stagger: bool | None = None
    """Spread the refreshes over the first gap, so that no step pays for all."""

    step_in_backward: bool = False
    """Move each weight as soon as its gradient is there, so that gradients never all exist at once.
    optim.clip then limits the norm of the projected gradients, and no gradient norm is logged."""

    @model_validator(mode="before")
    @classmethod
    def _usual_rank(cls, given: Any) -> Any:
        name = given.get("name", "dora") if isinstance(given, dict) else None
        known = METHODS.get(name) if isinstance(name, str) else None
        return {"r": known.rank, **given} if known else given

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(f"the methods are {', '.join(METHODS)}")
        return name

    @field_validator("target_modules", mode="before")
    @classmethod
    def _as_llama_factory_writes_it(cls, value: Any) -> Any:
        names = value.split(",") if isinstance(value, str) else []
        if len(names) > 1 and all(re.fullmatch(r"\s*[\w.]+\s*", name) for name in names):
            return [name.strip() for name in names]
        return "all-linear" if value in ("all", ["all"], ["all-linear"]) else value

    @field_validator("sides", mode="before")
    @classmethod
    def _as_galore_torch_calls_it(cls, value: Any) -> Any:
        try:
            return read_options({"sides": value})["sides"] if isinstance(value, str) else value
        except HirankError as error:
            raise ValueError(str(error)) from None

    @field_validator("target_modules", "rank_pattern", "alpha_pattern")
    @classmethod
    def _are_regexes(cls, value: Any) -> Any:
        patterns = [value] if isinstance(value, str) else value
        for pattern in patterns if not isinstance(value, list) else []:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _fit_the_method(self) -> MethodConfig:
        """What belongs to another kind of method is refused, not ignored."""
        other, why = _NOT_FOR[self.name] if self.name in _NOT_FOR else ((), "")
        for name in other:
            if getattr(self, name) != type(self).model_fields[name].default:
                said = f"method.{name} {why} {self.name}; leave it out"
                raise PydanticCustomError("refused", "{said}", {"said": said})
        return self

    @property
    def method(self) -> Method:
        """The entry of METHODS."""
        return METHODS[self.name]

    @property
    def effective_alpha(self) -> float:
        """alpha, or its default for this method."""
        if self.alpha is not None:
            return self.alpha
        return 8.0 if self.name == "rslora" else 2.0 * self.r


_NOT_FOR = {
    name: (
        (ADAPTER_ONLY, "belongs to an adapter, and there is none with")
        if method.optimizer
        else ((*lowrank.CHOICES, "step_in_backward"), "belongs to galore and its kind, not to")
    )
    for name, method in METHODS.items()
}

"""What a plan is asked about: one training run, as far as memory knows it.

Both engines take a Setting and return a Ledger. Values that exclude each other are refused here, so
that no engine has to.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from hirank.errors import HirankError

__all__ = [
    "ADAPTERS",
    "BYTES",
    "LOW_RANK",
    "METHODS",
    "Attention",
    "Dtype",
    "Loss",
    "Method",
    "Optimizer",
    "Setting",
    "Sharding",
    "StateDtype",
    "Step",
]

Method = Literal[
    "full", "lora", "rslora", "dora", "dora-peft", "qlora", "qdora",
    "galore", "qgalore", "fira", "apollo", "apollo-mini",
]  # fmt: skip
Dtype = Literal["fp32", "bf16"]
StateDtype = Literal["fp32", "bf16", "int8"]
Optimizer = Literal["adamw", "sgd"]
Step = Literal["fused", "foreach", "loop"]
Attention = Literal["sdpa", "flash", "eager"]
Loss = Literal["plain", "chunked", "trl"]
Sharding = Literal["none", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

METHODS: tuple[str, ...] = get_args(Method)
ADAPTERS = frozenset({"lora", "rslora", "dora", "dora-peft", "qlora", "qdora"})
LOW_RANK = frozenset({"galore", "qgalore", "fira", "apollo", "apollo-mini"})
QUANTISED = frozenset({"qlora", "qdora"})
GAINED = frozenset({"dora", "dora-peft", "qdora"})
BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Setting:
    """One run on one kind of GPU. A sentence under each field says what it means for memory."""

    model: str
    """A name in the catalogue, a config.json, a model folder, or a Hub name in the local cache."""

    method: Method = "lora"
    """What is trained. dora is hirank's layer, dora-peft PEFT's own; qlora and qdora: on NF4."""

    rank: int = 16
    """Of the adapter, or of what a low-rank optimiser keeps of a gradient."""

    targets: str | tuple[str, ...] = "all-linear"
    """Layers with an adapter or a projected gradient: all-linear (not the head), or endings."""

    base_dtype: Dtype = "bf16"
    """Of the weights as they are loaded (what is quantised aside)."""

    adapter_dtype: Dtype = "fp32"
    """Of A and B; PEFT makes them fp32 by default. Magnitudes of DoRA are fp32 always."""

    autocast: bool = True
    """bf16 autocast around the forward pass, as Transformers' `bf16: true` does."""

    kbit_upcast: bool = False
    """qlora, qdora: whether PEFT's prepare_model_for_kbit_training widened embedding and head."""

    optimizer: Optimizer = "adamw"
    """adamw keeps two numbers for each that is trained, sgd none."""

    state_dtype: StateDtype = "fp32"
    """Of those numbers; fp32 means the parameter's own dtype where that is torch's AdamW."""

    step: Step = "fused"
    """How torch moves the weights. foreach makes a list as large as all of them on the way."""

    step_in_backward: bool = False
    """Low-rank optimisers: move each weight as soon as its gradient is there."""

    accumulation: int = 1
    """Forward passes in one optimiser step. Memory sees only whether it is more than one."""

    checkpointing: bool = False
    """Keep the input of each block alone and compute the rest again in the backward pass."""

    attention: Attention = "sdpa"
    """eager keeps scores; sdpa and flash do not on a GPU in bf16."""

    packing: bool = False
    """Rows of several examples. Padding is gone, so `sequence` is then the row's length."""

    loss: Loss = "trl"
    """plain: all logits, as in Transformers' Trainer. chunked: a piece of the vocabulary at a time.
    trl: as TRL's trainer does it, which `hirank train` uses."""

    sequence: int = 1024
    """Tokens in the longest row."""

    batch: int = 1
    """Rows in one forward pass on one GPU."""

    labelled: float = 1.0
    """Share of the tokens that are learnt; TRL's loss makes logits for these alone."""

    eval_batch: int = 0
    """Rows in one evaluation pass; 0: no evaluation during the run."""

    world: int = 1
    """GPUs, one process each."""

    sharding: Sharding = "none"
    """How they share the work: ddp copies everything, the others split states, gradients, weights
    (zero1, zero2, and both zero3 and fsdp2 everything)."""

    def __post_init__(self) -> None:
        """Raise HirankError about the first thing that cannot be."""
        for field in fields(self):
            _check_choice(field.name, getattr(self, field.name))
        for name in ("rank", "sequence", "batch", "accumulation", "world"):
            _check_count(name, getattr(self, name), 1)
        _check_count("eval_batch", self.eval_batch, 0)
        if not 0 < self.labelled <= 1:
            raise HirankError(f"labelled is {self.labelled}; give a share above 0 and up to 1.")
        for wrong, sentence in _contradictions(self):
            if wrong:
                raise HirankError(sentence)

    @property
    def is_adapter(self) -> bool:
        """Whether the base is frozen and new weights are trained."""
        return self.method in ADAPTERS

    @property
    def is_low_rank(self) -> bool:
        """Whether an optimiser of the GaLore family moves the weights."""
        return self.method in LOW_RANK

    @property
    def is_quantised(self) -> bool:
        """Whether the linears of the base are in NF4."""
        return self.method in QUANTISED

    @property
    def has_gains(self) -> bool:
        """Whether it is DoRA of any kind."""
        return self.method in GAINED

    @property
    def tokens(self) -> int:
        """In one forward pass on one GPU, padding included."""
        return self.batch * self.sequence

    @property
    def shards(self) -> int:
        """Over how many GPUs weights are split."""
        return self.world if self.sharding in ("fsdp2", "zero3") else 1


_CHOICES: dict[str, tuple[str, ...]] = {
    "method": METHODS,
    "base_dtype": get_args(Dtype),
    "adapter_dtype": get_args(Dtype),
    "optimizer": get_args(Optimizer),
    "state_dtype": get_args(StateDtype),
    "step": get_args(Step),
    "attention": get_args(Attention),
    "loss": get_args(Loss),
    "sharding": get_args(Sharding),
}


def _check_choice(name: str, value: Any) -> None:
    known = _CHOICES.get(name)
    if known is None or value in known:
        return
    near = get_close_matches(str(value), known, n=1)
    hint = f"; the nearest known one is {near[0]}" if near else ""
    raise HirankError(f"{name} is {value!r}, but it is one of {', '.join(known)}{hint}.")


_MOST = 2**32


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HirankError(f"{name} is {value!r}; give a whole number of at least {least}.")
    if value >= _MOST:
        raise HirankError(f"{name} is more than any run has; give a whole number below {_MOST:,}.")


def _contradictions(s: Setting) -> list[tuple[bool, str]]:
    return [
        (
            s.sharding == "none" and s.world > 1,
            f"world is {s.world} and sharding none; use ddp, fsdp2, zero1, zero2 or zero3.",
        ),
        (
            s.sharding != "none" and s.world == 1,
            f"sharding is {s.sharding} on one GPU; set world to 2 or more, or sharding to none.",
        ),
        (
            s.step_in_backward and not s.is_low_rank,
            f"step_in_backward belongs to galore and its kind, not to {s.method}.",
        ),
        (
            s.step_in_backward and s.world > 1,
            "step_in_backward moves weights before the gradients are shared; use it on one GPU.",
        ),
        (
            s.is_low_rank and s.sharding.startswith("zero"),
            f"{s.method} cannot run under DeepSpeed ZeRO, which flattens the matrices it projects; "
            "use ddp or fsdp2.",
        ),
        (
            s.kbit_upcast and not s.is_quantised,
            f"kbit_upcast belongs to qlora and qdora, not to {s.method}.",
        ),
    ]

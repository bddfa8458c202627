"""What each suite can be asked, and how a command line says it.

A suite's settings are one frozen dataclass. On the command line every field takes one value or
several, separated by commas; several give one measurement for each combination.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hirank.errors import HirankError

__all__ = [
    "Compose",
    "Convergence",
    "Decode",
    "Init",
    "Layer",
    "Model",
    "Norm",
    "Optim",
    "Prefill",
    "Pretrain",
    "Tune",
    "add_options",
    "combinations",
]


def _setting(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Model:
    """One optimizer step of a whole model."""

    model: str = _setting("tiny", "a model folder, or a shape by name: tiny, qwen3-8b, qwen3-32b")
    rank: int = _setting(64, "rank of the adapters")
    seq: int = _setting(512, "tokens of a sequence")
    batch: int = _setting(1, "sequences of a micro-batch")
    accumulation: int = _setting(1, "micro-batches of a step")
    optimizer: bool = _setting(True, "take the optimizer's step too, not only gradients")
    checkpointing: bool = _setting(False, "recompute activations (non-reentrant)")
    loss_tokens: int = _setting(0, "loss on the last so many tokens of a sequence; 0: on all")
    dropout: float = _setting(0.0, "dropout of the adapters")
    saved_tokens: int = _setting(1024, "tokens at most in the count of saved bytes; 0: no count")


@dataclass(frozen=True)
class Layer:
    """Forward and backward of one adapted layer."""

    kind: str = _setting("linear", "linear, embedding (IN entries), or conv2d (IN channels, 3x3)")
    base: str = _setting("plain", "how the base weight is stored: plain, or nf4 (bitsandbytes)")
    shape: str = _setting("4096x12288", "in x out features: 4096x12288, or a set by name: qwen3-8b")
    rank: int = _setting(384, "rank of the adapter")
    tokens: int = _setting(4096, "rows of the input; of an image the pixels, to a square")
    dropout: float = _setting(0.0, "dropout of the adapter")
    calls: int = _setting(10, "calls that are timed together")


@dataclass(frozen=True)
class Prefill:
    """Reading a prompt, unmerged, without gradient."""

    model: str = _setting("tiny", "a model folder, or a shape by name: tiny, qwen3-8b, qwen3-32b")
    rank: int = _setting(64, "rank of the adapters")
    seq: int = _setting(4096, "tokens of the prompt")
    batch: int = _setting(1, "prompts at a time")
    half: bool = _setting(False, "GPU: adapters in bf16 instead of fp32 under autocast")


@dataclass(frozen=True)
class Decode:
    """Writing token after token, unmerged, without gradient."""

    model: str = _setting("tiny", "a model folder, or a shape by name: tiny, qwen3-8b, qwen3-32b")
    rank: int = _setting(64, "rank of the adapters")
    prompt: int = _setting(128, "tokens of the prompt, read before the clock starts")
    new: int = _setting(32, "tokens that are written")
    batch: int = _setting(1, "sequences at a time")
    half: bool = _setting(False, "GPU: adapters in bf16 instead of fp32 under autocast")
    cache: str = _setting(
        "dynamic",
        "keys and values: dynamic, static (of a fixed length), or graph (static, each token from a "
        "CUDA graph)",
    )


@dataclass(frozen=True)
class Init:
    """Creating the adapters on a model that is there already."""

    model: str = _setting("tiny", "a model folder, or a shape by name: tiny, qwen3-8b, qwen3-32b")
    rank: int = _setting(64, "rank of the adapters")


@dataclass(frozen=True)
class Norm:
    """The row norm of W + s B A, by different ways."""

    shape: str = _setting("4096x12288", "in x out features: 4096x12288, or a set by name: qwen3-8b")
    rank: int = _setting(384, "rank of the adapter")
    calls: int = _setting(10, "calls that are timed together")


@dataclass(frozen=True)
class Compose:
    """Adding the adapter to an output that exists, against a copy of as many bytes."""

    features: int = _setting(12288, "out features")
    tokens: int = _setting(4096, "rows of the output")
    calls: int = _setting(10, "calls that are timed together")


@dataclass(frozen=True)
class Convergence:
    """The same training, stock and hirank: how far do the losses part?"""

    model: str = _setting("small", "a model folder, or a shape by name: small, tiny (learn bytes)")
    text: str = _setting("", "a text file to learn from; its last tenth is held out")
    rank: int = _setting(64, "rank of the adapters")
    seq: int = _setting(256, "tokens of a sequence")
    batch: int = _setting(4, "sequences of a step")
    steps: int = _setting(500, "optimizer steps")
    lr: float = _setting(2e-4, "learning rate of AdamW, constant")
    pretrain: int = _setting(0, "steps in which the base learns first, without adapters")


@dataclass(frozen=True)
class Optim:
    """A full-parameter step by AdamW, GaLore and their kind: memory, time, refreshes."""

    model: str = _setting("tiny", "a shape by name: tiny, llama-7b, qwen2.5-7b, qwen3-8b")
    layers: int = _setting(0, "decoder layers; 0: as many as the shape has")
    rank: int = _setting(64, "rank of the low-rank arms")
    seq: int = _setting(128, "tokens of a sequence")
    batch: int = _setting(1, "sequences of a step")
    checkpointing: bool = _setting(True, "recompute activations (non-reentrant)")
    gap: int = _setting(200, "steps from one refresh of a basis to the next")
    stagger: bool = _setting(False, "spread hirank's refreshes over the gap")
    refreshes: int = _setting(1, "refreshes of all bases, after the first, that are timed")


@dataclass(frozen=True)
class Pretrain:
    """A small Llama learns a text from nothing, once with each optimiser."""

    text: str = _setting("", "a text file to learn from; its end is held out")
    vocab: int = _setting(256, "entries: 256 are bytes, more are byte pairs learnt from the text")
    hidden: int = _setting(256, "width of the model")
    layers: int = _setting(4, "decoder layers")
    heads: int = _setting(4, "attention heads")
    seq: int = _setting(128, "tokens of a sequence")
    batch: int = _setting(8, "sequences of a step")
    steps: int = _setting(200, "optimizer steps")
    rank: int = _setting(64, "rank of the one-sided arms")
    gap: int = _setting(50, "steps from one refresh of a basis to the next")
    lr: float = _setting(0.01, "peak learning rate of all arms but AdamW")
    scale: float = _setting(0.25, "of the learning rate where a weight is projected; APOLLO has 1")
    adamw_lr: float = _setting(0.0025, "peak learning rate of AdamW")
    seed: int = _setting(0, "of the start, the batches and all that is random")


@dataclass(frozen=True)
class Tune:
    """The fastest tiles of this GPU, and from which size its kernels pay; used from then on."""

    shape: str = _setting("qwen3-8b", "in x out features: 4096x12288, or a set by name: qwen3-8b")
    tokens: int = _setting(4096, "rows of the output")
    keep: bool = _setting(True, "write what was found to the user's cache folder")


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """One option for every field: `loss_tokens` becomes --loss-tokens."""
    for one in fields(settings):
        shown = ("on" if one.default else "off") if isinstance(one.default, bool) else one.default
        parser.add_argument(
            "--" + one.name.replace("_", "-"),
            default=str(shown),
            metavar="VALUE[,...]",
            help=f"{one.metadata['about']} [{shown}]",
        )


def combinations(settings: type, given: argparse.Namespace) -> Iterator[Any]:
    """One settings object for each combination of the values given, the last field fastest.

    Raises:
        HirankError: a value that its field cannot be.
    """
    names = [one.name for one in fields(settings)]
    values = [
        [_parsed(one.name, type(one.default), word) for word in _words(getattr(given, one.name))]
        for one in fields(settings)
    ]
    for chosen in itertools.product(*values):
        yield settings(**dict(zip(names, chosen, strict=True)))


def _words(text: str) -> Sequence[str]:
    return text.split(",")


def _parsed(name: str, kind: type, word: str) -> Any:
    option = "--" + name.replace("_", "-")
    if kind is bool:
        if word not in ("on", "off"):
            raise HirankError(f"{option} got {word!r}: give on or off.")
        return word == "on"
    try:
        value = kind(word)
    except ValueError:
        raise HirankError(f"{option} got {word!r}: give a number.") from None
    if kind is not str and value < 0:
        raise HirankError(f"{option} got {word}: give a number that is not negative.")
    return value

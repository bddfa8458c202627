"""Names that differ between versions of Transformers (5.17 to 5.24), in one place."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

__all__ = ["checkpoint_blocks", "kept_keys_and_values", "rewind", "static_cache"]


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute each block's activations in the backward pass, the non-reentrant way."""
    model_: Any = model
    if hasattr(model_, "activation_checkpointing_enable"):
        model_.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model_.gradient_checkpointing_enable({"use_reentrant": False})


def kept_keys_and_values(output: Any) -> dict[str, Any]:
    """What to pass on with the next token, by the name that this version wants."""
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


def static_cache(model: nn.Module, length: int) -> dict[str, Any]:
    """Room for the keys and values of `length` tokens, by the name that this version wants."""
    from transformers import StaticCache

    base: Any = getattr(model, "get_base_model", lambda: model)()
    name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    return {name: StaticCache(config=base.config, max_cache_len=length)}


def rewind(kept: dict[str, Any], length: int) -> None:
    """Let a static cache go on after its first `length` tokens; what came later is written over."""
    (cache,) = kept.values()
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)

"""Shapes that are measured, by name. Weights are random: time and memory do not depend on them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["LINEARS", "MODELS", "config_of", "linears"]

# The numbers of each model's published config.json, on the Hugging Face Hub: Qwen/Qwen3-8B,
# Qwen/Qwen3-32B and Qwen/Qwen2.5-7B; llama-7b is the first Llama, on which GaLore was measured.
# "small" and "tiny" are nobody's: Llamas that learn a text's bytes in a minute on a GPU, and that a
# CPU steps through in milliseconds.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        model_type="qwen3",
        num_hidden_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "qwen3-32b": dict(
        model_type="qwen3",
        num_hidden_layers=64,
        hidden_size=5120,
        intermediate_size=25600,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "qwen2.5-7b": dict(
        model_type="qwen2",
        num_hidden_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "llama-7b": dict(
        model_type="llama",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    ),
    "small": dict(
        model_type="llama",
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        model_type="llama",
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}

# (in, out) features of a decoder layer's linears: q and o, k and v, gate and up, down.
LINEARS: dict[str, tuple[tuple[int, int], ...]] = {
    "qwen3-8b": ((4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)),
    "qwen3-32b": ((5120, 8192), (8192, 5120), (5120, 1024), (5120, 25600), (25600, 5120)),
    "tiny": ((256, 256), (256, 768)),
}


def linears(shape: str) -> tuple[tuple[int, int], ...]:
    """(in, out) features for `4096x12288` or for a set by name.

    Raises:
        HirankError: neither.
    """
    if shape in LINEARS:
        return LINEARS[shape]
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if not found:
        raise HirankError(
            f"--shape got {shape!r}: give IN x OUT features such as 4096x12288, or one of "
            f"{', '.join(LINEARS)}."
        )
    return ((int(found[1]), int(found[2])),)


def config_of(name: str) -> PretrainedConfig:
    """The Transformers configuration of a shape in `MODELS`."""
    from transformers import AutoConfig

    settings = dict(MODELS[name])
    config: PretrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return config

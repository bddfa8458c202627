"""Well-known shapes, so that a plan needs no download. Each is what the config.json of its Hub
repository says; `parameters` is the count that its publisher's weights have, and a test holds the
inventory and Transformers' own model against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CATALOGUE", "Entry"]


@dataclass(frozen=True)
class Entry:
    """One known model."""

    repository: str
    """Where its config.json is, on the Hugging Face Hub: the source."""
    config: Mapping[str, Any]
    parameters: int
    """Of the language model, a tied head counted once."""


def _config(
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        **more,
    }


def _qwen2(h: int, i: int, n: int, heads: int, kv: int, v: int, tied: bool) -> dict[str, Any]:
    return _config("qwen2", h, i, n, heads, kv, v, tie_word_embeddings=tied)


def _qwen3(h: int, i: int, n: int, heads: int, tied: bool) -> dict[str, Any]:
    more = {"head_dim": 128, "tie_word_embeddings": tied}
    return _config("qwen3", h, i, n, heads, 8, 151936, **more)


def _llama(
    h: int, i: int, n: int, heads: int, kv: int, v: int, tied: bool, head_dim: int | None = None
) -> dict[str, Any]:
    more = {"head_dim": head_dim} if head_dim else {}
    return _config("llama", h, i, n, heads, kv, v, tie_word_embeddings=tied, **more)


def _mistral(v: int, window: int | None) -> dict[str, Any]:
    more = {"sliding_window": window, "tie_word_embeddings": False}
    return _config("mistral", 4096, 14336, 32, 32, 8, v, **more)


def _gemma2(h: int, i: int, n: int, heads: int, kv: int, head_dim: int) -> dict[str, Any]:
    more = {"head_dim": head_dim, "sliding_window": 4096, "attn_logit_softcapping": 50.0}
    return _config("gemma2", h, i, n, heads, kv, 256000, tie_word_embeddings=True, **more)


def _gemma3(
    h: int,
    i: int,
    n: int,
    heads: int,
    kv: int,
    *,
    window: int = 1024,
    v: int = 262208,
    d: int = 256,
) -> dict[str, Any]:
    more = {"head_dim": d, "sliding_window": window, "sliding_window_pattern": 6}
    return _config("gemma3_text", h, i, n, heads, kv, v, tie_word_embeddings=True, **more)


_MOE = {
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}

CATALOGUE: dict[str, Entry] = {
    name: Entry(repository, config, parameters)
    for name, repository, parameters, config in [
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 494_032_768,
         _qwen2(896, 4864, 24, 14, 2, 151936, True)),
        ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 1_543_714_304,
         _qwen2(1536, 8960, 28, 12, 2, 151936, True)),
        ("qwen2.5-3b", "Qwen/Qwen2.5-3B", 3_085_938_688,
         _qwen2(2048, 11008, 36, 16, 2, 151936, True)),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B", 7_615_616_512,
         _qwen2(3584, 18944, 28, 28, 4, 152064, False)),
        ("qwen2.5-14b", "Qwen/Qwen2.5-14B", 14_770_033_664,
         _qwen2(5120, 13824, 48, 40, 8, 152064, False)),
        ("qwen2.5-32b", "Qwen/Qwen2.5-32B", 32_763_876_352,
         _qwen2(5120, 27648, 64, 40, 8, 152064, False)),
        ("qwen2.5-72b", "Qwen/Qwen2.5-72B", 72_706_203_648,
         _qwen2(8192, 29568, 80, 64, 8, 152064, False)),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, _qwen3(1024, 3072, 28, 16, True)),
        ("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, _qwen3(2048, 6144, 28, 16, True)),
        ("qwen3-4b", "Qwen/Qwen3-4B", 4_022_468_096, _qwen3(2560, 9728, 36, 32, True)),
        ("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, _qwen3(4096, 12288, 36, 32, False)),
        ("qwen3-14b", "Qwen/Qwen3-14B", 14_768_307_200, _qwen3(5120, 17408, 40, 40, False)),
        ("qwen3-32b", "Qwen/Qwen3-32B", 32_762_123_264, _qwen3(5120, 25600, 64, 64, False)),
        ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30_532_122_624,
         _config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **_MOE)),
        ("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 1_235_814_400,
         _llama(2048, 8192, 16, 32, 8, 128256, True, 64)),
        ("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 3_212_749_824,
         _llama(3072, 8192, 28, 24, 8, 128256, True, 128)),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248,
         _llama(4096, 14336, 32, 32, 8, 128256, False)),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496,
         _llama(8192, 28672, 80, 64, 8, 128256, False, 128)),
        ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 7_241_732_096, _mistral(32000, 4096)),
        ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 7_248_023_552, _mistral(32768, None)),
        ("gemma-2-2b", "google/gemma-2-2b", 2_614_341_888, _gemma2(2304, 9216, 26, 8, 4, 256)),
        ("gemma-2-9b", "google/gemma-2-9b", 9_241_705_984, _gemma2(3584, 14336, 42, 16, 8, 256)),
        ("gemma-2-27b", "google/gemma-2-27b", 27_227_128_320,
         _gemma2(4608, 36864, 46, 32, 16, 128)),
        ("gemma-3-270m", "google/gemma-3-270m", 268_098_176,
         _gemma3(640, 2048, 18, 4, 1, window=512, v=262144)),
        ("gemma-3-1b", "google/gemma-3-1b-pt", 999_885_952,
         _gemma3(1152, 6912, 26, 4, 1, window=512, v=262144)),
        ("gemma-3-4b", "google/gemma-3-4b-pt", 3_880_263_168, _gemma3(2560, 10240, 34, 8, 4)),
        ("gemma-3-12b", "google/gemma-3-12b-pt", 11_766_034_176,
         _gemma3(3840, 15360, 48, 16, 8)),
        ("gemma-3-27b", "google/gemma-3-27b-pt", 27_009_346_304,
         _gemma3(5376, 21504, 62, 32, 16, d=128)),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", 134_515_008,
         _llama(576, 1536, 30, 9, 3, 49152, True)),
        ("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", 361_821_120,
         _llama(960, 2560, 32, 15, 5, 49152, True)),
        ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", 1_711_376_384,
         _llama(2048, 8192, 24, 32, 32, 49152, True)),
    ]
}  # fmt: skip
"""By a short name; `hirank plan` takes the repository's name as well."""

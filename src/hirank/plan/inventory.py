"""Every weight of a model, counted from its config.json: no library is needed, and no weights.

    config.json -> Shape -> Matrix, Matrix, ...        name, out, in, how often

Known are decoders built like Llama: one list of blocks, RMS norms, gated MLPs, some with experts.
What else there is, is refused by name. Counts are held against Transformers' own models in tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from hirank.errors import HirankError

__all__ = ["KNOWN", "Matrix", "Shape", "read_shape"]


@dataclass(frozen=True)
class Family:
    """What a config.json does not say, as the architecture's code fixes it."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """In a block, each of the hidden size."""
    wide_norms: bool = False
    """Gemma's norms, which multiply in fp32."""
    tied: bool = False
    """Whether output head and embedding are one, if the file says nothing."""
    experts: str | None = None
    """The field that holds the number of experts."""
    head_dim: int | None = None
    reads_bias: bool = False
    """Whether `attention_bias` of the file counts."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """What a file may leave out."""
    softcap: bool = False
    """Whether scores pass through a tanh, if the file says so, which only eager attention can."""


_GEMMA: dict[str, Any] = {
    "wide_norms": True, "tied": True, "head_dim": 256, "reads_bias": True
}  # fmt: skip
_MLP_BIAS = ("llama", "smollm3")

KNOWN: dict[str, Family] = {
    "llama": Family(reads_bias=True),
    "mistral": Family(),
    "smollm3": Family(reads_bias=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128, reads_bias=True),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", reads_bias=True),
    "mixtral": Family(experts="num_local_experts"),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(**_GEMMA, norms=4, softcap=True),
    "gemma3_text": Family(
        **_GEMMA,
        norms=4,
        qk_norm=True,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    ),
}
"""Architectures by `model_type`."""


@dataclass(frozen=True)
class Matrix:
    """Weights of one name and shape in a model."""

    name: str
    out: int
    inp: int
    """1 for a vector; of experts in one tensor, the numbers of one expert."""
    count: int = 1
    """How many there are: usually one a block."""
    kind: str = "linear"
    """linear, bias, norm, embedding, head, router or expert."""

    @property
    def each(self) -> int:
        """Numbers in one."""
        return self.out * self.inp

    @property
    def size(self) -> int:
        """Numbers in all of them."""
        return self.count * self.each


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    wide_norms: bool = False
    softcapped: bool = False
    experts: int = 0
    active: int = 0
    """Experts that see a token."""
    expert_size: int = 0
    window: int | None = None
    """Of sliding attention."""
    sliding: int = 0
    """Blocks that have it."""
    images: bool = False
    """The config is of a model that sees, of which only the language part is counted."""

    @property
    def q_width(self) -> int:
        """Out features of q_proj."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Out features of k_proj and of v_proj."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> tuple[Matrix, ...]:
        """The linear layers of the blocks, one entry a name, in the order in which they run."""
        h, q, kv, n = self.hidden, self.q_width, self.kv_width, self.layers
        found = [
            Matrix("q_proj", q, h, n),
            Matrix("k_proj", kv, h, n),
            Matrix("v_proj", kv, h, n),
            Matrix("o_proj", h, q, n),
        ]
        if not self.experts:
            found += [
                Matrix("gate_proj", self.intermediate, h, n),
                Matrix("up_proj", self.intermediate, h, n),
                Matrix("down_proj", h, self.intermediate, n),
            ]
        return tuple(found)

    def matrices(self) -> Iterator[Matrix]:
        """Every weight of the model; a tied head is not there a second time."""
        yield Matrix("embed_tokens", self.vocabulary, self.hidden, kind="embedding")
        yield from self.linears
        yield from self._experts()
        yield from self._biases()
        yield from self._norms()
        if not self.tied:
            yield Matrix("lm_head", self.vocabulary, self.hidden, kind="head")

    def _experts(self) -> Iterator[Matrix]:
        if not self.experts:
            return
        n, e, h, i = self.layers, self.experts, self.hidden, self.expert_size
        yield Matrix("router", e, h, n, "router")
        yield Matrix("experts.gate_up_proj", e, 2 * i * h, n, "expert")
        yield Matrix("experts.down_proj", e, h * i, n, "expert")

    def _biases(self) -> Iterator[Matrix]:
        n, h = self.layers, self.hidden
        if self.qkv_bias:
            yield Matrix("qkv bias", self.q_width + 2 * self.kv_width, 1, n, "bias")
        if self.o_bias:
            yield Matrix("o bias", h, 1, n, "bias")
        if self.mlp_bias:
            yield Matrix("mlp bias", 2 * self.intermediate + h, 1, n, "bias")

    def _norms(self) -> Iterator[Matrix]:
        yield Matrix("norm", self.hidden, 1, self.norms * self.layers + 1, "norm")
        if self.qk_norm:
            yield Matrix("q_norm and k_norm", self.head_dim, 1, 2 * self.layers, "norm")

    @property
    def parameters(self) -> int:
        """All of them."""
        return sum(matrix.size for matrix in self.matrices())

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of the experts, `active` ones."""
        idle = sum(m.size for m in self._experts() if m.kind == "expert")
        return self.parameters - (
            idle * (self.experts - self.active) // self.experts if idle else 0
        )

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        kinds = ("embedding", "head")
        inside = sum(m.size for m in self.matrices() if m.kind not in kinds) - self.hidden
        return inside // self.layers


def read_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The sizes in a config.json.

    Raises:
        HirankError: an architecture that is not known in closed form, or a field that is missing or
            no count.
    """
    seeing = isinstance(config.get("text_config"), Mapping)
    text = dict(config["text_config"]) if seeing else dict(config)
    kind = _family_name(text, config, name)
    family = KNOWN[kind]
    text = {**family.defaults, **text}
    layers = _count(text, "num_hidden_layers", name)
    hidden, heads = _count(text, "hidden_size", name), _count(text, "num_attention_heads", name)
    experts = _experts(text, family.experts, name) if family.experts else 0
    intermediate = _count(text, "intermediate_size", name)
    bias = family.reads_bias and bool(text.get("attention_bias", False))
    sliding = _sliding(text, kind, layers, name)
    return Shape(
        name=name,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=_count_or(heads, text, "num_key_value_heads", name),
        head_dim=_count_or(family.head_dim or hidden // heads, text, "head_dim", name),
        vocabulary=_count(text, "vocab_size", name),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family.tied))),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=kind in _MLP_BIAS and bool(text.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        norms=family.norms,
        wide_norms=family.wide_norms,
        softcapped=family.softcap and bool(text.get("attn_logit_softcapping", 50.0)),
        experts=experts,
        active=_count(text, "num_experts_per_tok", name) if experts else 0,
        expert_size=_count_or(intermediate, text, "moe_intermediate_size", name) if experts else 0,
        window=_count(text, "sliding_window", name) if sliding else None,
        sliding=sliding,
        images=seeing,
    )


_NO_SIZE = 2**32
"""No model has that many of anything: a slip, and its bytes would not fit into a float."""


def _family_name(text: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    kind = str(text.get("model_type") or config.get("model_type") or "")
    kind = {"gemma3": "gemma3_text"}.get(kind, kind)
    if kind in KNOWN:
        return kind
    near = get_close_matches(kind, KNOWN, n=1)
    hint = f"; the nearest known one is {near[0]}" if near else ""
    raise HirankError(
        f"{name} is of the architecture {kind or 'that its config.json does not name'}, of which "
        f"the closed form knows nothing{hint}; it knows {', '.join(KNOWN)}."
    )


def _count(text: Mapping[str, Any], key: str, name: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _NO_SIZE:
        raise HirankError(f"The config.json of {name} has {key} {value!r}, which is no count.")
    return value


def _count_or(usual: int, text: Mapping[str, Any], key: str, name: str) -> int:
    """A count that may be left out, or null."""
    return usual if text.get(key) is None else _count(text, key, name)


def _experts(text: Mapping[str, Any], key: str, name: str) -> int:
    """Transformers 5 writes num_local_experts into every config.json."""
    return _count(text, key if key in text else "num_local_experts", name)


def _sliding(text: Mapping[str, Any], kind: str, layers: int, name: str) -> int:
    """Blocks whose attention sees a window only."""
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0
    if isinstance(text.get("layer_types"), list):
        return sum(one == "sliding_attention" for one in text["layer_types"])
    if kind == "gemma2":
        return -(-layers // 2)
    if kind == "gemma3_text":
        return layers - layers // _count_or(6, text, "sliding_window_pattern", name)
    return layers if kind in ("mistral", "mixtral") else 0

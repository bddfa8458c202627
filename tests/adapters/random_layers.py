"""Hypothesis strategies: layers of every kind with what they mean, and adapters for them."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapters.semantics import Kind, convolution, embedding, linear


@dataclass
class Case:
    """A layer and its input."""

    layer: nn.Module
    kind: Kind
    shape: tuple[int, ...]  # of x
    entries: int | None = None  # of an embedding
    groups: int = 1


small = st.integers(1, 9)


@st.composite
def linears(draw: Any, turned: bool) -> Case:
    k, n, rows = draw(small), draw(small), draw(st.integers(0, 5))
    layer = Conv1D(n, k) if turned else nn.Linear(k, n, bias=draw(st.booleans()))
    return Case(layer, linear(turned), (rows, k))


@st.composite
def embeddings(draw: Any) -> Case:
    entries, n = draw(st.integers(2, 12)), draw(small)
    padding = draw(st.none() | st.integers(0, entries - 1))
    layer = nn.Embedding(entries, n, padding_idx=padding)
    return Case(layer, embedding(padding), (2, draw(st.integers(0, 5))), entries)


@st.composite
def convolutions(draw: Any, dims: int) -> Case:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, outputs = (groups * draw(st.integers(1, 3)) for _ in range(2))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.integers(0, 2))
    how = {"stride": draw(st.integers(1, 2)), "dilation": draw(st.integers(1, 2))}
    size = draw(st.integers(1, 3))
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        channels, outputs, size, padding=padding, groups=groups, padding_mode=mode,
        bias=draw(st.booleans()), **how,
    )  # fmt: skip
    sides = [5 + draw(st.integers(0, 1)) for _ in range(dims)]
    kind = convolution(dims, groups, padding, mode, **how)
    return Case(layer, kind, (draw(st.integers(1, 2)), channels, *sides), groups=groups)


KINDS = {
    "Linear": linears(turned=False),
    "Conv1D": linears(turned=True),
    "Embedding": embeddings(),
    "Conv1d": convolutions(1),
    "Conv2d": convolutions(2),
    "Conv3d": convolutions(3),
}


@st.composite
def configs(draw: Any, groups: int) -> dict[str, Any]:
    return {
        "r": groups * draw(st.integers(1, 4)),
        "lora_alpha": draw(st.sampled_from([1, 2, 8, 0.5])),
        "use_rslora": draw(st.booleans()),
        "use_dora": draw(st.booleans()),
        "target_modules": ["lin"],
    }

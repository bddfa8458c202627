"""The single layers that suite `layer` measures: how each is made, fed and defined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.errors import HirankError

__all__ = ["KINDS", "Kind", "kind_of", "other_definition"]


class Kind(NamedTuple):
    """One kind of layer; `shape` is IN x OUT."""

    make: Callable[..., nn.Module]  # (in, out, device=, dtype=)
    feed: Callable[..., Tensor]  # (tokens, in, device=, dtype=)
    lacks: tuple[str, ...] = ()
    """Arms there are not: only a linear has a dense product without an identity, and nothing that
    leads into an embedding has a gradient."""


def _linear(n_in: int, n_out: int, **where: Any) -> nn.Module:
    return nn.Linear(n_in, n_out, bias=False, **where)


def _rows(tokens: int, n_in: int, **where: Any) -> Tensor:
    return torch.randn(tokens, n_in, **where).requires_grad_()


def _embedding(n_in: int, n_out: int, **where: Any) -> nn.Module:
    return nn.Embedding(n_in, n_out, **where)


def _ids(tokens: int, n_in: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, n_in, (tokens,), device=device)


def _conv2d(n_in: int, n_out: int, **where: Any) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False, **where)


def _image(tokens: int, n_in: int, **where: Any) -> Tensor:
    side = math.isqrt(tokens)
    return torch.randn(1, n_in, side, side, **where).requires_grad_()


KINDS: Mapping[str, Kind] = {
    "linear": Kind(_linear, _rows),
    "embedding": Kind(_embedding, _ids, ("base", "dense-dora")),
    "conv2d": Kind(_conv2d, _image, ("dense-dora",)),
}


def kind_of(name: str) -> Kind:
    """Raises HirankError: there is no such kind."""
    if name not in KINDS:
        raise HirankError(f"--kind got {name!r}: choose from {', '.join(KINDS)}.")
    return KINDS[name]


class AdaptedEmbedding(nn.Module):
    """One adapted embedding by definition: A [R, V], B [D, R]."""

    def __init__(
        self,
        table: nn.Embedding,
        lora_A: nn.Parameter,
        lora_B: nn.Parameter,
        magnitude: nn.Parameter | None,
        scale: float,
    ) -> None:
        super().__init__()
        self.weight, self.scale = table.weight, scale
        self.lora_A, self.lora_B, self.magnitude = lora_A, lora_B, magnitude

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] to [..., D]"""
        lora = F.embedding(ids, self.lora_A.T) @ self.lora_B.T
        out: Tensor = F.embedding(ids, self.weight) + self.scale * lora
        if self.magnitude is None:
            return out
        with torch.no_grad():
            full = self.weight.T.double() + self.scale * self.lora_B.double() @ self.lora_A.double()
            norm = torch.linalg.vector_norm(full, dim=1).float().clamp_min(1e-30)
        out = out * (self.magnitude / norm)
        return out


class AdaptedConv2d(nn.Module):
    """One adapted convolution without groups by definition: A [R, C, *k], B [N, R, 1, 1]."""

    def __init__(
        self,
        conv: nn.Conv2d,
        lora_A: nn.Parameter,
        lora_B: nn.Parameter,
        magnitude: nn.Parameter | None,
        scale: float,
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.weight, self.scale, self.dropout = conv.weight, scale, dropout
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        self.lora_A, self.lora_B, self.magnitude = lora_A, lora_B, magnitude

    def forward(self, x: Tensor) -> Tensor:
        """x [I, C, H, W] to [I, N, H', W']"""
        dropped: Tensor = self.dropout(x)
        out = self._convolved(x, self.weight)
        lora = self.scale * F.conv2d(self._convolved(dropped, self.lora_A), self.lora_B)
        if self.magnitude is None:
            return out + lora
        gain = self.magnitude / self._norm()
        out += (gain - 1) * self._convolved(dropped, self.weight) + gain * lora
        return out

    def _convolved(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=self.stride, padding=self.padding, dilation=self.dilation)

    @torch.no_grad()
    def _norm(self) -> Tensor:
        A, B = self.lora_A.double().flatten(1), self.lora_B.double().flatten(1)
        full = self.weight.double().flatten(1) + self.scale * B @ A
        norm: Tensor = torch.linalg.vector_norm(full, dim=1).float().clamp_min(1e-30)
        return norm.view(1, -1, 1, 1)


def other_definition(
    place: str, layer: nn.Module, parts: tuple[Any, Any, Any], scale: float, dropout: nn.Module
) -> nn.Module:
    """The definition of the layer at `place` with A, B and magnitude.

    Raises:
        HirankError: it is neither.
    """
    if isinstance(layer, nn.Embedding):
        return AdaptedEmbedding(layer, *parts, scale)
    if isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.bias is None:
        return AdaptedConv2d(layer, *parts, scale, dropout)
    raise HirankError(
        f"{place} is a {type(layer).__name__}: the benchmark can judge nn.Linear, nn.Embedding and "
        "nn.Conv2d without groups and bias."
    )

"""Layers that are not nn.Linear, with the fp64 meaning of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from adapters.setups import layer_of


class Holder(nn.Module):
    """One layer named `lin`, as `setups` expects it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.lin = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Scaled(nn.Embedding):
    """As Gemma 3 embeds: the lookup is multiplied."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("embed_scale", torch.tensor(7.3))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Kind(NamedTuple):
    layer: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    same_as_stock: bool = True  # PEFT computes what its merged weight means

    def model(self, dtype=torch.float32) -> Holder:
        return Holder(self.layer()).to(dtype)


def conv1d(*args, **kwargs):
    layer = Conv1D(*args, **kwargs)
    nn.init.normal_(layer.weight, std=0.25), nn.init.normal_(layer.bias)
    return layer


def ids():
    return torch.randint(0, 37, (3, 11))


def images(*shape):
    return lambda: torch.randn(2, *shape)


def last(layer):
    return layer.to(memory_format=torch.channels_last)


LINEARS = {"Conv1D": Kind(lambda: conv1d(24, 16), images(5, 16))}
EMBEDDINGS = {
    "Embedding": Kind(lambda: nn.Embedding(37, 16), ids),
    "padded": Kind(lambda: nn.Embedding(37, 16, padding_idx=3), ids),
    "by-frequency": Kind(lambda: nn.Embedding(37, 16, scale_grad_by_freq=True), ids),
    "scaled": Kind(lambda: Scaled(37, 16, padding_idx=0), ids),
}
CONVS = {
    "Conv1d": Kind(lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2), images(4, 15)),
    "Conv2d": Kind(lambda: nn.Conv2d(4, 6, (3, 2), padding=(1, 0), bias=False), images(4, 7, 8)),
    "Conv3d": Kind(lambda: nn.Conv3d(4, 6, 2, stride=(1, 2, 1)), images(4, 4, 5, 6)),
    "1x1": Kind(lambda: nn.Conv2d(4, 6, 1), images(4, 5, 5)),
    "same": Kind(lambda: nn.Conv2d(4, 16, 3, padding="same"), images(4, 5, 5)),
    "channels-last": Kind(lambda: last(nn.Conv2d(4, 6, 3)), images(4, 7, 7)),
    "dilated": Kind(lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), images(4, 7, 7), False),
    "dilated-1d": Kind(lambda: nn.Conv1d(4, 24, 3, dilation=3), images(4, 15), False),
    "grouped": Kind(lambda: nn.Conv2d(8, 12, 3, groups=4, padding=1), images(8, 6, 6), False),
    "grouped-1d": Kind(lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), images(4, 9), False),
    "grouped-last": Kind(lambda: last(nn.Conv2d(8, 4, 3, groups=2)), images(8, 6, 6), False),
}
for mode in ("reflect", "replicate", "circular"):
    CONVS[mode] = Kind(
        lambda mode=mode: nn.Conv2d(4, 24, 3, padding=1, padding_mode=mode), images(4, 7, 6), False
    )
CONVS["reflect-1d"] = Kind(
    lambda: nn.Conv1d(4, 6, 3, padding=2, stride=2, padding_mode="reflect"), images(4, 9), False
)
KINDS = LINEARS | EMBEDDINGS | CONVS


class Parts(NamedTuple):
    """What a formula needs, in any dtype."""

    weight: Tensor  # as the base holds it
    bias: Tensor | None
    A: Tensor
    B: Tensor
    m: Tensor | None
    scale: float
    base: nn.Module


def parts_of(layer, name="default", dtype=torch.float64) -> Parts:
    base = layer.get_base_layer()
    if isinstance(base, nn.Embedding):
        A, B = layer.lora_embedding_A[name], layer.lora_embedding_B[name]
    else:
        A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    dora = name in layer.lora_magnitude_vector
    m = layer.lora_magnitude_vector[name].weight if dora else None
    found = (base.weight, getattr(base, "bias", None), A, B, m)
    wide = (None if t is None else t.detach().to(dtype) for t in found)
    return Parts(*wide, layer.scaling[name], base)


def delta(parts: Parts) -> Tensor:
    """s B A in the layout of the effective kernel, by loops rather than tricks."""
    if isinstance(parts.base, (nn.Embedding, Conv1D)):
        return parts.scale * (parts.B @ parts.A).T
    groups = parts.base.groups
    each = [
        torch.einsum("nr,rc...->nc...", B.flatten(1), A)
        for B, A in zip(parts.B.chunk(groups), parts.A.chunk(groups), strict=True)
    ]
    return parts.scale * torch.cat(each)


def kernel(parts: Parts) -> Tensor:
    """The base weight as one dense kernel: groups side by side, zeros elsewhere."""
    groups = getattr(parts.base, "groups", 1)
    if groups == 1:
        return parts.weight
    n, c = parts.weight.shape[0] // groups, parts.weight.shape[1]
    dense = parts.weight.new_zeros(parts.weight.shape[0], c * groups, *parts.weight.shape[2:])
    for j in range(groups):
        dense[j * n : (j + 1) * n, j * c : (j + 1) * c] = parts.weight[j * n : (j + 1) * n]
    return dense


def norm_of(parts: Parts, full: Tensor) -> Tensor:
    """Shaped so that it divides the effective kernel."""
    if isinstance(parts.base, (nn.Embedding, Conv1D)):
        return full.norm(dim=0, keepdim=True)
    return full.flatten(1).norm(dim=1).view(-1, *[1] * (full.dim() - 1))


def effective(parts: Parts, before: Tensor | None = None) -> Tensor:
    """m (W + s B A) / ||W + s B A||; `before` is what earlier adapters made of W."""
    change, weight = delta(parts), kernel(parts)
    stacked = (weight if before is None else before) + change
    if parts.m is None:
        return stacked
    norm = norm_of(parts, (weight + change).detach())
    return stacked * (parts.m.reshape(norm.shape) / norm)


def apply(parts: Parts, weight: Tensor, x: Tensor) -> Tensor:
    """The plain layer with this dense kernel."""
    base = parts.base
    if isinstance(base, nn.Embedding):
        padding, freq = base.padding_idx, base.scale_grad_by_freq
        found = F.embedding(x, weight, padding, scale_grad_by_freq=freq)
        scale = getattr(base, "embed_scale", None)
        return found if scale is None else found * scale.to(base.weight.dtype).to(found.dtype)
    x = x.to(weight.dtype)
    if isinstance(base, Conv1D):
        return x @ weight + parts.bias
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
    padding = base.padding
    if base.padding_mode != "zeros":
        x = F.pad(x, base._reversed_padding_repeated_twice, mode=base.padding_mode)
        padding = 0
    return convolve(x, weight, parts.bias, base.stride, padding, base.dilation)


def plain(parts: Parts, x: Tensor) -> Tensor:
    """The formula of the paper, branch by branch, in the dtype of the parts."""
    base, A, B = parts.base, parts.A, parts.B
    dtype, bias = parts.weight.dtype, parts.bias
    if isinstance(base, nn.Embedding):
        out = F.embedding(x, parts.weight)
        scale, freq = getattr(base, "embed_scale", None), base.scale_grad_by_freq
        h = F.embedding(x, A.T, base.padding_idx, scale_grad_by_freq=freq)
        out, shape = out + parts.scale * h.to(dtype) @ B.to(dtype).T, (-1,)
        out = out if scale is None else out * scale.to(base.weight.dtype).to(dtype)
    else:
        rest, shape = parts.weight.dim() - 2, (-1, *[1] * (parts.weight.dim() - 2))
        frozen = apply(parts._replace(bias=None), kernel(parts), x)
        h = apply(parts._replace(bias=None), A.to(dtype), x)
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rest]
        out = frozen + parts.scale * convolve(h, B.to(dtype), groups=base.groups)
    if parts.m is not None:
        wide = torch.promote_types(dtype, torch.float32)
        cast = [t.detach().to(dtype).to(wide) for t in (parts.weight, A, B)]
        full = parts._replace(weight=cast[0], A=cast[1], B=cast[2])
        norm = norm_of(full, kernel(full) + delta(full))
        out = out * (parts.m.reshape(-1) / norm.reshape(-1)).to(dtype).reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def reference(model: nn.Module, x: Tensor, names=("default",)) -> Tensor:
    """What the layer means, in fp64."""
    layer, weight = layer_of(model), None
    for name in names:
        parts = parts_of(layer, name)
        weight = effective(parts, weight)
    return apply(parts, weight, x)

"""What an adapted layer means, in plain torch and fp64: no PEFT, no hirank.

    y_0 = W x        y_k = g_k (y_{k-1} + s_k B_k A_k x)        y = y_n + b

over the active adapters in their order, with g_k = m_k / ||W + s_k B_k A_k|| row by row for DoRA
and g_k = 1 for LoRA. The norm is a constant for autograd (DoRA, section 4.3) and always of the bare
W. A row whose norm is zero has g = 1.

The rest are the rules of PEFT's state:

- adapters that are not active neither run nor get gradients; nor does any while they are disabled;
- merging writes the weight that means the same into the base, so that only x gets a gradient;
- calling a merged layer while adapters are disabled, or choosing other adapters, unmerges it;
- unmerging gives the base weight back, bit by bit.

Every kind of layer is three linear maps: x -> W x, x -> A x, h -> B h.

How far a result may be off is not guessed either. Each output and gradient is a sum of products,
and a rounding is an error of at most `u` times one of the terms. So the same formula, fed the
absolute values of everything (`size`), is the sum of its terms, and a right result is within a few
`u * size` of the truth, entry by entry: `ROUNDINGS` counts those that one term goes through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Leaves = dict[str, Tensor]
ROUNDINGS = 8  # x, W, A, B as cast; x A, h B, their sum, g, b: few of them in one term


class Kind(NamedTuple):
    """A layer as linear maps, and W, B A as the dense kernel that the norm is taken of."""

    frozen: Callable[[Tensor, Tensor], Tensor]  # x, W
    down: Callable[[Tensor, Tensor], Tensor]  # x, A
    up: Callable[[Tensor, Tensor], Tensor]  # A x, B
    dense: Callable[[Tensor], Tensor]  # W as a kernel without groups
    product: Callable[[Tensor, Tensor], Tensor]  # A, B, as that kernel lies
    rows: int  # the dimension of that kernel that has one entry for each output
    spatial: int = 0  # dimensions of an output after the one of m


def linear(turned: bool) -> Kind:
    """nn.Linear, W [N, K], or GPT-2's Conv1D, W [K, N]."""
    turn = torch.t if turned else torch.Tensor.contiguous
    return Kind(
        lambda x, W: x @ turn(W).T,
        lambda x, A: x @ A.T,
        lambda h, B: h @ B.T,
        lambda W: W,
        lambda A, B: turn(B @ A),
        rows=1 if turned else 0,
    )


def embedding(padding: int | None) -> Kind:
    """nn.Embedding, W [V, N]: its entry at `padding` sends no gradient to A."""
    return Kind(
        F.embedding,
        lambda ids, A: F.embedding(ids, A.T, padding),
        lambda h, B: h @ B.T,
        lambda W: W,
        lambda A, B: (B @ A).T,
        rows=1,
    )


def convolution(dims: int, groups: int, padding: int, mode: str, **geometry: int) -> Kind:
    """nn.Conv1d, 2d, 3d, W [N, C / groups, ...]: A moves over all channels as W does."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def move(x: Tensor, kernel: Tensor, groups: int = groups) -> Tensor:
        around = F.pad(x, [padding] * 2 * dims, "constant" if mode == "zeros" else mode)
        return convolve(around, kernel, groups=groups, **geometry)

    def dense(W: Tensor) -> Tensor:
        blocks = [torch.block_diag(*tap.chunk(groups)) for tap in W.flatten(2).unbind(2)]
        return torch.stack(blocks, 2).unflatten(2, W.shape[2:])

    def product(A: Tensor, B: Tensor) -> Tensor:
        per_group = zip(A.chunk(groups), B.flatten(1).chunk(groups), strict=True)
        return torch.cat([torch.einsum("nr,r...->n...", b, a) for a, b in per_group])

    return Kind(
        move,
        lambda x, A: move(x, A, groups=1),
        lambda h, B: convolve(h, B, groups=groups),
        dense,
        product,
        rows=0,
        spatial=dims,
    )


@dataclass
class Adapter:
    """The weights as they are stored; m is None for LoRA."""

    A: Tensor
    B: Tensor
    m: Tensor | None
    scale: float


@dataclass
class Layer:
    """One adapted layer and its state."""

    kind: Kind
    weight: Tensor
    bias: Tensor | None
    adapters: dict[str, Adapter] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    enabled: bool = True
    merged: list[str] = field(default_factory=list)
    kernel: tuple[Tensor, Tensor] | None = None  # what was merged, and its size

    def running(self) -> list[str]:
        return self.active if self.enabled and not self.merged else []

    def merge(self, names: list[str]) -> None:
        new = [name for name in names if name not in self.merged]
        if not new:
            return
        self.merged += new
        exact = _wide(self)
        found = effective(exact, norms(exact), self.merged)
        self.kernel = found, effective(_absolute(exact), norms(exact, size=True), self.merged)

    def unmerge(self) -> None:
        self.merged, self.kernel = [], None

    def called(self) -> None:
        if not self.enabled:
            self.unmerge()


def _map(layer: Layer, change: Callable[[Tensor], Tensor]) -> Layer:
    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else change(tensor)

    adapters = {
        name: Adapter(change(a.A), change(a.B), of(a.m), a.scale)
        for name, a in layer.adapters.items()
    }
    return replace(layer, weight=change(layer.weight), bias=of(layer.bias), adapters=adapters)


def _wide(layer: Layer) -> Layer:
    return _map(layer, lambda t: t.detach().double())


def _absolute(layer: Layer) -> Layer:
    made = _map(layer, lambda t: t.detach().abs())
    for adapter in made.adapters.values():
        adapter.scale = abs(adapter.scale)
    return made


def _full(layer: Layer, name: str) -> Tensor:
    a = layer.adapters[name]
    return layer.kind.dense(layer.weight) + a.scale * layer.kind.product(a.A, a.B)


def _norm(kernel: Tensor, rows: int) -> Tensor:
    return kernel.movedim(rows, 0).flatten(1).norm(dim=1)


def norms(layer: Layer, *, size: bool = False) -> dict[str, Tensor]:
    """||W + s B A|| of every adapter; `size`: divided by how much larger its terms are.

    That is by the definition. By its square, in three terms, more is lost: up to four bits.
    """
    found = {}
    for name in layer.merged or layer.running():
        norm = _norm(_full(layer, name), layer.kind.rows)
        if size:
            terms = _norm(_full(_absolute(layer), name), layer.kind.rows)
            lost = (terms / norm.clamp_min(1e-300)).clamp_min(1)
            norm = norm / torch.maximum(lost, lost.square().clamp(max=2.0**4))
        found[name] = norm.detach()
    return found


def _gain(m: Tensor, norm: Tensor) -> Tensor:
    dead = norm == 0
    return torch.where(dead, 1.0, m.flatten() / norm.masked_fill(dead, 1))


def effective(layer: Layer, norm: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """The dense kernel that means the same as W with these adapters."""
    kernel, kind = layer.kind.dense(layer.weight), layer.kind
    for name in names:
        a = layer.adapters[name]
        kernel = kernel + a.scale * kind.product(a.A, a.B)
        if a.m is not None:
            gain = _gain(a.m, norm[name])
            kernel = (kernel.movedim(kind.rows, -1) * gain).movedim(-1, kind.rows)
    return kernel


def output(
    layer: Layer,
    x: Tensor,
    norm: Mapping[str, Tensor],
    kernel: Tensor | None = None,
    *,
    size: bool = False,
) -> Tensor:
    """The formula at the top."""
    kind, last = layer.kind, (-1, *[1] * layer.kind.spatial)
    y = kind.frozen(x, layer.weight if kernel is None else kernel)
    if size and layer.bias is not None:
        y = y + layer.bias.view(last)  # a frozen layer's output holds b, which g must not meet
    for name in layer.running():
        a = layer.adapters[name]
        y = y + a.scale * kind.up(kind.down(x, a.A), a.B)
        if a.m is not None:
            gain = _gain(a.m, norm[name]).view(last)
            y = gain * y
            if size and layer.bias is not None:  # no value, but what dm may lose
                y = y + layer.bias.view(last) * (gain - gain.detach()) / gain.detach().clamp(
                    _FROM_Y
                )
    return y if layer.bias is None else y + layer.bias.view(last)


_FROM_Y = 1 / 4  # dm needs W x + s B A x, which is read off y = g (...) + b unless g is small


def _leaves(layer: Layer, x: Tensor) -> Leaves:
    """What gets a gradient, by name; asks for it."""
    found = {"x": x} if x.is_floating_point() else {}
    for name in layer.running():
        a = layer.adapters[name]
        parts = {"A": a.A, "B": a.B, "m": a.m}
        found |= {f"{name}.{part}": t for part, t in parts.items() if t is not None}
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def _results(y: Tensor, leaves: Leaves, dy: Tensor | None) -> Leaves:
    found = {"out": y.detach()}
    if dy is not None and y.requires_grad:
        grads = torch.autograd.grad(y, list(leaves.values()), dy)
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def truth_and_size(layer: Layer, x: Tensor, dy: Tensor | None = None) -> tuple[Leaves, Leaves]:
    """In fp64, by name: output and, given dy, gradients of sum(y dy); sums of their terms."""
    exact = _wide(layer)
    kernels = (None, None) if exact.kernel is None else exact.kernel
    x, dy = _double(x), None if dy is None else _double(dy)
    found = []
    for size in (False, True):
        part = _absolute(exact) if size else exact
        given = x.abs() if size else x
        leaves = _leaves(part, given)
        with torch.enable_grad():
            y = output(part, given, norms(exact, size=size), kernels[size], size=size)
            found.append(_results(y, leaves, dy.abs() if size and dy is not None else dy))
    return found[0], found[1]


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def assert_same(found: Leaves, truth: Leaves, size: Leaves, unit: float) -> None:
    """Raises AssertionError: an entry is further off than its roundings explain, and which."""
    assert found.keys() == truth.keys(), f"gradients of {sorted(found)}, expected {sorted(truth)}"
    for name, exact in truth.items():
        assert found[name].shape == exact.shape, f"{name} is {list(found[name].shape)}"
        off = (found[name].double() - exact).abs()
        allowed = ROUNDINGS * unit * size[name]
        wrong = ~(off <= allowed)  # NaN is wrong, too
        if wrong.any():
            worst = float((off / allowed)[wrong].max())
            raise AssertionError(f"{name} is off by {worst:.3g} of what its roundings explain")

"""A convolution with one adapter, both of its kernels in one call: see `kernels/conv_stack`.

    forward     [u; h] = [W; A] * x,  y = g (u + s B h) + b
    backward    t = g dy,  th = s B^T t,  dx = [W; A] *^T [t; th],  dA = th . x
                dB = s g dy h^T,  dm = sum(dy v) / norm from sum(dy u) and dy h^T

A GPU takes less time for such a layer than the host for its launches, so what counts is how few
they are: no second convolution over dy, no pass for the sum of gradients, and no second over x
where the channels of both fit the GPU's tiles.

Shapes     as in `adapters/conv`; u, t [I, N, ...]; h, th [I, R, ...].
Saves      x and h, and (for dm) u.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hirank.kernels._compose import fits
from hirank.kernels._triton import direct, interpreting
from hirank.kernels.conv_stack import finish, join, spread, stack
from hirank.kernels.dora_linear import Weights

__all__ = ["Moves", "stackable", "stacked_backward", "stacked_forward"]

_EIGHT = 8  # channels that tensor cores take at a time


class Moves(NamedTuple):
    """How the kernel moves, in numbers; the input has its margins where they are not zeros."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False,
            [0] * len(self.stride), groups,
        )  # fmt: skip

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        """Of the size of x. By the transposed convolution, which costs the host least."""
        rest = [
            size - ((out - 1) * step - 2 * margin + gap * (width - 1) + 1)
            for size, out, step, margin, gap, width in zip(
                x.shape[2:], dy.shape[2:], self.stride, self.padding, self.dilation,
                weight.shape[2:], strict=True,
            )
        ]  # fmt: skip
        return torch.convolution(
            dy, weight, None, self.stride, self.padding, self.dilation, True, rest, groups
        )

    def weight_gradient(self, dy: Tensor, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        """Of the shape of the weight, whose values do not matter."""
        found: Tensor = _backward(
            dy, x, weight, None, self.stride, self.padding, self.dilation, False,
            [0] * len(self.stride), groups, [False, True, False],
        )[1]  # fmt: skip
        return found


_backward = torch.ops.aten.convolution_backward.default


def stackable(x: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor, groups: int) -> bool:
    """Whether the kernels take these as they lie, and one convolution is as fast as the larger."""
    return (
        groups == 1
        and (interpreting() or direct(x))
        and fits(x)
        and (lora_A.shape[0] % _EIGHT == 0 or weight.shape[0] % _EIGHT != 0)
        and lora_A.shape[0] > 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and lora_A.is_contiguous()
        and lora_B.is_contiguous()
    )


def stacked_forward(
    x: Tensor, weights: Weights, moves: Moves, scale: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y; h and u where the gradients of B and of the magnitude want them."""
    A, B, magnitude, bias, weight, norm = weights
    n, apart = len(weight), _apart(weight, A)
    same = apart and weight.dtype == x.dtype  # W itself will do
    wa, b = stack(weight[:0] if same else weight, A, B, x.dtype)
    if apart:
        u = moves.forward(x, weight if same else wa[:n], None, 1).contiguous()
        h = moves.forward(x, wa if same else wa[n:], None, 1).contiguous()
    else:
        u, h = moves.forward(x, wa, None, 1).contiguous().split_with_sizes([n, len(A)], 1)
    keep = needs[2] and not needs[3] and not apart  # h alone
    y, h = join(u, h, b, magnitude, norm, bias, scale, keep)
    return y, h if needs[2] or needs[3] else None, u if needs[3] else None


_TILE = 128  # out channels that a GPU computes at a time


def _apart(weight: Tensor, lora_A: Tensor) -> bool:
    """Whether the branches come from two calls: in one, R more channels would take another tile."""
    n, r = len(weight), len(lora_A)
    return -(-n // _TILE) != -(-(n + r) // _TILE)


def stacked_backward(
    dy: Tensor, x: Tensor, h: Tensor | None, u: Tensor | None, weights: Weights, moves: Moves,
    scale: float, needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, A, B, magnitude and bias."""
    need_x, need_A, need_B, need_m, need_b = needs
    A, B, magnitude, _, _, norm = weights
    dy = dy.contiguous()
    db = dy.sum([0, *range(2, dy.dim())]) if need_b else None
    dx = dA = dB = dm = None
    part = None
    if need_x or need_A or need_m:
        t, part = spread(dy, u if need_m else None, A.shape[0], magnitude, norm)
    if need_x or need_A:
        dx, dA = _through_kernels(t, x, weights, moves, scale, need_x, need_A)
    if h is not None:
        raw = torch.bmm(dy.flatten(2), h.flatten(2).transpose(1, 2))  # [I, N, R]
        dm, dB = finish(part if need_m else None, raw, B, magnitude, norm, scale)
    return [dx, dA, dB if need_B else None, dm, db]


def _through_kernels(
    t: Tensor, x: Tensor, weights: Weights, moves: Moves, scale: float, need_x: bool, need_A: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dA; t gets its last channels."""
    A, B, *_ = weights
    wa, b = stack(weights.weight, A, B, x.dtype)
    n, r = b.shape
    images = t.shape[0]
    planes = t.view(images, n + r, -1)
    planes[:, n:].baddbmm_(b.t().expand(images, r, n), planes[:, :n], beta=0, alpha=scale)
    dx = moves.input_gradient(t, x, wa, 1) if need_x else None
    if not need_A:
        return dx, None
    return dx, moves.weight_gradient(t[:, n:], x, wa[n:], 1).to(A.dtype)

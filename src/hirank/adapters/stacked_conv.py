"""A convolution with one adapter, both of its kernels in one call: see `kernels/conv_stack`.

    forward     [u; h] = [W; A] * x,  y = g (u + s B h) + b
    backward    t = g dy,  th = s B^T t,  dx = [W; A] *^T [t; th],  dA = th . x
                dB = s g dy h^T,  dm = sum(dy v) / norm from sum(dy u) and dy h^T

A GPU takes less time for such a layer than the host for its launches, so what counts is how few
they are: no second convolution over x, none over dy, and no pass for the sum of their gradients.

Shapes     as in `adapters/conv`; u, t [I, N, ...]; h, th [I, R, ...].
Saves      x, and [u; h] for dm or h alone.
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
) -> tuple[Tensor, Tensor | None]:
    """y, and [u; h] or h where the gradients of the magnitude or of B want them."""
    A, B, magnitude, bias, weight, norm = weights
    wa, b = stack(weight, A, B, x.dtype)
    uh = moves.forward(x, wa, None, 1).contiguous()
    keep_h = needs[2] and not needs[3]
    y, kept = join(uh, b, magnitude, norm, bias, scale, keep_h)
    return y, kept if needs[2] or needs[3] else None


def stacked_backward(
    dy: Tensor, x: Tensor, kept: Tensor | None, weights: Weights, moves: Moves, scale: float,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, A, B, magnitude and bias."""
    need_x, need_A, need_B, need_m, need_b = needs
    A, B, magnitude, _, _, norm = weights
    dy = dy.contiguous()
    db = dy.sum([0, *range(2, dy.dim())]) if need_b else None
    dx = dA = dB = dm = None
    part = None
    if need_x or need_A or need_m:
        t, part = spread(dy, kept if need_m else None, A.shape[0], magnitude, norm)
    if need_x or need_A:
        dx, dA = _through_kernels(t, x, weights, moves, scale, need_x, need_A)
    if kept is not None:
        raw = _outer(dy, kept, A.shape[0])
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


def _outer(dy: Tensor, kept: Tensor, rank: int) -> Tensor:
    """dy h^T of every image, [I, N, R]; h is the last channels of what was kept."""
    images, channels = kept.shape[:2]
    h = kept.view(images, channels, -1)[:, channels - rank :]
    return torch.bmm(dy.view(images, dy.shape[1], -1), h.transpose(1, 2))

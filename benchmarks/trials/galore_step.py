"""Q-GaLore's step of one weight in two launches beside the projection: Adam, and the way back.

    R = P' G                                  a GEMM, [r, n]
    M, V, N = Adam(R)                         int8 moments read, moved, written: one launch
    W <- W k - (P N) step                     int8 blocks read, moved, written: one launch

Written out in PyTorch, Adam on int8 moments is some forty passes over R, and the way back some
twenty over fp32 copies of W. Here the product P N never leaves the tile.

Not used by the optimisers: not measured on a GPU yet. They run what is the reference here.

Shapes     R, N [r, n]; P N = A B with A [m, r], B [r, n]; W [m, n] as codes [m n] in blocks of 256.
           For the way back n is a multiple of 256, so that a block is a piece of a row.
Precision  fp32; A and B as they are, products in fp32.
Noise      uniform in [0, 1), given, so that a launch and the reference round alike.
Papers     GaLore arXiv 2403.03507, Q-GaLore 2407.08296.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._triton import HAS_TRITON, interpreting, jit, tl, triton
from hirank.kernels.blockquant import (
    BLOCK,
    ROOM,
    dequantize_affine,
    dequantize_power,
    quantize_power,
    requantize_affine,
)

__all__ = ["Adam", "Blocks", "Moments", "adam_int8_", "adam_int8_ref_", "back_int8_"]
__all__ += ["back_int8_ref_"]


class Moments(NamedTuple):
    """Both moments of n numbers, see `blockquant`: written in place."""

    first: Tensor  # int8 [n]
    first_max: Tensor  # fp32 [ceil(n / 256)]
    second: Tensor  # uint8 [n]
    second_max: Tensor  # fp32 [ceil(n / 256)]


class Blocks(NamedTuple):
    """An int8 weight, see `blockquant`: written in place."""

    codes: Tensor  # uint8 [m n]
    scale: Tensor  # fp32 [m n / 256]
    low: Tensor  # fp32 [m n / 256]


class Adam(NamedTuple):
    """What a step of the moments depends on; `age` counts from 1."""

    beta1: float
    beta2: float
    eps: float
    age: int


# What it means.


def adam_int8_ref_(
    grad: Tensor, moments: Moments, noise: tuple[Tensor, Tensor], ok: Tensor, adam: Adam
) -> Tensor:
    """Move the moments of `grad` (fp32, any shape of n numbers); Adam's direction, like grad.

    Args:
        grad: the gradient, or its projection.
        moments: of its n numbers.
        noise: [n] each, for the first and the second moment.
        ok: 0-dim bool; where it does not hold the moments stay and the direction is 0.
        adam: the settings.
    """
    flat = grad.reshape(-1)
    m = torch.lerp(dequantize_power(moments.first, moments.first_max, 2), flat, 1 - adam.beta1)
    v = dequantize_power(moments.second, moments.second_max, 4) * adam.beta2
    v = v.addcmul_(flat, flat, value=1 - adam.beta2)
    made = (
        *quantize_power(m, 2, signed=True, noise=noise[0]),
        *quantize_power(v, 4, signed=False, noise=noise[1]),
    )
    for kept, new in zip(moments, made, strict=True):
        kept.copy_(torch.where(ok, new, kept))
    root = v.sqrt_().div_((1 - adam.beta2**adam.age) ** 0.5).add_(adam.eps)
    return torch.where(ok, m.div_(1 - adam.beta1**adam.age).div_(root), 0).view(grad.shape)


def back_int8_ref_(
    weight: Blocks, a: Tensor, b: Tensor, noise: Tensor, *, step: float, keep: float = 1.0
) -> None:
    """W <- W keep - step A B, rounded stochastically on the grid of every block that still fits.

    Args:
        weight: of [m, n].
        a: [m, r].
        b: [r, n].
        noise: [m n].
        step: lr * scale.
        keep: what weight decay leaves.
    """
    count = weight.codes.numel()
    old = dequantize_affine(*weight, count, 8, torch.float32)
    new = old * keep - step * (a.float() @ b.float()).view(-1)
    made = requantize_affine(new, weight.scale, weight.low, noise, weight.codes)
    for kept, one in zip(weight, made, strict=True):
        kept.copy_(one)


# How the GPU does it.


@jit
def _adam_kernel(
    out, grad, first, first_max, second, second_max, noise_1, noise_2, ok, n, beta1, beta2, eps,
    correct_1, correct_2, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = o_block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, blocks = o_n < n, o_block.to(tl.int64) * BLOCK < n
    b_ok = tl.load(ok) != 0
    b_g = tl.load(grad + o_n, mask=mask, other=0.0)

    old_1 = tl.load(first + o_n, mask=mask, other=0)
    code_1 = old_1.to(tl.float32) / 127
    max_1 = tl.load(first_max + o_block, mask=blocks, other=0.0)
    b_m = code_1 * tl.abs(code_1) * max_1[:, None]
    b_m = b_m + (1 - beta1) * (b_g - b_m)
    b_m = tl.where(mask, b_m, 0.0)

    old_2 = tl.load(second + o_n, mask=mask, other=0)
    code_2 = old_2.to(tl.float32) / 255
    max_2 = tl.load(second_max + o_block, mask=blocks, other=0.0)
    b_v = code_2 * code_2 * code_2 * code_2 * max_2[:, None]
    b_v = tl.where(mask, b_v * beta2 + (1 - beta2) * b_g * b_g, 0.0)

    new_1 = tl.max(tl.abs(b_m), axis=1)
    size = tl.abs(b_m) / tl.where(new_1 > 0, new_1, 1.0)[:, None]
    floor = tl.minimum(tl.floor(tl.sqrt(size) * 127), 127.0)
    below, above = floor / 127, (floor + 1) / 127
    below, above = below * below, above * above
    draw = tl.load(noise_1 + o_n, mask=mask, other=0.0)
    floor = tl.minimum(tl.where((size - below) / (above - below) > draw, floor + 1, floor), 127.0)
    floor = tl.where(b_m < 0, -floor, floor)
    tl.store(first + o_n, tl.where(b_ok, floor.to(tl.int8), old_1), mask=mask)
    tl.store(first_max + o_block, tl.where(b_ok, new_1, max_1), mask=blocks)

    new_2 = tl.max(b_v, axis=1)
    size = b_v / tl.where(new_2 > 0, new_2, 1.0)[:, None]
    floor = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(size)) * 255), 255.0)
    below, above = floor / 255, (floor + 1) / 255
    below, above = below * below, above * above
    below, above = below * below, above * above
    draw = tl.load(noise_2 + o_n, mask=mask, other=0.0)
    floor = tl.minimum(tl.where((size - below) / (above - below) > draw, floor + 1, floor), 255.0)
    floor = tl.where(size > 0, tl.maximum(floor, 1.0), floor)
    tl.store(second + o_n, tl.where(b_ok, floor.to(tl.uint8), old_2), mask=mask)
    tl.store(second_max + o_block, tl.where(b_ok, new_2, max_2), mask=blocks)

    direction = b_m / correct_1 / (tl.sqrt(b_v) / correct_2 + eps)
    tl.store(out + o_n, tl.where(b_ok, direction, 0.0), mask=mask)


@jit
def _back_kernel(
    codes, scale, low, a, b, noise, m, n, r, step, keep, room,
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = o_m < m
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, r, RANK):
        o_r = start + tl.arange(0, RANK)
        b_a = tl.load(
            a + o_m.to(tl.int64)[:, None] * r + o_r[None, :],
            mask=rows[:, None] & (o_r[None, :] < r), other=0.0,
        )  # fmt: skip
        b_b = tl.load(
            b + o_r.to(tl.int64)[:, None] * n + o_n[None, :],
            mask=o_r[:, None] < r, other=0.0,
        )  # fmt: skip
        total += tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")

    o_w = o_m.to(tl.int64)[:, None] * n + o_n[None, :]
    o_block = o_m.to(tl.int64) * (n // BLOCK) + tl.program_id(1)
    mask = rows[:, None] & (o_n[None, :] < n)
    old_code = tl.load(codes + o_w, mask=mask, other=0)
    old_scale = tl.load(scale + o_block, mask=rows, other=0.0)
    old_low = tl.load(low + o_block, mask=rows, other=0.0)
    old = old_low[:, None] + old_code.to(tl.float32) * old_scale[:, None]
    new = old * keep - step * total

    least, most = tl.min(new, axis=1), tl.max(new, axis=1)
    width, reach, slack = most - least, old_scale * 255, old_scale / 256
    fits = (least >= old_low - slack) & (most <= old_low + reach + slack) & (2 * width >= reach)
    new_low = tl.where(fits, old_low, least - room * width)
    new_scale = tl.where(fits, old_scale, (1 + 2 * room) * width / 255)
    ticks = (new - new_low[:, None]) / tl.where(new_scale > 0, new_scale, 1.0)[:, None]
    ticks = tl.floor(ticks + tl.load(noise + o_w, mask=mask, other=0.0))
    code = tl.minimum(tl.maximum(ticks, 0.0), 255.0).to(tl.uint8)
    code = tl.where((new == old) & fits[:, None], old_code, code)
    tl.store(codes + o_w, code, mask=mask)
    tl.store(scale + o_block, new_scale, mask=rows)
    tl.store(low + o_block, new_low, mask=rows)


# What callers see.


def adam_int8_(
    grad: Tensor, moments: Moments, noise: tuple[Tensor, Tensor], ok: Tensor, adam: Adam
) -> Tensor:
    """As `adam_int8_ref_`, in one launch where Triton runs.

    Raises:
        ValueError: moments or noise of another size than grad.
    """
    n = grad.numel()
    sizes = [moments.first.numel(), moments.second.numel(), *(one.numel() for one in noise)]
    if sizes != [n] * 4:
        raise ValueError(f"adam_int8_ got {n} numbers, but moments and noise of {sizes}.")
    if not _runs(grad) or n == 0:
        return adam_int8_ref_(grad, moments, noise, ok, adam)
    out, rows = torch.empty_like(grad, memory_format=torch.contiguous_format), 4
    _adam_kernel[(triton.cdiv(n, rows * BLOCK),)](
        out, grad.contiguous(), *moments, *noise, ok.to(torch.int32), n,
        adam.beta1, adam.beta2, adam.eps, 1 - adam.beta1**adam.age,
        (1 - adam.beta2**adam.age) ** 0.5, ROWS=rows, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def back_int8_(
    weight: Blocks, a: Tensor, b: Tensor, noise: Tensor, *, step: float, keep: float = 1.0
) -> None:
    """As `back_int8_ref_`, in one launch where Triton runs and n is a multiple of 256.

    Raises:
        ValueError: shapes do not fit together.
    """
    (m, r), (r_b, n) = a.shape, b.shape
    if r != r_b or weight.codes.numel() != m * n or noise.numel() != m * n:
        raise ValueError(
            f"back_int8_ got A {m}x{r} and B {r_b}x{n} for a weight of {weight.codes.numel()} and "
            f"noise of {noise.numel()}: give A [m, r], B [r, n] and m n of the others."
        )
    if not _runs(a) or n % BLOCK or m * r == 0:
        back_int8_ref_(weight, a, b, noise, step=step, keep=keep)
        return
    rows, ranks = 16, 32
    grid: Any = (triton.cdiv(m, rows), n // BLOCK)
    _back_kernel[grid](
        *weight, a.contiguous(), b.contiguous(), noise, m, n, r, step, keep, ROOM,
        ROWS=rows, RANK=ranks, BLOCK=BLOCK,
    )  # fmt: skip


def _runs(tensor: Tensor) -> bool:
    return interpreting() or (HAS_TRITON and tensor.is_cuda)

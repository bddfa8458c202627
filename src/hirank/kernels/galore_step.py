"""A step of a low-rank optimiser in two launches beside the products: Adam, and moving the weight.

    R = P' G                       a GEMM, [r, n]
    M, V, N = Adam(R)              int8 moments read, moved, written: one launch
    D = P N                        a GEMM, fp32
    W <- W k - s D                 int8 blocks or bf16 read, moved, rounded, written: one launch

Written out in PyTorch, Adam on int8 moments is some fifty passes over R, and a rounded move of W
some twenty over fp32 copies of it.

Shapes     Flat: a tensor of any shape is n numbers in a row, in blocks of 256.
Precision  fp32; one rounding, up or down at random with the exact mean.
Noise      a function of (seed, place), see `_noise`: the launch and the reference draw alike, and a
           piece of a tensor draws what the whole one would.
Papers     GaLore arXiv 2403.03507, Q-GaLore 2407.08296.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._noise import halves, random_bits, random_bits_ref, uniform, uniform_ref
from hirank.kernels._triton import HAS_TRITON, Launcher, tl, triton
from hirank.kernels.blockquant import (
    BLOCK,
    ROOM,
    dequantize_affine,
    dequantize_power,
    launchable,
    quantize_power,
    requantize_affine,
    round_to_bf16,
)

__all__ = [
    "Adam",
    "Blocks",
    "Moments",
    "Move",
    "adam_int8_",
    "adam_int8_ref_",
    "move_bf16_",
    "move_bf16_ref_",
    "move_int8_",
    "move_int8_ref_",
]


class Moments(NamedTuple):
    """Both moments of n numbers, see `blockquant`: written in place."""

    first: Tensor  # int8 [n]
    first_max: Tensor  # fp32 [ceil(n / 256)]
    second: Tensor  # uint8 [n]
    second_max: Tensor  # fp32 [ceil(n / 256)]


class Blocks(NamedTuple):
    """An int8 weight, see `blockquant`: written in place."""

    codes: Tensor  # uint8 [n]
    scale: Tensor  # fp32 [ceil(n / 256)]
    low: Tensor  # fp32 [ceil(n / 256)]


class Adam(NamedTuple):
    """What a step of the moments depends on; `age` counts from 1."""

    beta1: float
    beta2: float
    eps: float
    age: int


class Move(NamedTuple):
    """W <- W keep - step D, rounded by `seed`; `keep` is fp32, 0-dim or one a number, None is 1."""

    step: float
    keep: Tensor | None
    seed: int
    start: int = 0
    """Place of the first number in its tensor, a multiple of 256."""


# What it means.


def adam_int8_ref_(
    grad: Tensor,
    moments: Moments,
    ok: Tensor,
    adam: Adam,
    seed: int,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Move the moments towards `grad`, and return Adam's direction, shaped like it.

    Args:
        grad: the gradient, or its projection; fp32 or 16 bits, n numbers.
        moments: of these.
        ok: 0-dim bool; where it does not hold the moments stay and the direction is 0.
        adam: the settings.
        seed: of the rounding.
        start: place of the first number in its tensor.
        dtype: of the direction.
    """
    flat, n = grad.reshape(-1).float(), grad.numel()
    m = torch.lerp(dequantize_power(moments.first, moments.first_max, 2), flat, 1 - adam.beta1)
    v = dequantize_power(moments.second, moments.second_max, 4) * adam.beta2
    v = v.addcmul_(flat, flat, value=1 - adam.beta2)
    noise = (uniform_ref(seed + one, start, n, flat.device) for one in (0, 1))
    made = (
        *quantize_power(m, 2, signed=True, noise=next(noise)),
        *quantize_power(v, 4, signed=False, noise=next(noise)),
    )
    for kept, new in zip(moments, made, strict=True):
        kept.copy_(torch.where(ok, new, kept))
    root = v.sqrt_().div_((1 - adam.beta2**adam.age) ** 0.5).add_(adam.eps)
    direction = m.div_(1 - adam.beta1**adam.age).div_(root)
    return torch.where(ok, direction, 0).to(dtype).view(grad.shape)


def move_int8_ref_(weight: Blocks, delta: Tensor, move: Move) -> None:
    """Move [n] int8 weights by flat `delta`, on the grid of every block that still fits."""
    old = dequantize_affine(*weight, delta.numel(), 8, torch.float32)
    new = _moved(old, delta, move)
    noise = uniform_ref(move.seed, move.start, delta.numel(), delta.device)
    made = requantize_affine(new, weight.scale, weight.low, noise, weight.codes)
    for kept, one in zip(weight, made, strict=True):
        kept.copy_(one)


def move_bf16_ref_(weight: Tensor, delta: Tensor, move: Move) -> None:
    """Move [n] bf16 weights by flat `delta`, both contiguous."""
    bits = random_bits_ref(move.seed, move.start, delta.numel(), delta.device)
    high = bits.bitwise_right_shift_(16).bitwise_and_(2**16 - 1)
    weight.copy_(round_to_bf16(_moved(weight.float(), delta, move), high))


def _moved(old: Tensor, delta: Tensor, move: Move) -> Tensor:
    kept = old if move.keep is None else old * move.keep
    return kept.sub(delta, alpha=move.step)


# How the GPU does it.

_CHANGING = ("seed_1", "seed_2", "seed_3", "seed_4", "start")


def _kernel(function: Any) -> Any:
    """Compiled once, not for every kind of number that a seed may be (1, a multiple of 16)."""
    if not HAS_TRITON:
        return function
    names = [name for name in _CHANGING if name in function.__code__.co_varnames]
    return triton.jit(function, do_not_specialize=names)


@_kernel
def _adam_kernel(
    out, grad, first, first_max, second, second_max, ok, n, beta1, rest_1, beta2, rest_2, eps,
    correct_1, correct_2, seed_1, seed_2, seed_3, seed_4, start,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Products with constants where they will do: a division is some ten instructions.
    o_block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_n = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, blocks = o_n < n, o_block * BLOCK < n
    place = o_n + start
    b_ok = tl.load(ok) != 0
    b_g = tl.load(grad + o_n, mask=mask, other=0.0).to(tl.float32)

    old_1 = tl.load(first + o_n, mask=mask, other=0)
    code_1 = old_1.to(tl.float32) * (1 / 127)
    max_1 = tl.load(first_max + o_block, mask=blocks, other=0.0)
    b_m = code_1 * tl.abs(code_1) * max_1[:, None]
    b_m = tl.where(mask, b_m + rest_1 * (b_g - b_m), 0.0)

    old_2 = tl.load(second + o_n, mask=mask, other=0)
    code_2 = old_2.to(tl.float32) * (1 / 255)
    max_2 = tl.load(second_max + o_block, mask=blocks, other=0.0)
    b_v = code_2 * code_2 * code_2 * code_2 * max_2[:, None]
    b_v = tl.where(mask, b_v * beta2 + rest_2 * b_g * b_g, 0.0)

    new_1 = tl.max(tl.abs(b_m), axis=1)
    size = tl.abs(b_m) / tl.where(new_1 > 0, new_1, 1.0)[:, None]
    floor = tl.minimum(tl.floor(tl.sqrt(size) * 127), 127.0)
    below, above = floor * (1 / 127), (floor + 1) * (1 / 127)
    below, above = below * below, above * above
    up = size - below > (above - below) * uniform(place, seed_1, seed_2)
    floor = tl.minimum(tl.where(up, floor + 1, floor), 127.0)
    floor = tl.where(b_m < 0, -floor, floor)
    tl.store(first + o_n, tl.where(b_ok, floor.to(tl.int8), old_1), mask=mask)
    tl.store(first_max + o_block, tl.where(b_ok, new_1, max_1), mask=blocks)

    new_2 = tl.max(b_v, axis=1)
    size = b_v / tl.where(new_2 > 0, new_2, 1.0)[:, None]
    floor = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(size)) * 255), 255.0)
    below, above = floor * (1 / 255), (floor + 1) * (1 / 255)
    below, above = below * below, above * above
    below, above = below * below, above * above
    up = size - below > (above - below) * uniform(place, seed_3, seed_4)
    floor = tl.minimum(tl.where(up, floor + 1, floor), 255.0)
    floor = tl.where(size > 0, tl.maximum(floor, 1.0), floor)
    tl.store(second + o_n, tl.where(b_ok, floor.to(tl.uint8), old_2), mask=mask)
    tl.store(second_max + o_block, tl.where(b_ok, new_2, max_2), mask=blocks)

    direction = b_m * correct_1 / (tl.sqrt(b_v) * correct_2 + eps)
    tl.store(out + o_n, tl.where(b_ok, direction, 0.0), mask=mask)


@_kernel
def _move_int8_kernel(
    codes, scale, low, delta, keep, n, step, room, seed_1, seed_2, start,
    KEEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_n = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, blocks = o_n < n, o_block * BLOCK < n
    old_code = tl.load(codes + o_n, mask=mask, other=0)
    old_scale = tl.load(scale + o_block, mask=blocks, other=0.0)
    old_low = tl.load(low + o_block, mask=blocks, other=0.0)
    old = old_low[:, None] + old_code.to(tl.float32) * old_scale[:, None]
    kept = old
    if KEEP:
        kept = old * tl.load(keep)
    new = kept - step * tl.load(delta + o_n, mask=mask, other=0.0)

    least = tl.min(tl.where(mask, new, float("inf")), axis=1)
    most = tl.max(tl.where(mask, new, float("-inf")), axis=1)
    least, most = tl.where(blocks, least, 0.0), tl.where(blocks, most, 0.0)
    width, reach, slack = most - least, old_scale * 255, old_scale / 256
    fits = (least >= old_low - slack) & (most <= old_low + reach + slack) & (2 * width >= reach)
    new_low = tl.where(fits, old_low, least - room * width)
    new_scale = tl.where(fits, old_scale, (1 + 2 * room) * width / 255)
    ticks = (new - new_low[:, None]) / tl.where(new_scale > 0, new_scale, 1.0)[:, None]
    ticks = tl.floor(ticks + uniform(o_n + start, seed_1, seed_2))
    code = tl.minimum(tl.maximum(ticks, 0.0), 255.0).to(tl.uint8)
    code = tl.where((new == old) & fits[:, None], old_code, code)
    tl.store(codes + o_n, code, mask=mask)
    tl.store(scale + o_block, new_scale, mask=blocks)
    tl.store(low + o_block, new_low, mask=blocks)


@_kernel
def _move_bf16_kernel(
    weight, delta, keep, n, step, seed_1, seed_2, start, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_n < n
    new = tl.load(weight + o_n, mask=mask, other=0.0).to(tl.float32)
    if KEEP:
        new = new * tl.load(keep)
    new = new - step * tl.load(delta + o_n, mask=mask, other=0.0)
    bits = new.to(tl.uint32, bitcast=True) + (random_bits(o_n + start, seed_1, seed_2) >> 16)
    new = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(weight + o_n, new.to(tl.bfloat16), mask=mask)


class _Changing(Launcher):
    """For kernels whose numbers are others at every launch: the first of them and the last, a size
    and a place, are looked at, and those between are never specialised."""

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """As `Launcher`."""
        device = tensors[0].get_device()
        if not tensors[0].is_cuda or device != torch._C._cuda_getDevice():
            super().__call__(grid, tensors, numbers, constants, **options)
            return
        pointers = tuple(map(_address_of, tensors))
        skew = tuple(p & 15 for p in pointers) if reduce(or_, pointers) & 15 else None
        kinds = tuple(map(_dtype_of, tensors))
        look = device, numbers[0], numbers[-1], constants, skew, kinds
        compiled, hooks = self._compiled.get(look), triton.knobs.runtime
        if compiled is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            self._keep(look, self._kernel[grid](*tensors, *numbers, *constants, **options))
            return
        compiled.run(
            *grid, torch._C._cuda_getCurrentRawStream(device), compiled.function,
            compiled.packed_metadata, None, None, None, *pointers, *numbers, *constants,
        )  # fmt: skip


_address_of = torch._C.TensorBase.data_ptr
_dtype_of = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
_adam, _move_int8, _move_bf16 = map(_Changing, (_adam_kernel, _move_int8_kernel, _move_bf16_kernel))
_ADAM_ROWS, _MOVE_ROWS, _MOVE_BLOCK = 4, 8, 2048


# What callers see.


def adam_int8_(
    grad: Tensor,
    moments: Moments,
    ok: Tensor,
    adam: Adam,
    seed: int,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As `adam_int8_ref_`, in one launch where Triton runs.

    Raises:
        ValueError: moments of another size than grad.
    """
    n = grad.numel()
    sizes = [moments.first.numel(), moments.second.numel()]
    if sizes != [n] * 2:
        raise ValueError(f"adam_int8_ got {n} numbers, but moments of {sizes}.")
    if not launchable(grad) or n == 0:
        return adam_int8_ref_(grad, moments, ok, adam, seed, start, dtype)
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    _adam(
        (-(-n // (_ADAM_ROWS * BLOCK)), 1, 1),
        (out, grad.contiguous(), *moments, ok.view(torch.uint8)),
        (n, *_coefficients(adam), *halves(seed), *halves(seed + 1), start),
        (_ADAM_ROWS, BLOCK),
    )
    return out


def _coefficients(adam: Adam) -> tuple[float, ...]:
    """What the kernel multiplies by, in fp64 until then: 1 - 0.999 is off in fp32."""
    b1, b2, age = adam.beta1, adam.beta2, adam.age
    rest = (float(adam.eps), 1.0 / (1.0 - b1**age), (1.0 - b2**age) ** -0.5)
    return (float(b1), 1.0 - b1, float(b2), 1.0 - b2, *rest)


def move_int8_(weight: Blocks, delta: Tensor, move: Move) -> None:
    """As `move_int8_ref_`, in one launch where Triton runs.

    Raises:
        ValueError: delta has another size than the weight.
    """
    n = _same(weight.codes, delta, "move_int8_")
    if n == 0 or not _takes(delta, move):
        return move_int8_ref_(weight, delta, move)
    keep = delta if move.keep is None else move.keep
    _move_int8(
        (-(-n // (_MOVE_ROWS * BLOCK)), 1, 1),
        (*weight, delta, keep),
        (n, float(move.step), ROOM, *halves(move.seed), move.start),
        (move.keep is not None, _MOVE_ROWS, BLOCK),
    )
    return None


def move_bf16_(weight: Tensor, delta: Tensor, move: Move) -> None:
    """As `move_bf16_ref_`, in one launch where Triton runs.

    Raises:
        ValueError: delta has another size than the weight.
    """
    n = _same(weight, delta, "move_bf16_")
    if n == 0 or not _takes(delta, move):
        return move_bf16_ref_(weight, delta, move)
    keep = delta if move.keep is None else move.keep
    _move_bf16(
        (-(-n // _MOVE_BLOCK), 1, 1),
        (weight, delta, keep),
        (n, float(move.step), *halves(move.seed), move.start),
        (move.keep is not None, _MOVE_BLOCK),
    )
    return None


def _takes(delta: Tensor, move: Move) -> bool:
    return launchable(delta) and (move.keep is None or move.keep.dim() == 0)


def _same(weight: Tensor, delta: Tensor, name: str) -> int:
    n = delta.numel()
    if weight.numel() != n:
        raise ValueError(f"{name} got {n} changes for {weight.numel()} weights.")
    return n

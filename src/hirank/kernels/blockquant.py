"""Numbers in 8 and 4 bits, block by block, and rounding that is right on average.

    affine    x ~ low + scale c       c in 0 .. 2^bits - 1, low = min and low + scale (2^bits - 1) =
              max of the block: weights (8 bits) and bases (4 bits, two codes a byte)
    power     x ~ absmax (c / top)^p  p = 2, signed, top = 127: a first moment
                                      p = 4, unsigned, top = 255: a second moment

There is no integer zero point. It would have to be clamped to the codes, which destroys a block of
one sign ([1, 2] would come back as [1, 1]); `low` as a number cannot, and makes the step finer.

The power maps are for Adam's moments, whose elements span orders of magnitude within a block: the
smallest code is 1/127^2 (first moment) and 1/255^4 (second moment) of the largest, where a linear
map would have 1/127 and 1/255. A positive second moment never becomes 0: the update divides by it.

`noise`, uniform in [0, 1) and shaped like x, rounds up with the probability that makes the mean
exact. Without it a value goes to the nearest code. Block extremes are codes, so nothing is clamped.

Shapes     x any shape, read flat; codes [n] (int8, uint8) or [(n + 1) // 2] when packed;
           scale, low, absmax [ceil(n / BLOCK)] fp32.
Precision  arithmetic in fp32.
Cost       8 bits affine 8.25 bits a number, 4 bits affine 4.25, power 8.125.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hirank.kernels._block_sizes import BLOCK, affine_bytes, power_bytes
from hirank.kernels._triton import Launcher, direct, interpreting, jit, tl

__all__ = [
    "BLOCK",
    "affine_bytes",
    "dequantize_affine",
    "dequantize_affine_ref",
    "dequantize_power",
    "launchable",
    "power_bytes",
    "quantize_affine",
    "quantize_power",
    "requantize_affine",
    "round_to_bf16",
]

ROOM = 1 / 32
"""Share of a block's width that `requantize_affine` leaves at either end of a new grid."""


def _blocks(flat: Tensor) -> Tensor:
    """[n] -> [ceil(n / BLOCK), BLOCK] fp32; the last number fills the last block, so that a
    block's minimum and maximum stay those of its own numbers."""
    short = -flat.numel() % BLOCK
    if short:
        flat = torch.cat([flat, flat[-1:].expand(short)])
    return flat.float().view(-1, BLOCK)


# Affine: weights and bases.


def quantize_affine(
    x: Tensor, bits: int, noise: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8; packed for 4 bits), scale and low of each block."""
    blocks = _blocks(x.reshape(-1))
    low, high = blocks.amin(1), blocks.amax(1)
    scale = (high - low) / (2**bits - 1)
    codes = _codes(blocks, scale, low, bits, x.numel(), noise)
    return (codes if bits == 8 else _packed(codes)), scale, low


def requantize_affine(
    x: Tensor, scale: Tensor, low: Tensor, noise: Tensor | None = None, codes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize_affine` in 8 bits, on the old grid of every block that still fits it.

    A number that did not move is then a code but for the last bit of fp32, and rounding is noise
    only for what moved. Given the old `codes`, it keeps its code exactly.
    On a grid that follows each change of a block's extremes, all 256 numbers would be rounded anew
    at every step. A block that does not fit gets a grid with room to move; so does one that fills
    less than half of its grid.
    """
    blocks = _blocks(x.reshape(-1))
    least, most = blocks.amin(1), blocks.amax(1)
    width, reach = most - least, scale * 255
    slack = scale / 256  # what reading a code back may err by, and far below half a step
    fits = (least >= low - slack) & (most <= low + reach + slack) & (2 * width >= reach)
    new_low = torch.where(fits, low, least - ROOM * width)
    new_scale = torch.where(fits, scale, (1 + 2 * ROOM) * width / 255)
    made = _codes(blocks, new_scale, new_low, 8, x.numel(), noise)
    if codes is not None:
        before = dequantize_affine(codes, scale, low, x.numel(), 8, torch.float32)
        still = (x.reshape(-1) == before) & fits.repeat_interleave(BLOCK)[: x.numel()]
        made = torch.where(still, codes, made)
    return made, new_scale, new_low


def _codes(
    blocks: Tensor, scale: Tensor, low: Tensor, bits: int, n: int, noise: Tensor | None
) -> Tensor:
    # Blocks of equal numbers have no step: every code is 0 there, and low says it all.
    ticks = (blocks - low[:, None]) / torch.where(scale > 0, scale, 1)[:, None]
    return _rounded(ticks.view(-1)[:n], noise).clamp_(0, 2**bits - 1).to(torch.uint8)


def _rounded(ticks: Tensor, noise: Tensor | None) -> Tensor:
    if noise is None:
        return ticks.round()
    return (ticks + noise.view(-1)).floor_()


def dequantize_affine_ref(
    codes: Tensor, scale: Tensor, low: Tensor, n: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """[n] numbers of `dtype`: computed in fp32, rounded once."""
    if bits == 4:
        codes = _unpacked(codes, n)
    short = -n % BLOCK
    whole = torch.nn.functional.pad(codes, (0, short)) if short else codes
    each = codes.new_empty((scale.numel(), BLOCK), dtype=dtype)
    # One pass from codes to `dtype`: computed in fp32, nothing of that size stored in fp32.
    torch.addcmul(low[:, None], whole.view(-1, BLOCK), scale[:, None], out=each)
    return each.view(-1)[:n]


@jit
def _widen_kernel(
    out, codes, scale, low, n, pairs, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    o_block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_n = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, blocks = o_n < n, o_block * BLOCK < n
    b_scale = tl.load(scale + o_block, mask=blocks, other=0.0)[:, None]
    b_low = tl.load(low + o_block, mask=blocks, other=0.0)[:, None]
    if BITS == 8:
        b_code = tl.load(codes + o_n, mask=mask, other=0).to(tl.float32)
    else:
        HALF: tl.constexpr = BLOCK // 2  # a byte is read once, not once for each of its codes
        o_pair = o_block[:, None] * HALF + tl.arange(0, HALF)[None, :]
        b_pair = tl.load(codes + o_pair, mask=o_pair < pairs, other=0)
        b_code = tl.interleave(b_pair & 15, b_pair >> 4).to(tl.float32)
    tl.store(out + o_n, (b_low + b_code * b_scale).to(out.dtype.element_ty), mask=mask)


_widen = Launcher(_widen_kernel)
_WIDEN_ROWS = 16
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)


def dequantize_affine(
    codes: Tensor, scale: Tensor, low: Tensor, n: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """As `dequantize_affine_ref`, in one launch where Triton runs."""
    if not launchable(codes) or dtype not in _WIDENED or n == 0:
        return dequantize_affine_ref(codes, scale, low, n, bits, dtype)
    out = torch.empty(n, dtype=dtype, device=codes.device)
    grid = (-(-n // (_WIDEN_ROWS * BLOCK)), 1, 1)  # triton.cdiv takes some microseconds
    _widen(grid, (out, codes, scale, low), (n, (n + 1) // 2), (bits, _WIDEN_ROWS, BLOCK))
    return out


def launchable(tensor: Tensor) -> bool:
    """Whether launches can be made on it: on a GPU, or on a CPU in Triton's interpreter."""
    return interpreting() or direct(tensor)


def _packed(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the first in the low half. [n] -> [(n + 1) // 2]"""
    if codes.numel() % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpacked(packed: Tensor, n: int) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], 1).view(-1)[:n]


# Power: moments.


def quantize_power(
    x: Tensor, power: int, *, signed: bool, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (int8 if signed, else uint8) and absmax of each block. Unsigned x must be >= 0."""
    flat, n, top = x.reshape(-1), x.numel(), 127 if signed else 255
    blocks = _blocks(flat)
    absmax = blocks.abs().amax(1)
    share = (blocks / torch.where(absmax > 0, absmax, 1)[:, None]).view(-1)[:n]
    size = share.abs()
    floor = (size ** (1 / power) * top).floor_().clamp_(0, top)
    below, above = (floor / top) ** power, ((floor + 1) / top) ** power
    up = (size - below) / (above - below) > (0.5 if noise is None else noise.view(-1))
    codes = (floor + up).clamp_(max=top)
    if signed:
        return (codes * share.sign()).to(torch.int8), absmax
    return torch.where(size > 0, codes.clamp(min=1), codes).to(torch.uint8), absmax


def dequantize_power(codes: Tensor, absmax: Tensor, power: int) -> Tensor:
    """[n] fp32. The type of the codes tells whether they are signed."""
    signed = codes.dtype == torch.int8
    share = codes.float() / (127 if signed else 255)
    share = share * share.abs() ** (power - 1)
    n, short = codes.numel(), -codes.numel() % BLOCK
    whole = torch.nn.functional.pad(share, (0, short)) if short else share
    return (whole.view(-1, BLOCK) * absmax[:, None]).view(-1)[:n]


# bfloat16.


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the probability that makes the mean exact.

    `bits` is int32, uniform in 0 .. 2^16 - 1: added to the half of x that bf16 drops. Non-finite
    numbers must not be passed.
    """
    carried = x.float().contiguous().view(torch.int32) + bits.view(x.shape)
    return (carried & -(2**16)).view(torch.float32).to(torch.bfloat16)

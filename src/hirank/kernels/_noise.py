"""Random numbers that are a function of a seed and a place, the same on every device.

Stochastic rounding draws one number for each number it rounds. As a function of (seed, place) it
needs no memory, does not depend on how a tensor is cut into pieces, and a kernel draws what the
reference draws.

The mixing is a 32-bit integer hash (xor-shift and multiply, three and two of each), once over the
place and the first half of the seed, once more with the second half.
"""

import torch
from torch import Tensor

from hirank.kernels._triton import jit, tl

__all__ = ["halves", "mix", "random_bits", "random_bits_ref", "uniform", "uniform_ref"]

_HALF, _WORD = 2**31 - 1, 2**64 - 1


def mix(x: int) -> int:
    """splitmix64: neighbouring inputs give unrelated outputs of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def halves(seed: int) -> tuple[int, int]:
    """Two numbers of 31 bits, as kernels take them. Mixed: the next seed must not draw the same
    numbers one place further on."""
    mixed = mix(seed)
    return mixed & _HALF, mixed >> 33


# What it means.


def random_bits_ref(seed: int, start: int, n: int, device: torch.device) -> Tensor:
    """32 random bits of places start .. start + n - 1, int32 [n]."""
    first, second = halves(seed)
    bits = torch.arange(n, dtype=torch.int32, device=device).add_(_wrapped(start + first))
    return _mixed_(_mixed_(bits).add_(second))


def uniform_ref(seed: int, start: int, n: int, device: torch.device) -> Tensor:
    """The upper 24 of them as fp32 in [0, 1)."""
    bits = random_bits_ref(seed, start, n, device)
    return bits.bitwise_right_shift_(8).bitwise_and_(2**24 - 1).float().mul_(2**-24)


def _wrapped(number: int) -> int:
    """As 32 bits with a sign, which is what torch adds without complaint."""
    return (number + 2**31) % 2**32 - 2**31


def _mixed_(x: Tensor) -> Tensor:
    _xor_shift_(x, 16).mul_(0x21F0AAAD)
    _xor_shift_(x, 15).mul_(0x735A2D97)
    return _xor_shift_(x, 15)


def _xor_shift_(x: Tensor, by: int) -> Tensor:
    # int32 has a sign, which a shift drags along: mask it off.
    return x.bitwise_xor_((x >> by).bitwise_and_(2 ** (32 - by) - 1))


# How the GPU does it.


@jit
def _mixed(x):
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@jit
def random_bits(o_n, first, second):
    """uint32 of places o_n (int64), with the halves of a seed."""
    place = o_n.to(tl.uint32) + first.to(tl.uint32)
    return _mixed(_mixed(place) + second.to(tl.uint32))


@jit
def uniform(o_n, first, second):
    """fp32 in [0, 1)."""
    return (random_bits(o_n, first, second) >> 8).to(tl.float32) * 5.9604644775390625e-08

"""Randomness that is a function of numbers alone.

Stochastic rounding and random bases draw from a generator seeded with (seed, step, index of the
parameter, purpose). So a resumed run draws what an uninterrupted one would, all ranks draw alike,
and the user's own random state is never touched.
"""

from __future__ import annotations

import torch

__all__ = ["BASIS", "MOMENTS", "ROTATION", "WEIGHTS", "dice"]

BASIS, ROTATION, MOMENTS, WEIGHTS = range(4)
"""What is drawn."""

_MASK = 2**64 - 1


def dice(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator on `device` seeded with the numbers, their order included."""
    mixed = 0
    for number in numbers:
        mixed = _mix(mixed ^ (number & _MASK))
    return torch.Generator(device).manual_seed(mixed >> 1)


def _mix(x: int) -> int:
    """splitmix64: neighbouring inputs give unrelated outputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)

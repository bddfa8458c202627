"""Randomness that is a function of numbers alone.

Stochastic rounding draws by a seed made of (seed, step, index of the parameter, purpose) and by
place, random bases from a generator with such a seed. So a resumed run draws what an uninterrupted
one would, all ranks draw alike, and the user's own random state is never touched.
"""

from __future__ import annotations

import torch

from hirank.kernels._noise import mix

__all__ = ["BASIS", "MOMENTS", "ROTATION", "WEIGHTS", "dice", "seed_of"]

BASIS, ROTATION, MOMENTS, WEIGHTS = range(4)
"""What is drawn."""

_MASK = 2**64 - 1


def seed_of(*numbers: int) -> int:
    """63 bits that depend on every number and on their order."""
    mixed = 0
    for number in numbers:
        mixed = mix(mixed ^ (number & _MASK))
    return mixed >> 1


def dice(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator on `device` seeded with the numbers, their order included."""
    return torch.Generator(device).manual_seed(seed_of(*numbers))

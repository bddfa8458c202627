"""Memory as people write it, as plans print it (24GiB, 80 GB, a card's name), and in blocks."""

from __future__ import annotations

import re
from difflib import get_close_matches

from hirank.errors import HirankError

__all__ = ["CARDS", "gib", "in_blocks", "read_memory"]

_UNITS = {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "": 1, "b": 1,
}  # fmt: skip

CARDS = {
    "t4": 15_360, "rtx4090": 24_564, "rtx3090": 24_576, "rtx5090": 32_607, "a10": 23_028,
    "l4": 23_034, "l40s": 46_068, "a100-40gb": 40_960, "a100-80gb": 81_920, "h100": 81_559,
    "h200": 143_771, "b200": 183_359,
}  # fmt: skip
"""MiB that nvidia-smi reports for a card: what a process can have at most."""


def read_memory(text: str) -> int:
    """Bytes of `24GiB`, `80 GB`, `16384MiB`, or of a card of CARDS. A bare number is bytes.

    Raises:
        HirankError: it is neither, or not above 0.
    """
    name = re.sub(r"[\s_]", "", text).lower()
    if name in CARDS:
        return CARDS[name] * 2**20
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([a-z]*)", name)
    if found is None or found[2] not in _UNITS:
        raise HirankError(_no_memory(text, name))
    size = float(found[1]) * _UNITS[found[2]]
    if size >= 2**50:
        raise HirankError(f"{text[:40]} is more than 1 PiB, which no GPU has; write 24GiB or 80GB.")
    if size < 2**20:
        hint = f"; is {text.strip()}GiB meant?" if not found[2] else ""
        raise HirankError(f"{text} is less than 1 MiB, which no GPU has{hint}")
    return int(size)


def _no_memory(text: str, name: str) -> str:
    number = re.match(r"[0-9.]+", name)
    unit = name[number.end() :] if number else ""
    if number and unit:
        near = get_close_matches(unit, [u for u in _UNITS if u], n=1, cutoff=0.3)
        return (
            f"{text} is no size of memory; write {number[0]}{_spelt(near[0] if near else 'gib')}."
        )
    near = get_close_matches(name, CARDS, n=1, cutoff=0.4)
    known = f"; the nearest known card is {near[0]}" if near else ""
    return f"{text} is no size of memory and no known GPU; write 24GiB or 80GB{known}."


def _spelt(unit: str) -> str:
    return unit.upper().replace("IB", "iB")


_MIB = 2**20


def in_blocks(size: int) -> int:
    """Bytes that PyTorch's allocator counts for a tensor of `size`, one of several of that size.

    Multiples of 512. Above 1 MiB tensors share segments of 20 MiB, from 10 MiB on each has its own
    of whole 2 MiB. What is over in a segment is split off, but for a rest of up to 1 MiB, which
    stays with the last tensor in it.
    """
    size = -(-size // 512) * 512
    if size <= _MIB:
        return size
    segment = 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
    fitting = segment // size
    over = segment - fitting * size
    return size + over // fitting if over <= _MIB else size


def gib(size: float) -> str:
    """`14.19 GiB`, as PyTorch and nvidia-smi count: 2^30 bytes."""
    return f"{size / 2**30:.2f} GiB"

"""How large numbers in blocks are; apart from `blockquant.py` because sizes need no torch."""

BLOCK = 256
"""Numbers that share a scale."""


def affine_bytes(n: int, bits: int) -> int:
    """Bytes of `n` numbers: codes, and two fp32 numbers a block."""
    return -(-n * bits // 8) + 8 * -(-n // BLOCK)


def power_bytes(n: int) -> int:
    """Bytes of `n` numbers: codes, and an fp32 number a block."""
    return n + 4 * -(-n // BLOCK)

"""Tiles of the norm. They decide the order of its sums, so its last bits: no file changes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["HALF", "HALF_SMALL", "SCRATCH_BYTES", "WIDE", "NormTile", "norm_tile"]

SCRATCH_BYTES = 128 * 2**20
"""For copies of A and B in the dtype in which they multiply; layers share it in turns."""


@dataclass(frozen=True)
class NormTile:
    """What one program of the norm owns, and how it goes through it."""

    block_n: int
    """Rows of W."""
    block_k: int
    """Columns of W at a time."""
    block_r: int
    """Ranks at a time."""
    split_k: int
    """Columns of W in all, a multiple of block_k."""
    num_warps: int
    num_stages: int
    descriptors: bool = False
    """Whether tiles come through tensor descriptors, which Hopper and newer have units for."""
    flat: bool = False
    """Whether tiles follow each other in one pipeline, without a pause in between."""
    specialized: bool = False
    """Whether warps are split into some that load and some that multiply; Hopper and newer."""
    max_registers: int | None = None
    """Per thread; 128 lets two programs of 8 warps share a multiprocessor."""

    def options(self, device: torch.device) -> dict[str, int]:
        """What a launch on `device` is told besides its constants."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None and device.type == "cuda" and not torch.version.hip:
            found["maxnreg"] = self.max_registers
        return found


# 213 KB of shared memory: Hopper and data-centre Blackwell.
HALF = NormTile(128, 256, 64, 1024, num_warps=8, num_stages=3, descriptors=True, flat=True)
# 48 KB, or 64 KB where W is fp32 or lies odd.
HALF_SMALL = NormTile(128, 128, 32, 1024, num_warps=8, num_stages=3)
# fp32 has no exact tensor cores: small tiles for the ordinary units.
WIDE = NormTile(64, 64, 32, 1024, num_warps=4, num_stages=2)

_LARGE = 220 * 1024  # bytes of shared memory that HALF needs


def norm_tile(dtype: torch.dtype, device: torch.device, even_half_weight: bool) -> NormTile:
    """The tile for A and B of `dtype` on `device`.

    Args:
        dtype: in which A and B multiply.
        device: where.
        even_half_weight: whether all W are of two bytes an element, their rows of whole 16 bytes.
    """
    if dtype == torch.float32:
        return WIDE
    if device.type == "cuda" and _shared_memory(device) < _LARGE:
        return HALF_SMALL
    return HALF if even_half_weight else replace(HALF_SMALL, descriptors=True)


def _shared_memory(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))

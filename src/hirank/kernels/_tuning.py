"""Block sizes, in one place, with the GPU they were measured on."""

from dataclasses import dataclass

__all__ = ["GAIN_BACKWARD", "GAIN_FORWARD", "NORM", "Elementwise", "Norm"]


@dataclass(frozen=True)
class Elementwise:
    """Tile of a pass over [M, N], and how many programs a reduction over M is split into."""

    block_m: int
    block_n: int
    num_warps: int
    programs: int
    """Programs to aim for: a few for every multiprocessor."""

    def rows(self, M: int, columns: int) -> int:
        """Rows of one program, a multiple of the tile, so that about `programs` cover M."""
        parts = max(1, self.programs // max(1, columns))
        rows = -(-M // parts)
        return -(-rows // self.block_m) * self.block_m


# Best of 40 tiles at 4096 x 4096 and 4096 x 12288 on an H200 (Triton 3.6).
GAIN_FORWARD = Elementwise(block_m=16, block_n=512, num_warps=8, programs=132 * 8)
GAIN_BACKWARD = Elementwise(block_m=32, block_n=64, num_warps=4, programs=132 * 8)


@dataclass(frozen=True)
class Norm:
    """Tile of the norm: rows of W a program owns, columns and ranks it takes at a time."""

    block_n: int
    block_k: int
    block_r: int
    split_k: int
    """Columns of W a program takes in all, a multiple of block_k."""
    num_warps: int
    num_stages: int


NORM = Norm(block_n=64, block_k=128, block_r=32, split_k=512, num_warps=4, num_stages=3)

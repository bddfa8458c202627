"""Tiles and crossovers: one row for each GPU family, with the GPU they were measured on.

`tiles(device)` is a dictionary lookup and never waits for the GPU. The first use of a device asks
PyTorch what it is and reads, once, the file that `hirank bench tune` may have left for it.

What may change a bit of a result, and what may not:

- Forward tiles change none: every element is computed alone. They may come from the file.
- Any number of a backward tile changes the order in which dm is summed, and so its last bits.
  Backward tiles come from the table below only: equal GPUs and versions give equal bits,
  whatever lies on their disks.
- Below a crossover the plain formula runs. In training its sums of dm have another order, so that
  crossover comes from the table only. In inference it may come from the file, where tuning has
  seen the two agree bit for bit.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hirank.kernels import _tuning_store
from hirank.kernels._triton import HAS_TRITON, interpreting, triton
from hirank.kernels._tuning_store import Block

__all__ = ["Elementwise", "Family", "Joined"]
__all__ += ["TABLE", "UNKNOWN", "Tiles", "family_of", "forget", "override", "pays"]
__all__ += ["tabled", "tier", "tiles"]


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


@dataclass(frozen=True)
class Joined:
    """Tile of `joined_gemm`, one program for each multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    least: int
    """Tiles that the result must have; with fewer, cuBLAS's GEMMs are faster."""


@dataclass(frozen=True)
class Tiles:
    """All that is to be known about a device before a kernel is launched on it."""

    gain_forward: Elementwise
    gain_backward: Elementwise
    compose_forward: Elementwise
    compose_backward: Elementwise
    min_training: int
    """Elements of [M, N] from which the Triton kernels are used in training."""
    min_inference: int
    """The same without gradients."""
    source: str
    """Where the tiles are from, in words: "tiles measured on NVIDIA H200"."""
    crossover_source: str
    """Where the crossovers are from: "measured on NVIDIA H200"."""
    joined: tuple[Joined, ...] = ()
    """Tiles of `joined_gemm`, the first that fits is taken; none: two GEMMs and a pass."""
    obstacle: str | None = None
    """Why no Triton kernel runs on this device at all; None if they do."""


class Family(NamedTuple):
    """One row of the table. Blocks are (rows, columns, warps) of a program."""

    gain_forward: Block
    gain_backward: Block
    compose_forward: Block
    compose_backward: Block
    programs: int
    """Programs of a reduction for each multiprocessor."""
    min_training: int
    min_inference: int
    tiles_from: str | None
    """GPU and Triton that the tiles were measured on; None: on none."""
    crossovers_from: str | None
    """The same of the crossovers."""
    why: str
    """One sentence: the reason for these numbers."""
    joined: tuple[tuple[int, int, int, int, int, int], ...] = ()
    """Tiles of `joined_gemm`: rows, columns, depth, warps, stages, and how many tiles for each
    multiprocessor the result must have."""


UNKNOWN = Family(
    gain_forward=Block(8, 128, 4),
    gain_backward=Block(32, 64, 4),
    compose_forward=Block(8, 128, 4),
    compose_backward=Block(32, 64, 4),
    programs=8,
    min_training=2**15,
    min_inference=2**15,
    tiles_from=None,
    crossovers_from=None,
    why="At most 16 elements a thread with 32 lanes or 64: no GPU that Triton knows runs out of "
    "registers; below 32,768 elements a launch costs more than the memory traffic.",
)

# (vendor, family): what was measured on a GPU of that family.
TABLE: dict[tuple[str, str], Family] = {
    ("nvidia", "hopper"): Family(
        gain_forward=Block(16, 512, 8),
        gain_backward=Block(32, 128, 8),
        compose_forward=Block(16, 512, 8),
        compose_backward=Block(32, 128, 8),
        programs=4,
        min_training=0,
        min_inference=0,
        tiles_from="NVIDIA H200",
        crossovers_from="NVIDIA H200",
        why="Gain tiles: best of 40 at 4096 rows and 1024, 4096 and 12288 columns with Triton 3.6; "
        "compose moves memory the same way. Launches dominate small sizes, and the kernels need "
        "fewer of them than the formula, so they pay from the first element. Joined GEMM: best of "
        "6 at 4096 rows (benchmarks/trials); with less than two waves the small tile wins.",
        joined=((128, 256, 64, 8, 3, 2), (128, 128, 64, 4, 5, 1)),
    ),
}

# By compute capability, the exact one before the major number alone.
_NVIDIA = {(8, 9): "ada", (8, None): "ampere", (9, None): "hopper", (10, None): "blackwell",
           (11, None): "blackwell", (12, None): "blackwell"}  # fmt: skip
_OLDEST = (8, 0)  # compute capability that Triton 3 supports


def family_of(properties: Any) -> tuple[str, str]:
    """(vendor, family) of what `torch.cuda.get_device_properties` returns."""
    if _rocm():
        return "amd", str(getattr(properties, "gcnArchName", "unknown")).partition(":")[0]
    exact, major = (properties.major, properties.minor), (properties.major, None)
    return "nvidia", _NVIDIA.get(exact) or _NVIDIA.get(major, "unknown")


def _rocm() -> bool:
    return getattr(torch.version, "hip", None) is not None


# The hot path.

_KNOWN: dict[torch.device, Tiles] = {}


def tiles(device: torch.device) -> Tiles:
    """Tiles and crossovers of `device`: one lookup, after the first use of the device."""
    return _KNOWN.get(device) or _first_use(device)


def pays(elements: int, device: torch.device, training: bool) -> bool:
    """Whether the Triton kernels are to be used for a result of so many elements."""
    found = tiles(device)
    least = found.min_training if training else found.min_inference
    return found.obstacle is None and elements >= least


def tier(elements: int, device: torch.device, training: bool) -> tuple[str, str]:
    """("fused training", "fused inference" or "eager", and the reason).

    Args:
        elements: of the result: tokens times out features.
        device: where it is computed.
        training: whether gradients will be asked for.
    """
    found = tiles(device)
    if found.obstacle is not None:
        return "eager", found.obstacle
    least = found.min_training if training else found.min_inference
    if elements < least:
        return "eager", (
            f"{elements:,} elements, fewer than the {least:,} from which Triton pays "
            f"({found.crossover_source})"
        )
    return ("fused training" if training else "fused inference"), found.source


@contextmanager
def override(device: torch.device, other: Tiles) -> Iterator[None]:
    """Let `tiles(device)` return `other` inside: for tuning, and for tests."""
    before = _KNOWN.get(device)
    _KNOWN[device] = other
    try:
        yield
    finally:
        if before is None:
            del _KNOWN[device]
        else:
            _KNOWN[device] = before


def forget(device: torch.device) -> None:
    """Let the next use of `device` be its first: a new file was written."""
    _KNOWN.pop(device, None)


# The first use of a device.


def _first_use(device: torch.device) -> Tiles:
    if device.type == "cuda":
        return _first_use_of_gpu(device)
    found = _plain(UNKNOWN, 1)
    if device.type != "cpu":
        found = replace(found, obstacle=f"no Triton kernels for devices of type {device.type!r}")
    elif not interpreting():
        found = replace(found, obstacle="on the CPU")
    else:
        source = "Triton's interpreter: default tiles"
        found = replace(found, min_training=0, min_inference=0, source=source)
    _KNOWN[device] = found
    return found


def _first_use_of_gpu(device: torch.device) -> Tiles:
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return _plain(UNKNOWN, 1)  # fake tensors of a GPU that is elsewhere
    if device == torch.device(device.type):  # whichever is the current one
        return tiles(torch.device("cuda", torch.cuda.current_device()))
    found = _of_gpu(torch.cuda.get_device_properties(device))
    if found.obstacle is not None:
        _say_once(f"hirank uses plain PyTorch instead of its GPU kernels: {found.obstacle}.")
    _KNOWN[device] = found
    return found


def tabled(properties: Any) -> Tiles:
    """What the table says of a GPU, whatever was tuned."""
    row = TABLE.get(family_of(properties), UNKNOWN)
    return _plain(row, properties.multi_processor_count)


def _of_gpu(properties: Any) -> Tiles:
    """Row of the table, and over it what `hirank bench tune` found on such a GPU."""
    name = properties.name
    found = tabled(properties)
    obstacle = _obstacle(properties)
    if obstacle is not None:
        return replace(found, obstacle=obstacle)
    saved = _tuning_store.load(name, triton.__version__)
    if saved is not None:
        return _tuned(found, saved)
    if family_of(properties) not in TABLE:
        source = f"unknown GPU {name!r}: default tiles; run hirank bench tune"
        return replace(found, source=source)
    return found


def _obstacle(properties: Any) -> str | None:
    if not HAS_TRITON:
        return "Triton is not installed: pip install triton"
    capability = properties.major, properties.minor
    if _rocm() or capability >= _OLDEST:
        return None
    return (
        f"{properties.name} has compute capability {capability[0]}.{capability[1]}, and Triton "
        f"needs {_OLDEST[0]}.{_OLDEST[1]}"
    )


def _plain(row: Family, processors: int) -> Tiles:
    programs = row.programs * processors
    return Tiles(
        gain_forward=Elementwise(*row.gain_forward, programs),
        gain_backward=Elementwise(*row.gain_backward, programs),
        compose_forward=Elementwise(*row.compose_forward, programs),
        compose_backward=Elementwise(*row.compose_backward, programs),
        min_training=row.min_training,
        min_inference=row.min_inference,
        joined=tuple(
            Joined(m, n, k, warps, stages, processors, waves * processors)
            for m, n, k, warps, stages, waves in row.joined
        ),
        source=f"tiles measured on {row.tiles_from}" if row.tiles_from else "default tiles",
        crossover_source=(
            f"measured on {row.crossovers_from}" if row.crossovers_from else "a default, unmeasured"
        ),
    )


def _tuned(found: Tiles, saved: _tuning_store.Saved) -> Tiles:
    programs = found.gain_forward.programs
    found = replace(
        found,
        gain_forward=Elementwise(*saved.gain_forward, programs),
        compose_forward=Elementwise(*saved.compose_forward, programs),
        source=f"forward tiles tuned on this GPU, backward: {found.source}",
    )
    if saved.min_inference is None:
        return found
    return replace(
        found,
        min_inference=saved.min_inference,
        crossover_source=f"tuned for inference, else {found.crossover_source}",
    )


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)

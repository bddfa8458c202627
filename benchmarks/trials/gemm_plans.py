"""Ways to run the GEMM: which kernel with which tile, and how to launch it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from gemm_problem import Problem
from gemm_triton import descriptor_kernel, pointer_kernel
from torch import Tensor

from hirank.kernels._triton import dot_type

__all__ = ["KINDS", "Plan", "candidates", "fused", "launch", "multiprocessors"]

KINDS = ("pointers", "tma", "gluon-ws", "triton-ws")
_GROUP = 8  # rows of tiles that go down the columns together


@dataclass(frozen=True)
class Plan:
    """A kernel and its tile."""

    kind: str
    """One of KINDS: cp.async, TMA, warp-specialised in Gluon, warp-specialised by Triton."""
    block_m: int
    block_n: int
    block_k: int
    warps: int
    """Warps that multiply, of one group."""
    stages: int
    flatten: bool = True
    """Make one loop of tiles and steps, so that the loads of the next tile start early."""
    two_stores: bool = False
    """Store the left and the right half of a tile one after the other, in half the memory."""
    two_loops: bool = False
    """A loop for each product instead of one over both."""
    parts: int = 1
    """Groups of warps that share a tile, each with its rows (gluon-ws only)."""

    def __str__(self) -> str:
        said = f"{self.kind} {self.block_m}x{self.block_n}x{self.block_k}"
        said += f" {self.parts}x{self.warps}w {self.stages}s"
        flags = {"nested": not self.flatten, "2 stores": self.two_stores, "2 loops": self.two_loops}
        return " ".join([said, *(name for name, on in flags.items() if on)])


def candidates(kind: str) -> list[Plan]:
    """Plans worth a try on Hopper: none spills and all fit 227 KiB of shared memory."""
    if kind == "pointers":
        found = [(128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3)]
        return [Plan(kind, *tile) for tile in found]
    if kind == "tma":
        wide = Plan(kind, 128, 256, 64, 8, 3)
        return [
            wide,
            replace(wide, stages=4, two_stores=True),
            replace(wide, two_loops=True),
            replace(wide, flatten=False),
            Plan(kind, 128, 128, 64, 4, 5),
            Plan(kind, 64, 256, 64, 4, 4),
        ]
    if kind == "gluon-ws":
        return [
            Plan(kind, 128, 256, 64, 4, 4, two_stores=True, parts=2),
            Plan(kind, 256, 128, 64, 4, 4, two_stores=True, parts=2),
            Plan(kind, 128, 256, 64, 8, 4, two_stores=True),
            Plan(kind, 128, 128, 64, 4, 6, parts=2),
        ]
    return [
        Plan(kind, 128, 128, 64, 4, 3),
        Plan(kind, 128, 128, 64, 4, 3, two_loops=True),
        Plan(kind, 128, 256, 64, 8, 3),
    ]


def launch(plan: Plan, problem: Problem, out: Tensor, programs: int) -> Any:
    """Write `problem`'s result to `out` [M, N] with `programs` programs; the compiled kernel."""
    magnitude, norm, bias = problem.gain or (out, out, out)
    operands = (problem.a1, problem.b1, problem.a2, problem.b2, out)
    shared = {
        "HAS_GAIN": problem.gain is not None, "B_BY_COLUMN": problem.by_column,
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
        "GROUP": _GROUP, "PROGRAMS": programs, "num_warps": plan.warps,
    }  # fmt: skip
    rest = (magnitude, norm, bias, *problem.sizes)
    if plan.kind == "gluon-ws":
        return _launch_gluon(plan, problem, operands, rest, shared)
    shared |= {
        "FLATTEN": plan.flatten, "DOT": dot_type(out.dtype), "num_stages": plan.stages,
    }  # fmt: skip
    if plan.kind == "pointers":
        return pointer_kernel[(programs,)](*operands, *rest, **shared)
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptors = [
        TensorDescriptor.from_tensor(tensor, block)
        for tensor, block in zip(operands, _blocks(plan, problem.by_column), strict=True)
    ]
    return descriptor_kernel[(programs,)](
        *descriptors, *rest, **shared, TWO_STORES=plan.two_stores, TWO_LOOPS=plan.two_loops,
        WARP_SPECIALIZE=plan.kind == "triton-ws",
    )  # fmt: skip


def _launch_gluon(
    plan: Plan,
    problem: Problem,
    operands: tuple[Tensor, ...],
    rest: tuple[Any, ...],
    shared: dict[str, Any],
) -> Any:
    from gemm_gluon import specialised_kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    half = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[problem.a1.dtype]
    descriptors = [
        TensorDescriptor.from_tensor(
            tensor, block, gl.NVMMASharedLayout.get_default_for(block, half)
        )
        for tensor, block in zip(operands, _blocks(plan, problem.by_column), strict=True)
    ]
    return specialised_kernel[(shared["PROGRAMS"],)](
        *descriptors, *rest, **shared, STAGES=plan.stages, PARTS=plan.parts,
        TWO_STORES=plan.two_stores, WARPS=plan.warps,
    )  # fmt: skip


def _blocks(plan: Plan, by_column: bool) -> list[list[int]]:
    """What one TMA copy moves of a1, b1, a2, b2 and out."""
    rows, depth = plan.block_m // plan.parts, plan.block_k
    b = [plan.block_n, depth] if by_column else [depth, plan.block_n]
    width = plan.block_n // 2 if plan.two_stores else plan.block_n
    return [[rows, depth], b, [rows, depth], b, [rows, width]]


def fused(plan: Plan, problem: Problem, programs: int) -> Tensor:
    """One kernel."""
    m, n, _, _ = problem.sizes
    out = torch.empty(m, n, dtype=problem.a1.dtype, device=problem.a1.device)
    launch(plan, problem, out, programs)
    return out


def multiprocessors() -> int:
    """How many programs fill the GPU once."""
    return torch.cuda.get_device_properties(0).multi_processor_count

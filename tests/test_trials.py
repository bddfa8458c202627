"""The trials' kernels against fp64, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1).

The kernel in Gluon has no interpreter, and one that hangs would hang the tests: the trial itself
holds it to fp64, in a process of its own.
"""

import sys
from pathlib import Path

import pytest
import torch

from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.testing import assert_within_budget

TRIALS = Path(__file__).resolve().parent.parent / "benchmarks" / "trials"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
PROGRAMS = 3  # fewer than there are tiles, so that a program owns several

sys.path.insert(0, str(TRIALS))  # a trial imports its neighbours, as a script does
if HAS_TRITON:
    from gemm_plans import Plan, candidates, launch
    from gemm_problem import Problem, reference

needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (DEVICE == "cuda" or interpreting())),
    reason="needs a GPU or Triton's interpreter",
)
SHAPES = [
    # M, N, K1, K2: rows of 16 bytes are all that TMA asks for
    (70, 72, 40, 8),
    (33, 40, 136, 72),
    (16, 200, 64, 64),
]


def problem(shape, by_column, dtype=torch.float16, dead=()):
    m, n, k1, k2 = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=draw).to(DEVICE, dtype)

    def b(depth):
        return normal(n, depth) if by_column else normal(depth, n)

    norm = torch.rand(n, generator=draw).to(DEVICE) + 0.5
    norm[list(dead)] = 0
    magnitude = (torch.randn(n, generator=draw).to(DEVICE) * 0.2 + 1) * norm
    gain = (magnitude, norm, normal(n)) if by_column else None
    return Problem(normal(m, k1), b(k1), normal(m, k2), b(k2), by_column, gain)


def plain(case):
    """cuBLAS's way in the operands' dtype: three roundings."""
    b1, b2 = (case.b1.T, case.b2.T) if case.by_column else (case.b1, case.b2)
    out = (case.a1 @ b1).addmm_(case.a2, b2)
    if case.gain is None:
        return out
    magnitude, norm, bias = case.gain
    gain = torch.where(norm > 0, magnitude / norm, 1)
    return (out * gain).to(out.dtype) + bias


def check(plan, case):
    m, n, _, _ = case.sizes
    out = torch.full((m, n), torch.nan, dtype=case.a1.dtype, device=DEVICE)
    launch(plan, case, out, PROGRAMS)
    wanted = {"out": reference(case)}
    assert_within_budget({"out": out}, {"out": plain(case)}, wanted, case.a1.dtype)


@needs_kernels
@pytest.mark.parametrize("by_column", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        ("pointers", {}),
        ("tma", {}),
        ("tma", {"two_loops": True}),
        ("tma", {"two_stores": True, "flatten": False}),
    ],
    ids=str,
)
def test_one_kernel_is_two_products_gain_and_bias(plan, shape, by_column):
    kind, flags = plan
    if kind == "tma" and DEVICE == "cuda" and not HOPPER:
        pytest.skip("TMA came with Hopper")
    check(Plan(kind, 32, 32, 32, 4, 3, **flags), problem(shape, by_column))


@needs_kernels
def test_a_row_without_a_norm_keeps_a_gain_of_one():
    check(Plan("pointers", 32, 32, 32, 4, 3), problem(SHAPES[0], True, dead=(0, 5, 71)))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_names_of_candidates_tell_them_apart():
    for kind in ("pointers", "tma", "gluon-ws", "triton-ws"):
        names = [str(plan) for plan in candidates(kind)]
        assert len(set(names)) == len(names)

"""Triton where there is one; where not, names that let a kernel file be imported all the same."""

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit = triton.jit
except ImportError:
    triton = tl = None
    HAS_TRITON = False

    def jit(function: Any) -> Any:
        """Leave the kernel as it is: without Triton nothing launches it."""
        return function


__all__ = ["HAS_TRITON", "interpreting", "jit", "tl", "triton"]

INTERPRETING = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU, for tests of their logic."""
    return INTERPRETING

"""Triton where there is one; where not, names that let a kernel file be imported all the same."""

from typing import Any

import torch

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


__all__ = ["HAS_TRITON", "dot_type", "interpreting", "jit", "tl", "tl_type", "triton"]

INTERPRETING = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU, for tests of their logic."""
    return INTERPRETING


def tl_type(dtype: torch.dtype) -> Any:
    """Triton's name of a float dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def dot_type(dtype: torch.dtype) -> Any:
    """What the operands of a `tl.dot` are cast to. The interpreter cannot multiply bf16."""
    return tl.float32 if INTERPRETING and dtype == torch.bfloat16 else tl_type(dtype)

"""Registration: how PyTorch's dispatcher, compiler and fake tensors see our kernels.

`define` + one implementation a device + a fake one for shapes; autograd stays in a Function.
"""

from collections.abc import Callable
from typing import Any

import torch

from hirank.kernels._triton import HAS_TRITON, interpreting

__all__ = ["register_op"]

_LIBRARY = torch.library.Library("hirank", "DEF")


def register_op(
    schema: str,
    *,
    reference: Callable[..., Any],
    fused: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define `hirank::<schema>` and return the callable op.

    Args:
        schema: name, arguments and results in PyTorch's schema language.
        reference: plain PyTorch, for the CPU and where Triton is missing.
        fused: the Triton launcher, for CUDA, and for the CPU inside Triton's interpreter.
        fake: shapes and dtypes only.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, fused if interpreting() else reference, "CPU")
    _LIBRARY.impl(name, fused if HAS_TRITON else reference, "CUDA")
    torch.library.register_fake(f"hirank::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.hirank, name).default
    return op

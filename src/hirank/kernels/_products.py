"""Matrix products whose result is wider than their operands."""

import torch
from torch import Tensor

__all__ = ["product"]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b straight in `dtype`: where the device can, not rounded in between."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)

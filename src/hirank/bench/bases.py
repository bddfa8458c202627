"""Base linears of the suite `layer`: plain, or stored in few bits."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from hirank.adapters.dequantise import kind_of
from hirank.errors import HirankError

__all__ = ["BASES", "dequantised", "quantised"]

BASES = ("plain", "nf4")


def quantised(linear: nn.Linear, base: str) -> nn.Linear:
    """`linear` itself, or its weight in four bits (bitsandbytes), computing in the same dtype.

    Raises:
        HirankError: no such base, or bitsandbytes is not installed.
    """
    if base not in BASES:
        raise HirankError(f"--base got {base!r}: choose from {', '.join(BASES)}.")
    if base == "plain":
        return linear
    try:
        bits: Any = importlib.import_module("bitsandbytes.nn")
    except ImportError:
        raise HirankError("--base nf4 needs bitsandbytes: pip install 'hirank[quant]'.") from None
    dtype, device = linear.weight.dtype, linear.weight.device
    how: dict[str, Any] = {"quant_type": base}
    made = bits.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, **how
    )
    weight = linear.weight.data.cpu()
    made.weight = bits.Params4bit(weight, requires_grad=False, module=made, **how)
    found: nn.Linear = made.to(device)
    return found


def dequantised(linear: nn.Linear) -> nn.Linear:
    """A plain linear with the weight that `linear` multiplies by; itself where it is plain."""
    kind = kind_of(linear)
    if kind is None:
        return linear
    dtype: torch.dtype = kind.norm_dtype(linear) or torch.float32
    weight = kind.weight(linear, dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return plain

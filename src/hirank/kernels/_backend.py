"""The argument `backend` of every op: its values, and what they mean on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.kernels._tuning import Joined, pays, tiles
from hirank.kernels.gain_pass import (
    gain_backward,
    gain_backward_ref,
    gain_forward_,
    gain_forward_ref_,
)
from hirank.kernels.joined_gemm import joined_tile

__all__ = ["BACKENDS", "FUSED", "REFERENCE", "GainPass", "check_backend", "gain_pass_for"]

BACKENDS = ("auto", "triton", "torch")


class GainPass(NamedTuple):
    """How one backend brings in the gain: a pass forward in place, one backward."""

    forward_: Callable[..., Any]
    backward: Callable[..., Any]
    tile: Callable[..., Joined | None]
    """The tile with which one GEMM does both products and the forward pass; None: GEMMs apart."""


REFERENCE = GainPass(gain_forward_ref_, gain_backward_ref, lambda *operands, by_column: None)
FUSED = GainPass(gain_forward_, gain_backward, joined_tile)  # where Triton runs, else as above


def check_backend(backend: str, device: torch.device) -> None:
    """Raises ValueError: no such backend, or "triton" where Triton cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend got {backend!r}: choose from {', '.join(BACKENDS)}.")
    obstacle = tiles(device).obstacle if backend == "triton" else None
    if obstacle is not None:
        raise ValueError(f"backend got 'triton' on {device} ({obstacle}): use 'auto'.")


def gain_pass_for(backend: str, x: Tensor, n: int) -> GainPass:
    """Which pass joins the branches of a layer with x [..., K] and N = n out features."""
    if backend == "auto":
        elements = x.numel() // max(x.shape[-1], 1) * n
        return FUSED if pays(elements, x.device, torch.is_grad_enabled()) else REFERENCE
    check_backend(backend, x.device)
    return FUSED if backend == "triton" else REFERENCE

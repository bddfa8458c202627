"""The argument `backend` of every op: its values, and what they mean on a device."""

from __future__ import annotations

import torch

from hirank.kernels._tuning import tiles

__all__ = ["BACKENDS", "check_backend"]

BACKENDS = ("auto", "triton", "torch")


def check_backend(backend: str, device: torch.device) -> None:
    """Raises ValueError: no such backend, or "triton" where Triton cannot run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend got {backend!r}: choose from {', '.join(BACKENDS)}.")
    obstacle = tiles(device).obstacle if backend == "triton" else None
    if obstacle is not None:
        raise ValueError(f"backend got 'triton' on {device} ({obstacle}): use 'auto'.")

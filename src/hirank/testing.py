"""Tolerances that are earned, for our tests and for downstream users.

A result may err twice as much as the plain PyTorch formula does in the same dtype, both measured
against the formula in fp64 on the very same (already rounded) inputs. One relative RMS number per
tensor, output and every gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._triton import interpreting

__all__ = [
    "FLOATS",
    "LINEAR_SHAPES",
    "LinearCase",
    "assert_within_budget",
    "outputs_and_gradients",
    "plain_dora_linear",
    "relative_rms",
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LINEAR_SHAPES = (
    # M tokens, N out, K in, R rank: odd on purpose, none a multiple of any tile
    (1, 64, 64, 1),
    (7, 123, 65, 3),
    (33, 40, 200, 16),
    (0, 48, 32, 4),
    (19, 96, 64, 80),
)

_FACTOR = 2.0
# Half of one rounding of the dtype: what a result that errs once, somewhere, may show even where
# the plain formula happens to be exact. In fp64 the truth is that formula itself: a few bits.
_FLOOR = {
    torch.float64: 2.0**-48,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
}


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """RMS of the difference over RMS of the truth, in fp64; 0 for empty tensors."""
    if truth.numel() == 0:
        return 0.0
    truth = truth.double()
    error = (actual.to(truth) - truth).square().mean().sqrt()
    return float(error / truth.square().mean().sqrt().clamp_min(1e-300))


@dataclass(frozen=True)
class LinearCase:
    """Inputs of one adapted linear. The magnitude is drawn around the norm, so that g is not 1."""

    x: Tensor  # [..., K]
    weight: Tensor  # [N, K]
    lora_A: Tensor  # [R, K]
    lora_B: Tensor  # [N, R]
    magnitude: Tensor | None  # [N]
    bias: Tensor | None  # [N]
    scale: float

    @staticmethod
    def make(
        shape: tuple[int, int, int, int],
        *,
        seed: int = 0,
        bias: bool = True,
        dora: bool = True,
        scale: float = 2.0,
    ) -> "LinearCase":
        """A seeded case in fp64 of shape (M, N, K, R)."""
        m, n, k, r = shape
        draw = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, dtype=torch.float64)

        weight, A, B = normal(n, k) / k**0.5, normal(r, k) / k**0.5, normal(n, r) / (4 * r)
        norm = (weight + scale * B @ A).norm(dim=1)
        magnitude = norm * (1 + 0.2 * normal(n)) if dora else None
        return LinearCase(normal(m, k), weight, A, B, magnitude, normal(n) if bias else None, scale)

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> "LinearCase":
        """Rounded to `dtype`; the magnitude to fp32 at least, as hirank keeps it."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def cast(tensor: Any, to: torch.dtype = dtype) -> Any:
            return None if tensor is None else tensor.to(device=device, dtype=to)

        return replace(
            self,
            x=cast(self.x),
            weight=cast(self.weight),
            lora_A=cast(self.lora_A),
            lora_B=cast(self.lora_B),
            magnitude=cast(self.magnitude, wide),
            bias=cast(self.bias),
        )

    def leaves(self) -> dict[str, Tensor]:
        """Fresh leaves of what wants a gradient, by name."""
        named = {
            "x": self.x,
            "lora_A": self.lora_A,
            "lora_B": self.lora_B,
            "magnitude": self.magnitude,
            "bias": self.bias,
        }
        return {k: v.detach().clone().requires_grad_() for k, v in named.items() if v is not None}


def plain_dora_linear(case: LinearCase, **leaves: Tensor) -> Tensor:
    """The textbook formula in the case's dtype; in fp64 it is the truth. Zero rows take g = 1."""
    x, A, B = leaves["x"], leaves["lora_A"], leaves["lora_B"]
    out = x @ case.weight.T + case.scale * (x @ A.T) @ B.T
    if "magnitude" in leaves:
        wide = torch.promote_types(case.weight.dtype, torch.float32)
        dense = case.weight.to(wide) + case.scale * B.detach().to(wide) @ A.detach().to(wide)
        norm = dense.norm(dim=1)
        dead = norm == 0
        gain = (leaves["magnitude"] / norm.masked_fill(dead, 1)).masked_fill(dead, 1)
        out = gain.to(out.dtype) * out
    return out + leaves["bias"] if "bias" in leaves else out


def outputs_and_gradients(
    function: Callable[..., Tensor], leaves: Mapping[str, Tensor], seed: int = 1
) -> dict[str, Tensor]:
    """`function(**leaves)` and the gradients of a seeded random projection of it, by name."""
    out = function(**leaves)
    draw = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{k}": g for k, g in zip(leaves, grads, strict=True)}}


def assert_within_budget(
    candidate: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    factor: float | None = None,
) -> None:
    """Every tensor of `candidate` errs at most `factor` (2) times as much as the plain formula.

    Triton's interpreter rounds to bf16 towards zero, which doubles the RMS error of a store: there
    the factor for bf16 is 3. Precision claims come from a GPU.

    Raises:
        AssertionError: naming the tensor and both errors.
    """
    if factor is None:
        factor = 3.0 if interpreting() and dtype == torch.bfloat16 else _FACTOR
    for name, exact in truth.items():
        got, allowed = relative_rms(candidate[name], exact), relative_rms(plain[name], exact)
        bound = factor * max(allowed, _FLOOR[dtype])
        assert got <= bound, f"{name}: relative RMS error {got:.3e}, plain {allowed:.3e} in {dtype}"

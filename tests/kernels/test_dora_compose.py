"""Joining a frozen branch that somebody else computed with the low-rank branch."""

import pytest
import torch

from hirank.kernels.dora_compose import dora_compose, dora_compose_ref
from hirank.testing import FLOATS, assert_within_budget, outputs_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 64), (7, 123), (33, 200), (0, 64), (2, 3, 5, 16), (12,)]
SCALE = 1.5


def make(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 0.2):
    draw = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    base, lora = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    gain = 1 + spread * torch.randn(shape[-1], generator=draw, dtype=torch.float64)
    return {"base": base.to(DEVICE), "lora": lora.to(DEVICE), "gain": gain.to(DEVICE, wide)}


def leaves(tensors, dtype=None):
    return {k: v.to(dtype or v.dtype).clone().requires_grad_() for k, v in tensors.items()}


def formula(base, lora, gain):
    return (gain.to(base.dtype) - 1) * base + gain.to(base.dtype) * (SCALE * lora)


def ours(base, lora, gain):
    return dora_compose(base, lora, gain, scale=SCALE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_output_and_gradients_within_budget(shape, dtype):
    tensors = make(shape, dtype)
    truth = outputs_and_gradients(formula, leaves(tensors, torch.float64))
    plain = outputs_and_gradients(formula, leaves(tensors))
    got = outputs_and_gradients(ours, leaves(tensors))
    assert got["out"].dtype == dtype and got["dgain"].dtype == tensors["gain"].dtype
    assert_within_budget(got, plain, truth, dtype)


def test_gain_of_one_leaves_the_scaled_branch():
    tensors = make((9, 32), torch.bfloat16) | {"gain": torch.ones(32, device=DEVICE)}
    expected = (SCALE * tensors["lora"].float()).bfloat16()
    assert torch.equal(ours(**tensors), expected)


def test_corrections_below_bf16_resolution_survive():
    """|g - 1| < 2^-9: rounding g to bf16 first, as the naive form does, loses them entirely."""
    tensors = make((64, 128), torch.bfloat16, spread=2.0**-11)
    tensors["lora"] = torch.zeros_like(tensors["lora"])
    exact = (tensors["gain"].double() - 1) * tensors["base"].double()
    naive = (tensors["gain"].bfloat16() - 1) * tensors["base"]
    ours_error = (ours(**tensors).double() - exact).norm() / exact.norm()
    naive_error = (naive.double() - exact).norm() / exact.norm()
    assert ours_error < 2.0**-8
    assert naive_error > 0.9


def test_gradients_of_gradients():
    tensors = leaves(make((3, 8), torch.float64))
    assert torch.autograd.gradgradcheck(ours, tuple(tensors.values()))


def test_strided_inputs():
    tensors = make((8, 24), torch.float32)
    strided = {k: v.repeat_interleave(2, -1)[..., ::2] for k, v in tensors.items()}
    assert not strided["base"].is_contiguous()
    assert torch.equal(ours(**strided), ours(**tensors))


def test_reference_is_the_path_taken():
    tensors = make((8, 24), torch.float32)
    assert torch.equal(ours(**tensors), dora_compose_ref(*tensors.values(), SCALE))


def test_inputs_that_do_not_fit_are_named():
    tensors = make((8, 24), torch.float32)
    with pytest.raises(ValueError, match="base and lora must agree"):
        ours(tensors["base"], tensors["lora"].bfloat16(), tensors["gain"])
    with pytest.raises(ValueError, match="one entry per last dimension"):
        ours(tensors["base"], tensors["lora"], tensors["gain"][:3])

"""The elementwise pass: Triton against its reference, on a GPU or in Triton's interpreter.

On a plain CPU the op is the reference, and the tests hold that to fp64.
"""

import pytest
import torch

from hirank.kernels.dora_norm import dora_gain
from hirank.kernels.gain_pass import gain_backward, gain_forward_
from hirank.testing import assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 64, 32, 1), (7, 123, 65, 5), (70, 300, 33, 17), (0, 48, 32, 4)]
GPU_SHAPES = [(4096, 4096, 4096, 384), (1000, 11008, 4096, 64), (8191, 12288, 512, 1)]


def make(shape, dtype, bias=True, seed=0):
    m, n, k, r = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=draw).to(DEVICE, dtype)

    x, weight, h, B = normal(m, k) / k**0.5, normal(n, k), normal(m, r) / r, normal(n, r)
    norm = torch.rand(n, generator=draw).to(DEVICE) + 0.5
    magnitude = norm * (1 + 0.2 * torch.randn(n, generator=draw).to(DEVICE))
    b = normal(n) if bias else None
    u = x @ weight.T + h @ B.T + (0 if b is None else b)
    return u, magnitude, norm, b, normal(m, n), x, h, weight, B


def formula(u, magnitude, norm, bias, dy, x, h, weight, B, dtype):
    """y, t and dm by the definition, in `dtype`."""
    gain = dora_gain(magnitude.to(dtype), norm.to(dtype))
    bias = 0 if bias is None else bias.to(dtype)
    v, dy = u.to(dtype) - bias, dy.to(dtype)
    exact = x.to(dtype) @ weight.to(dtype).T + h.to(dtype) @ B.to(dtype).T
    dm = torch.where(norm > 0, (dy * exact).sum(0) / torch.where(norm > 0, norm, 1).to(dtype), 0)
    return {"y": gain * v + bias, "t": gain * dy, "dm": dm}


def run(inputs, y=...):
    u, magnitude, norm, bias, dy, x, h, weight, B = inputs
    out = u.clone()
    gain_forward_(out, magnitude, norm, bias)
    t, dm = gain_backward(dy, out if y is ... else y, magnitude, norm, bias, x, h, weight, B, True)
    return {"y": out, "t": t, "dm": dm}


def check(inputs, dtype, **kwargs):
    got = run(inputs, **kwargs)
    truth = formula(*inputs, torch.float64)
    plain = formula(*inputs, dtype)
    assert_within_budget(got, plain, truth, dtype)
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_within_budget(shape, dtype, bias):
    check(make(shape, dtype, bias), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_a_branch_that_comes_apart_is_rounded_with_the_rest(shape, dtype, bias):
    u, magnitude, norm, row, lora, *_ = make(shape, dtype, bias)
    if norm.numel():
        norm[1] = 0

    def formula(dtype):
        gain = dora_gain(magnitude, norm).to(dtype)
        found = gain * (u.to(dtype) + lora.to(dtype))
        return found if row is None else found + (1 - gain) * row.to(dtype)

    out = u.clone()
    gain_forward_(out, magnitude, norm, row, lora)
    truth = {"y": formula(torch.float64)}
    assert_within_budget({"y": out}, {"y": formula(dtype)}, truth, dtype)
    out = u.clone()
    gain_forward_(out, norm, norm, row, torch.zeros_like(u))
    assert torch.equal(out, u)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_within_budget(shape, dtype):
    check(make(shape, dtype), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_columns_that_y_no_longer_holds(dtype):
    inputs = make((70, 123, 65, 5), dtype)
    magnitude, norm = inputs[1], inputs[2]
    magnitude[3], magnitude[40], norm[77] = 0, 1e-7, 0
    got = check(inputs, dtype)
    assert got["dm"][77] == 0 and got["dm"][3].abs() > 1e-3
    assert (got["t"][:, 3] == 0).all()
    assert torch.equal(got["t"][:, 77], inputs[4][:, 77])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_without_y(dtype):
    check(make((70, 123, 65, 5), dtype), dtype, y=None)


def test_large_activations_and_gains_below_bf16_resolution():
    inputs = list(make((33, 64, 32, 4), torch.bfloat16))
    inputs[0] *= 1e4
    inputs[1] = inputs[2] * (1 + 2.0**-11)
    out = inputs[0].clone()
    gain_forward_(out, inputs[1], inputs[2], None)
    exact = inputs[0].double() * (inputs[1].double() / inputs[2].double())
    assert (out.double() - exact).norm() / exact.norm() < 2.0**-8 * (1 + 2.0**-6)


def test_gain_of_one_changes_no_bit():
    for bias in (False, True):
        u, _, norm, b, *_ = make((33, 64, 32, 4), torch.bfloat16, bias)
        out = u.clone()
        gain_forward_(out, norm.clone(), norm, b)
        assert torch.equal(out, u)


def test_two_runs_agree_bit_for_bit():
    inputs = make((70, 300, 33, 17), torch.bfloat16)
    first, second = run(inputs), run(inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_opcheck():
    u, magnitude, norm, bias, dy, x, h, weight, B = make((7, 40, 32, 4), torch.float32)
    torch.library.opcheck(
        torch.ops.hirank.gain_forward_.default, (u.clone(), magnitude, norm, bias, dy)
    )
    torch.library.opcheck(
        torch.ops.hirank.gain_backward.default,
        (dy, u, magnitude, norm, bias, x, h, weight, B, True),
    )

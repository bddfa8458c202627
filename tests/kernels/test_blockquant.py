"""Block-wise quantisation: its error, its mean, and its bytes."""

import pytest
import torch

from hirank.kernels.blockquant import (
    BLOCK,
    affine_bytes,
    dequantize_affine,
    dequantize_power,
    power_bytes,
    quantize_affine,
    quantize_power,
    requantize_affine,
    round_to_bf16,
)

SIZES = [1, 2, 7, 255, 256, 257, 1000]
MOMENTS = [pytest.param(2, True, id="first"), pytest.param(4, False, id="second")]


def roundtrip(x: torch.Tensor, bits: int, noise: torch.Tensor | None = None) -> torch.Tensor:
    return dequantize_affine(*quantize_affine(x, bits, noise), x.numel(), bits, torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0], [0.5] * 4, [-3.0, -1.0], [0.0] * 4, [1e-6, 1e6], [-2.0, 5.0, 0.1]],
    ids=str,
)
def test_g14_blocks_of_one_sign_survive(bits: int, values: list[float]):
    x = torch.tensor(values)
    step = (x.max().clamp_min(0) - x.min().clamp_max(0)) / (2**bits - 1)
    assert (roundtrip(x, bits) - x).abs().max() <= step / 2 + 1e-12


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", SIZES)
def test_affine_error_is_half_a_step_of_its_own_block(bits: int, n: int):
    x = torch.randn(n) * torch.logspace(-3, 3, n)
    back = roundtrip(x, bits)
    for start in range(0, n, BLOCK):
        block, got = x[start : start + BLOCK], back[start : start + BLOCK]
        step = (block.max() - block.min()) / (2**bits - 1)
        assert (got - block).abs().max() <= step * 0.5001 + block.abs().max() * 2**-23


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_affine_bytes(n: int, bits: int):
    parts = quantize_affine(torch.randn(n), bits)
    assert sum(part.numel() * part.element_size() for part in parts) == affine_bytes(n, bits)


@pytest.mark.parametrize(("power", "signed"), MOMENTS)
@pytest.mark.parametrize("n", SIZES)
def test_power_bytes(n: int, power: int, signed: bool):
    parts = quantize_power(torch.rand(n), power, signed=signed)
    assert sum(part.numel() * part.element_size() for part in parts) == power_bytes(n)


def test_two_codes_share_a_byte():
    codes, _, _ = quantize_affine(torch.arange(16.0), 4)
    assert codes.tolist() == [16 * (i + 1) + i for i in range(0, 16, 2)]


@pytest.mark.parametrize("bits", [4, 8])
def test_affine_stochastic_rounding_is_unbiased(bits: int):
    x, draws = torch.randn(BLOCK), 4000
    drawn = roundtrip(x.repeat(draws), bits, torch.rand(draws * BLOCK))
    mean = drawn.view(draws, BLOCK).mean(0)
    step = (x.max() - x.min()) / (2**bits - 1)
    # A draw's standard deviation is at most half a step; five of the mean's for 256 numbers.
    assert (mean - x).abs().max() <= 5 * step / 2 / draws**0.5


@pytest.mark.parametrize(("power", "signed"), MOMENTS)
def test_power_stochastic_rounding_is_unbiased(power: int, signed: bool):
    x, draws = torch.randn(BLOCK) if signed else torch.randn(BLOCK) ** 2, 4000
    total, squares = torch.zeros(BLOCK, dtype=torch.float64), torch.zeros(BLOCK).double()
    for _ in range(draws):
        codes, absmax = quantize_power(x, power, signed=signed, noise=torch.rand(BLOCK))
        got = dequantize_power(codes, absmax, power).double()
        total, squares = total + got, squares + got**2
    mean = total / draws
    deviation = ((squares / draws - mean**2).clamp_min(0) / draws).sqrt()
    assert ((mean - x).abs() <= 5 * deviation + 1e-6 * x.abs().max()).all()


def test_a_positive_second_moment_never_becomes_zero():
    x = torch.tensor([1.0, 1e-12, 0.0])
    for noise in (None, torch.zeros(3), torch.full((3,), 0.999)):
        codes, absmax = quantize_power(x, 4, signed=False, noise=noise)
        assert (dequantize_power(codes, absmax, 4) > 0).tolist() == [True, True, False]


def test_power_maps_keep_small_numbers_beside_large_ones():
    x = torch.logspace(-3, 0, BLOCK)
    codes, absmax = quantize_power(x, 2, signed=True)
    assert ((dequantize_power(codes, absmax, 2) - x).abs() / x).max() < 0.25
    codes, absmax = quantize_power(x**2, 4, signed=False)
    assert ((dequantize_power(codes, absmax, 4) - x**2).abs() / x**2).max() < 0.3


def test_codes_read_and_written_again_stay():
    x = torch.randn(1000)
    codes, absmax = quantize_power(x, 2, signed=True)
    again, _ = quantize_power(dequantize_power(codes, absmax, 2), 2, signed=True)
    assert torch.equal(codes, again)


def test_bf16_stochastic_rounding_is_unbiased_and_exact_on_bf16():
    x, draws = torch.randn(64), 8000
    bits = torch.randint(2**16, (draws, 64), dtype=torch.int32)
    mean = round_to_bf16(x.expand(draws, 64), bits).double().mean(0)
    step = 2.0**-7 * x.abs()  # an upper bound of the distance of two neighbours
    assert ((mean - x).abs() <= 5 * step / 2 / draws**0.5).all()
    already = x.bfloat16()
    assert torch.equal(round_to_bf16(already.float().expand(draws, 64), bits)[17], already)


def test_a_grid_is_kept_while_it_fits_and_left_when_it_does_not():
    x = torch.linspace(-1, 1, BLOCK)
    _, scale, low = quantize_affine(x, 8)
    _, same_scale, same_low = requantize_affine(0.9 * x, scale, low)
    assert torch.equal(same_scale, scale) and torch.equal(same_low, low)
    for factor in (1.001, 0.4):
        codes, new_scale, new_low = requantize_affine(factor * x, scale, low)
        assert new_scale != scale and 0 < codes.min() and codes.max() < 255
        back = dequantize_affine(codes, new_scale, new_low, BLOCK, 8, torch.float32)
        assert (back - factor * x).abs().max() <= 0.5001 * new_scale

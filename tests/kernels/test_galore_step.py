"""Adam on int8 moments and the way back to int8 weights: launches round as the reference does."""

import sys
from pathlib import Path

import pytest
import torch

from hirank.kernels.blockquant import BLOCK, dequantize_affine, dequantize_power, quantize_affine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trials"))  # it is a trial
from galore_step import (
    Adam,
    Blocks,
    Moments,
    adam_int8_,
    adam_int8_ref_,
    back_int8_,
    back_int8_ref_,
)

ADAM = Adam(0.9, 0.999, 1e-8, 1)
SIZES = [1, 255, 256, 700, 2048]


def zeros(n: int, device: torch.device) -> Moments:
    blocks = -(-n // BLOCK)
    return Moments(
        torch.zeros(n, dtype=torch.int8, device=device),
        torch.zeros(blocks, device=device),
        torch.zeros(n, dtype=torch.uint8, device=device),
        torch.zeros(blocks, device=device),
    )


def copied(parts):
    return type(parts)(*(part.clone() for part in parts))


def noise(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, device=device), torch.rand(n, device=device)


def close_codes(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but where the last bit of fp32 decides: one code, of hardly any."""
    apart = (ours.int() - theirs.int()).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= max(1, 0.002 * apart.numel())


@pytest.mark.parametrize("n", SIZES)
def test_moments_and_direction_are_the_references(n: int, device: torch.device):
    ours = zeros(n, device)
    theirs = copied(ours)
    ok = torch.ones((), dtype=torch.bool, device=device)
    for age in range(1, 4):
        grad = torch.randn(n, device=device) * torch.logspace(-3, 3, n, device=device)
        draw, adam = noise(n, device), ADAM._replace(age=age)
        a = adam_int8_(grad, ours, draw, ok, adam)
        b = adam_int8_ref_(grad, theirs, draw, ok, adam)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        close_codes(ours.first, theirs.first)
        close_codes(ours.second, theirs.second)
        torch.testing.assert_close(ours.first_max, theirs.first_max)
        torch.testing.assert_close(ours.second_max, theirs.second_max)
        theirs = copied(ours)


def test_the_direction_is_adams_in_fp64(device: torch.device):
    """The first step, where the moments hold nothing yet: no rounding comes in."""
    grad, ok = torch.randn(600, device=device), torch.tensor(True, device=device)
    got = adam_int8_(grad, zeros(600, device), noise(600, device), ok, ADAM)
    wide = grad.double()
    torch.testing.assert_close(got.double(), wide / (wide.abs() + 1e-8), rtol=1e-5, atol=1e-6)


def test_moments_are_right_on_average(device: torch.device):
    """The same block many times over, each with noise of its own."""
    block, times = torch.randn(BLOCK, device=device), 200
    moments = zeros(times * BLOCK, device)
    ok = torch.tensor(True, device=device)
    adam_int8_(block.repeat(times), moments, noise(times * BLOCK, device), ok, ADAM)
    mean = dequantize_power(moments.first, moments.first_max, 2).view(times, BLOCK).mean(0)
    assert (mean - 0.1 * block).norm() < 0.01 * (0.1 * block).norm()


def test_a_step_that_is_not_ok_changes_nothing(device: torch.device):
    grad, ok = torch.randn(700, device=device), torch.tensor(True, device=device)
    moments = zeros(700, device)
    adam_int8_(grad, moments, noise(700, device), ok, ADAM)
    before = copied(moments)
    poisoned = grad.clone()
    poisoned[5] = float("nan")
    out = adam_int8_(poisoned, moments, noise(700, device), ~ok, ADAM._replace(age=2))
    assert (out == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, moments, strict=True))


def test_a_second_moment_never_becomes_zero(device: torch.device):
    grad = torch.full((256,), 1e-6, device=device)
    grad[0], ok = 1.0, torch.tensor(True, device=device)
    moments = zeros(256, device)
    adam_int8_(grad, moments, noise(256, device), ok, ADAM)
    assert (moments.second > 0).all()


def weight(m: int, n: int, device: torch.device) -> Blocks:
    return Blocks(*quantize_affine(0.02 * torch.randn(m, n, device=device), 8))


def widened(blocks: Blocks) -> torch.Tensor:
    return dequantize_affine(*blocks, blocks.codes.numel(), 8, torch.float32)


@pytest.mark.parametrize("shape", [(3, 256), (17, 512), (32, 768), (5, 100)], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 40])
@pytest.mark.parametrize("step", [1e-5, 1e-2])
def test_the_way_back_is_the_references(shape, rank: int, step: float, device: torch.device):
    (m, n), ours = shape, weight(*shape, device)
    theirs = copied(ours)
    a, b = torch.randn(m, rank, device=device), torch.randn(rank, n, device=device)
    draw = torch.rand(m * n, device=device)
    back_int8_(ours, a, b, draw, step=step, keep=0.999)
    back_int8_ref_(theirs, a, b, draw, step=step, keep=0.999)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(ours.low, theirs.low, rtol=1e-4, atol=1e-7)
    close_codes(ours.codes, theirs.codes)


def test_weights_move_by_the_product_on_average(device: torch.device):
    """The same row many times over; steps of a third of a code."""
    times, step = 200, 3e-4
    row = weight(1, BLOCK, device)
    moved = Blocks(row.codes.repeat(times), row.scale.repeat(times), row.low.repeat(times))
    a, b = torch.randn(1, 2, device=device), torch.randn(2, BLOCK, device=device)
    back_int8_(moved, a.repeat(times, 1), b, torch.rand(times * BLOCK, device=device), step=step)
    change = (widened(moved).view(times, BLOCK) - widened(row)).mean(0).double()
    truth = -step * (a.double() @ b.double()).view(-1)
    assert (change - truth).norm() < 0.2 * truth.norm()
    assert float((change @ truth) / (truth @ truth)) == pytest.approx(1, abs=0.05)


def test_no_step_keeps_every_code(device: torch.device):
    start = weight(64, 512, device)
    kept = copied(start)
    zero = torch.zeros(64, 4, device=device)
    back_int8_(kept, zero, torch.randn(4, 512, device=device), torch.rand(64 * 512), step=1.0)
    assert torch.equal(start.codes, kept.codes) and torch.equal(start.scale, kept.scale)


def test_shapes_that_do_not_fit_are_refused(device: torch.device):
    with pytest.raises(ValueError, match="moments and noise of"):
        ok = torch.tensor(True)
        adam_int8_(torch.zeros(3), zeros(4, device), noise(3, device), ok, ADAM)
    with pytest.raises(ValueError, match=r"give A \[m, r\]"):
        back_int8_(
            weight(2, 256, device), torch.ones(2, 3), torch.ones(4, 256), torch.ones(512), step=1
        )

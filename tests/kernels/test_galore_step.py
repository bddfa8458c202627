"""Adam on int8 moments and moves of rounded weights: launches round as the reference does."""

import pytest
import torch

from hirank.kernels._noise import random_bits_ref, uniform_ref
from hirank.kernels.blockquant import BLOCK, dequantize_affine, dequantize_power, quantize_affine
from hirank.kernels.galore_step import (
    Adam,
    Blocks,
    Moments,
    Move,
    adam_int8_,
    adam_int8_ref_,
    move_bf16_,
    move_bf16_ref_,
    move_int8_,
    move_int8_ref_,
)

ADAM = Adam(0.9, 0.999, 1e-8, 1)
SIZES = [1, 255, 256, 700, 2048]
SEED = 2**61 + 12345


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


def yes(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.bool, device=device)


def close_codes(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but where the last bit of fp32 decides: one code, of hardly any."""
    apart = (ours.int() - theirs.int()).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= max(1, 0.002 * apart.numel())


# Noise.


def test_noise_is_uniform_and_of_no_other_seed_or_place(device: torch.device):
    n = 100_000
    one, other = uniform_ref(7, 0, n, device), uniform_ref(8, 0, n, device)
    assert 0 <= one.min() and one.max() < 1
    assert float(one.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(one.var()) == pytest.approx(1 / 12, abs=0.002)
    for shift in (0, 1, 256):
        both = torch.stack([one[shift:], other[: n - shift]])
        assert torch.corrcoef(both)[0, 1].abs() < 0.015
        if shift:
            both = torch.stack([one[shift:], one[: n - shift]])
            assert torch.corrcoef(both)[0, 1].abs() < 0.015


def test_every_bit_of_the_noise_is_a_coin(device: torch.device):
    bits = random_bits_ref(SEED, 0, 50_000, device)
    shares = torch.stack([(bits >> i & 1).float().mean() for i in range(32)])
    assert (shares - 0.5).abs().max() < 0.012


def test_a_piece_draws_what_the_whole_draws(device: torch.device):
    whole = random_bits_ref(SEED, 0, 1000, device)
    assert torch.equal(whole[256:], random_bits_ref(SEED, 256, 744, device))
    assert torch.equal(whole.cpu(), random_bits_ref(SEED, 0, 1000, torch.device("cpu")))
    assert whole.unique().numel() == 1000
    far = random_bits_ref(SEED, 2**31 - 8, 16, device)  # places past 31 bits go on
    assert torch.equal(far[8:], random_bits_ref(SEED, 2**31, 8, device))


# Adam.


@pytest.mark.parametrize("n", SIZES)
def test_moments_and_direction_are_the_references(n: int, device: torch.device):
    ours = zeros(n, device)
    theirs = copied(ours)
    for age in range(1, 4):
        grad = torch.randn(n, device=device) * torch.logspace(-3, 3, n, device=device)
        rest = (yes(device), ADAM._replace(age=age), SEED + 2 * age, 512)
        a = adam_int8_(grad, ours, *rest)
        b = adam_int8_ref_(grad, theirs, *rest)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        close_codes(ours.first, theirs.first)
        close_codes(ours.second, theirs.second)
        torch.testing.assert_close(ours.first_max, theirs.first_max)
        torch.testing.assert_close(ours.second_max, theirs.second_max)
        theirs = copied(ours)


def test_the_direction_is_adams_in_fp64(device: torch.device):
    """The first step, where the moments hold nothing yet: no rounding comes in."""
    grad = torch.randn(600, device=device)
    got = adam_int8_(grad, zeros(600, device), yes(device), ADAM, SEED)
    wide = grad.double()
    torch.testing.assert_close(got.double(), wide / (wide.abs() + 1e-8), rtol=1e-5, atol=1e-6)


def test_16_bits_in_and_out(device: torch.device):
    grad = torch.randn(3, 300, device=device).bfloat16()
    ours, theirs = zeros(900, device), zeros(900, device)
    got = adam_int8_(grad, ours, yes(device), ADAM, SEED, dtype=torch.bfloat16)
    wide = adam_int8_(grad.float(), theirs, yes(device), ADAM, SEED)
    assert got.dtype == torch.bfloat16 and got.shape == (3, 300)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (got.float() - wide).norm() < 2**-7 * wide.norm()


def test_a_piece_steps_as_the_whole_does(device: torch.device):
    grad, whole, parts = torch.randn(1024, device=device), zeros(1024, device), zeros(1024, device)
    out = adam_int8_(grad, whole, yes(device), ADAM, SEED)
    for i in (0, 512):
        piece = Moments(
            parts.first[i : i + 512],
            parts.first_max[i // BLOCK : i // BLOCK + 2],
            parts.second[i : i + 512],
            parts.second_max[i // BLOCK : i // BLOCK + 2],
        )
        got = adam_int8_(grad[i : i + 512], piece, yes(device), ADAM, SEED, i)
        assert torch.equal(got, out[i : i + 512])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_moments_are_right_on_average(device: torch.device):
    """The same block many times over, each at places of its own."""
    block, times = torch.randn(BLOCK, device=device), 200
    moments = zeros(times * BLOCK, device)
    adam_int8_(block.repeat(times), moments, yes(device), ADAM, SEED)
    mean = dequantize_power(moments.first, moments.first_max, 2).view(times, BLOCK).mean(0)
    assert (mean - 0.1 * block).norm() < 0.01 * (0.1 * block).norm()
    mean = dequantize_power(moments.second, moments.second_max, 4).view(times, BLOCK).mean(0)
    truth = 0.001 * block.square()
    assert (mean - truth).norm() < 0.01 * truth.norm()


def test_a_step_that_is_not_ok_changes_nothing(device: torch.device):
    grad, moments = torch.randn(700, device=device), zeros(700, device)
    adam_int8_(grad, moments, yes(device), ADAM, SEED)
    before = copied(moments)
    poisoned = grad.clone()
    poisoned[5] = float("nan")
    out = adam_int8_(poisoned, moments, ~yes(device), ADAM._replace(age=2), SEED)
    assert (out == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, moments, strict=True))


def test_a_second_moment_never_becomes_zero(device: torch.device):
    grad = torch.full((256,), 1e-6, device=device)
    grad[0] = 1.0
    moments = zeros(256, device)
    adam_int8_(grad, moments, yes(device), ADAM, SEED)
    assert (moments.second > 0).all()


# Weights.


def weight(n: int, device: torch.device) -> Blocks:
    return Blocks(*quantize_affine(0.02 * torch.randn(n, device=device), 8))


def widened(blocks: Blocks) -> torch.Tensor:
    return dequantize_affine(*blocks, blocks.codes.numel(), 8, torch.float32)


@pytest.mark.parametrize("n", [*SIZES, 5000])
@pytest.mark.parametrize("step", [1e-5, 1e-2])
@pytest.mark.parametrize("keep", [None, 0.999])
def test_int8_weights_move_as_the_references(n: int, step: float, keep, device: torch.device):
    ours = weight(n, device)
    theirs, delta = copied(ours), torch.randn(n, device=device)
    kept = None if keep is None else torch.tensor(keep, device=device)
    move = Move(step, kept, SEED, 256)
    move_int8_(ours, delta, move)
    move_int8_ref_(theirs, delta, move)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(ours.low, theirs.low, rtol=1e-4, atol=1e-7)
    close_codes(ours.codes, theirs.codes)


def test_int8_weights_move_by_the_change_on_average(device: torch.device):
    """The same block many times over; steps of a third of a code."""
    times, step = 200, 3e-4
    row, delta = weight(BLOCK, device), torch.randn(BLOCK, device=device)
    moved = Blocks(row.codes.repeat(times), row.scale.repeat(times), row.low.repeat(times))
    move_int8_(moved, delta.repeat(times), Move(step, None, SEED))
    change = (widened(moved).view(times, BLOCK) - widened(row)).mean(0).double()
    truth = -step * delta.double()
    assert (change - truth).norm() < 0.2 * truth.norm()
    assert float((change @ truth) / (truth @ truth)) == pytest.approx(1, abs=0.05)


def test_no_change_keeps_every_code(device: torch.device):
    start = weight(5000, device)
    kept = copied(start)
    move_int8_(kept, torch.zeros(5000, device=device), Move(1.0, None, SEED))
    assert torch.equal(start.codes, kept.codes) and torch.equal(start.scale, kept.scale)


@pytest.mark.parametrize("n", [1, 700, 5000])
@pytest.mark.parametrize("keep", [None, 0.99])
def test_bf16_weights_move_as_the_references(n: int, keep, device: torch.device):
    ours = torch.randn(n, device=device).bfloat16()
    theirs, delta = ours.clone(), torch.randn(n, device=device)
    kept = None if keep is None else torch.tensor(keep, device=device)
    move_bf16_(ours, delta, Move(1e-3, kept, SEED, 256))
    move_bf16_ref_(theirs, delta, Move(1e-3, kept, SEED, 256))
    apart = ours != theirs
    assert apart.sum() <= max(1, 0.002 * n)
    assert (ours.float() - theirs.float()).norm() <= 2**-8 * theirs.float().norm()


def test_bf16_weights_move_by_the_change_on_average(device: torch.device):
    times = 2000
    row, delta = torch.randn(8, device=device).bfloat16(), torch.randn(8, device=device)
    moved = row.repeat(times)
    move_bf16_(moved, delta.repeat(times), Move(1e-3, None, SEED))
    change = (moved.view(times, 8).double() - row.double()).mean(0)
    assert float(change @ delta.double() / delta.double().square().sum()) == pytest.approx(
        -1e-3, rel=0.1
    )


def test_sizes_that_do_not_fit_are_refused(device: torch.device):
    with pytest.raises(ValueError, match="moments of"):
        adam_int8_(torch.zeros(3, device=device), zeros(4, device), yes(device), ADAM, SEED)
    with pytest.raises(ValueError, match="3 changes for 512 weights"):
        move_int8_(weight(512, device), torch.ones(3, device=device), Move(1.0, None, SEED))
    with pytest.raises(ValueError, match="3 changes for 4 weights"):
        move_bf16_(
            torch.ones(4, dtype=torch.bfloat16), torch.ones(3, device=device), Move(1.0, None, SEED)
        )

"""The adapted linear against the textbook formula in fp64, output and every gradient."""

import pytest
import torch
from torch.nn import functional as F

from hirank.kernels.dora_linear import dora_linear
from hirank.kernels.dora_norm import dora_norm
from hirank.testing import (
    FLOATS,
    LINEAR_SHAPES,
    LinearCase,
    assert_within_budget,
    outputs_and_gradients,
    plain_dora_linear,
    relative_rms,
)
from recorder import SavedBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ours(case: LinearCase, **leaves: torch.Tensor) -> torch.Tensor:
    A, B = leaves["lora_A"], leaves["lora_B"]
    norm = None
    if "magnitude" in leaves:
        norm = dora_norm(case.weight, A.detach(), B.detach(), scale=case.scale)
    return dora_linear(
        leaves["x"],
        case.weight,
        A,
        B,
        scale=case.scale,
        magnitude=leaves.get("magnitude"),
        norm=norm,
        bias=leaves.get("bias"),
    )


def results(function, case: LinearCase) -> dict[str, torch.Tensor]:
    return outputs_and_gradients(lambda **leaves: function(case, **leaves), case.leaves())


def check(case: LinearCase, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rounded = case.to(dtype, DEVICE)
    got = results(ours, rounded)
    plain = results(plain_dora_linear, rounded)
    truth = results(plain_dora_linear, rounded.to(torch.float64))
    assert got["out"].dtype == dtype
    assert_within_budget(got, plain, truth, dtype)
    return got


@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_output_and_gradients_within_budget(shape, dtype, bias, dora):
    check(LinearCase.make(shape, bias=bias, dora=dora), dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_zero(dtype):
    got = check(LinearCase.make((5, 24, 16, 3), scale=0.0), dtype)
    assert not got["dlora_A"].any() and not got["dlora_B"].any()


@pytest.mark.parametrize("scale", [2048.0, -3000.0, 9.0])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_large_scale_does_not_overflow_fp16(dora, scale):
    """s x A^T is past 65504 where s x A^T B^T is not: s may not meet the hidden rows alone."""
    case = LinearCase.make((9, 48, 256, 4), dora=dora, scale=scale)
    case.x.mul_(40)
    for small in (case.lora_B, *([case.magnitude] if dora else [])):
        small.mul_(0.1)
    assert abs(scale) < 10 or (scale * case.x @ case.lora_A.T).abs().max() > 65504
    rounded = case.to(torch.float16, DEVICE)
    got, truth = results(ours, rounded), results(plain_dora_linear, rounded.to(torch.float64))
    for name, exact in truth.items():
        if exact.abs().max() < 65504:  # else the result itself has no place in fp16
            assert relative_rms(got[name], exact) < 2.0**-9, name
    assert truth["out"].abs().max() < 65504


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_identity_at_initialisation(dtype, bias):
    """B = 0 and m = norm: bit for bit the base layer, in every dtype, bias or not."""
    case = LinearCase.make((9, 48, 32, 4), bias=bias).to(dtype, DEVICE)
    B = torch.zeros_like(case.lora_B)
    norm = dora_norm(case.weight, case.lora_A, B, scale=2.0)
    y = dora_linear(
        case.x, case.weight, case.lora_A, B,
        scale=2.0, magnitude=norm.clone(), norm=norm, bias=case.bias,
    )  # fmt: skip
    assert torch.equal(y, F.linear(case.x, case.weight, case.bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_rows_without_gain_keep_their_exact_gradients(dtype, bias):
    """m = 0 and tiny m: the output no longer holds v, so dm must not be read off it."""
    case = LinearCase.make((11, 32, 24, 4), bias=bias)
    assert case.magnitude is not None
    case.magnitude[3] = 0
    case.magnitude[5] = 1e-9
    got = check(case, dtype)
    assert got["dmagnitude"][3].abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gain", [0.3, 0.05, 0.01])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_small_gains_beside_a_bias(dtype, gain, bias):
    case = LinearCase.make((64, 32, 24, 4), bias=bias)
    assert case.magnitude is not None
    case.magnitude.mul_(gain)
    check(case, dtype)


def test_rows_without_direction_are_finite_and_can_learn():
    """A zero weight row with B = 0 there: g = 1, so B gets a gradient."""
    case = LinearCase.make((11, 32, 24, 4), bias=False)
    case.weight[7] = 0
    case.lora_B[7] = 0
    assert case.magnitude is not None
    case.magnitude[7] = 0
    got = check(case, torch.float32)
    assert not got["out"][:, 7].any()
    assert got["dlora_B"][7].abs().max() > 0
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (0,), (2, 0, 3)], ids=str)
def test_any_leading_dimensions(lead):
    case = LinearCase.make((12, 24, 16, 3)).to(torch.float32, DEVICE)
    x = torch.randn(*lead, 16, device=DEVICE)
    norm = dora_norm(case.weight, case.lora_A, case.lora_B, scale=case.scale)
    y = dora_linear(
        x, case.weight, case.lora_A, case.lora_B,
        scale=case.scale, magnitude=case.magnitude, norm=norm, bias=case.bias,
    )  # fmt: skip
    assert y.shape == (*lead, 24)
    leaves = {k: v for k, v in case.leaves().items() if k != "x"}
    torch.testing.assert_close(y, plain_dora_linear(case, x=x, **leaves).detach())


def test_strided_inputs_and_gradients():
    case = LinearCase.make((10, 24, 16, 3)).to(torch.float64, DEVICE)
    base = results(ours, case)
    twisted = LinearCase(
        case.x.T.contiguous().T,
        case.weight.T.contiguous().T,
        case.lora_A.repeat_interleave(2, 1)[:, ::2],
        case.lora_B.T.contiguous().T,
        case.magnitude,
        case.bias,
        case.scale,
    )
    leaves = {
        "x": twisted.x.detach().requires_grad_(),
        "lora_A": twisted.lora_A.detach().requires_grad_(),
        "lora_B": twisted.lora_B.detach().requires_grad_(),
        "magnitude": case.leaves()["magnitude"],
        "bias": case.leaves()["bias"],
    }
    got = outputs_and_gradients(lambda **kw: ours(twisted, **kw), leaves)
    for name, value in base.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)


def test_frozen_magnitude_saves_no_output_and_trains_the_rest():
    case = LinearCase.make((6, 24, 16, 3)).to(torch.float64, DEVICE)
    leaves = case.leaves()
    leaves["magnitude"].requires_grad_(False)
    with SavedBytes() as frozen:
        y = ours(case, **leaves)
    with SavedBytes() as trained:
        ours(case, **case.leaves())
    assert trained.total - frozen.total == 6 * 24 * 8  # the output, in fp64
    y.sum().backward()
    assert leaves["magnitude"].grad is None
    full = case.leaves()
    ours(case, **full).sum().backward()
    assert torch.equal(leaves["lora_B"].grad, full["lora_B"].grad)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack"),
    reason="torch < 2.13 cannot look behind one overwritten tensor; there it is an error",
)
def test_output_overwritten_in_place_by_later_code():
    """ReLU(inplace=True) behind the layer, as PEFT allows: dm is then computed from the inputs."""
    case = LinearCase.make((9, 24, 16, 3)).to(torch.float64, DEVICE)
    got = results(lambda c, **kw: ours(c, **kw).relu_(), case)
    truth = results(lambda c, **kw: plain_dora_linear(c, **kw).relu(), case)
    for name, value in truth.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12)


def test_parameter_changed_between_forward_and_backward_is_an_error():
    case = LinearCase.make((9, 24, 16, 3)).to(torch.float64, DEVICE)
    leaves = case.leaves()
    y = ours(case, **leaves)
    with torch.no_grad():
        leaves["lora_B"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradcheck_and_gradients_of_gradients():
    case = LinearCase.make((3, 7, 5, 2), bias=True)
    norm = dora_norm(case.weight, case.lora_A, case.lora_B, scale=case.scale)

    def function(x, lora_A, lora_B, magnitude, bias):
        return dora_linear(
            x, case.weight, lora_A, lora_B,
            scale=case.scale, magnitude=magnitude, norm=norm, bias=bias,
        )  # fmt: skip

    leaves = tuple(case.leaves().values())
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_parameters_dtypes():
    case = LinearCase.make((9, 24, 16, 3)).to(torch.float32, DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = results(ours, case)
    assert got["out"].dtype == torch.bfloat16
    assert all(got[f"d{name}"].dtype == torch.float32 for name in case.leaves())
    truth = results(plain_dora_linear, case.to(torch.float64, DEVICE))
    for name, value in truth.items():
        assert (got[name].double() - value).norm() / value.norm() < 2.0**-6, name


def test_autocast_widens_nothing_when_x_is_already_half():
    case = LinearCase.make((9, 24, 16, 3))
    half = case.to(torch.bfloat16, DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = ours(half, **half.leaves())
    assert y.dtype == torch.bfloat16


def test_two_runs_agree_bit_for_bit():
    case = LinearCase.make((33, 40, 200, 16)).to(torch.bfloat16, DEVICE)
    first, second = results(ours, case), results(ours, case)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_that_do_not_fit_are_named():
    case = LinearCase.make((4, 6, 8, 2)).to(torch.float32, DEVICE)
    with pytest.raises(ValueError, match="x must end in 8"):
        dora_linear(torch.zeros(4, 7), case.weight, case.lora_A, case.lora_B, scale=1.0)
    with pytest.raises(ValueError, match="cast one of them"):
        dora_linear(case.x.half(), case.weight, case.lora_A, case.lora_B, scale=1.0)
    with pytest.raises(ValueError, match="pass both for DoRA"):
        dora_linear(
            case.x, case.weight, case.lora_A, case.lora_B, scale=1.0, magnitude=case.magnitude
        )

"""Few tokens without gradients: the same as the textbook formula, in three launches."""

import pytest
import torch
from torch.nn import functional as F

from hirank.kernels import dora_linear as linear
from hirank.kernels._triton import interpreting
from hirank.kernels.dora_decode import decodes, dora_decode
from hirank.testing import LinearCase, assert_within_budget, plain_dora_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreting(), reason="needs a CUDA device, or Triton's interpreter"
)
HALVES = (torch.float32, torch.bfloat16, torch.float16)


def norm_of(case: LinearCase) -> torch.Tensor:
    full = case.weight.double() + case.scale * case.lora_B.double() @ case.lora_A.double()
    return full.norm(dim=1).float()


def decoded(case: LinearCase) -> torch.Tensor:
    norm = None if case.magnitude is None else norm_of(case)
    with torch.no_grad():
        assert decodes(case.x, case.weight, case.lora_A, case.lora_B)
        return dora_decode(
            case.x, case.weight, case.lora_A, case.lora_B,
            case.magnitude, norm, case.bias, case.scale,
        )  # fmt: skip


SHAPES = [(1, 64, 64, 1), (3, 123, 65, 3), (16, 40, 70, 9), (2, 40, 2500, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_within_budget(shape, dtype, bias, dora):
    case = LinearCase.make(shape, bias=bias, dora=dora).to(dtype, DEVICE)
    wide = case.to(torch.float64)
    plain, truth = (
        {"out": plain_dora_linear(c, **{k: v.detach() for k, v in c.leaves().items()})}
        for c in (case, wide)
    )
    assert_within_budget({"out": decoded(case)}, plain, truth, dtype)


def test_fp32_adapters_are_rounded_as_in_training():
    case = LinearCase.make((4, 48, 32, 4)).to(torch.float32, DEVICE)
    half = {"x": case.x.half(), "weight": case.weight.half()}
    with torch.no_grad():
        rest = (case.magnitude, norm_of(case), None, case.scale)
        wide = dora_decode(*half.values(), case.lora_A, case.lora_B, *rest)
        narrow = dora_decode(*half.values(), case.lora_A.half(), case.lora_B.half(), *rest)
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_a_fresh_adapter_is_its_base(dtype, bias):
    case = LinearCase.make((2, 48, 32, 4), bias=bias).to(dtype, DEVICE)
    norm = norm_of(case)
    with torch.no_grad():
        y = dora_decode(
            case.x, case.weight, case.lora_A, torch.zeros_like(case.lora_B),
            norm.clone(), norm, case.bias, 2.0,
        )  # fmt: skip
    assert torch.equal(y, F.linear(case.x, case.weight, case.bias))


def test_rows_without_direction_and_without_magnitude():
    case = LinearCase.make((2, 48, 32, 4), bias=True).to(torch.float32, DEVICE)
    assert case.magnitude is not None
    case.weight[3], case.lora_B[3], case.magnitude[5] = 0, 0, 0
    y = decoded(case)
    assert y.isfinite().all()
    assert torch.equal(y[:, 5], case.bias[5].expand(2))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 4)], ids=str)
def test_taken_without_gradients_for_few_tokens_only(lead, monkeypatch):
    case = LinearCase.make((2, 24, 16, 3)).to(torch.float32, DEVICE)
    x = torch.randn(*lead, 16, device=DEVICE)
    taken = []
    monkeypatch.setattr(linear, "dora_decode", lambda *a: taken.append(1) or dora_decode(*a))
    rest = (case.weight, case.lora_A, case.lora_B, case.magnitude, norm_of(case), None, 2.0)
    with torch.no_grad():
        y = linear.owned_linear(x, *rest)
    assert taken == [1] and y.shape == (*lead, 24)
    torch.testing.assert_close(y, linear.owned_linear(x, *rest, "torch"))
    many = torch.randn(17, 16, device=DEVICE)
    with torch.no_grad():
        linear.owned_linear(many, *rest)
    linear.owned_linear(x.clone().requires_grad_(), *rest)
    assert taken == [1]

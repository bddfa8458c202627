"""Both products, gain and bias in one GEMM: against fp64, and never worse than two GEMMs."""

import pytest
import torch
from torch.nn import functional as F

from hirank.kernels import dora_linear as linear
from hirank.kernels._triton import interpreting
from hirank.kernels._tuning import Joined, tiles
from hirank.kernels.dora_norm import dora_norm
from hirank.kernels.joined_gemm import joined_gemm, joined_tile
from hirank.testing import (
    LinearCase,
    assert_within_budget,
    outputs_and_gradients,
    plain_dora_linear,
    relative_rms,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.bfloat16, torch.float16)
SMALL = Joined(16, 32, 16, num_warps=4, num_stages=2, programs=3, least=1)
hopper = pytest.mark.skipif(
    DEVICE == "cpu" or not tiles(torch.device("cuda", 0)).joined, reason="needs a Hopper GPU"
)
somewhere = pytest.mark.skipif(
    not interpreting() and (DEVICE == "cpu" or not tiles(torch.device("cuda", 0)).joined),
    reason="needs a Hopper GPU, or Triton's interpreter",
)


def draw(*shape, dtype, size=1.0):
    made = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=made, dtype=torch.float64) * size).to(DEVICE, dtype)


@somewhere
@pytest.mark.parametrize("shape", [(40, 48, 24, 8), (7, 72, 40, 24), (16, 32, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("by_column", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "gain"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_no_worse_than_two_products_and_a_pass(shape, dtype, by_column, gain, bias):
    M, N, K1, K2 = shape
    a1, a2 = draw(M, K1, dtype=dtype), draw(M, K2, dtype=dtype)
    b1, b2 = (draw(*((N, k) if by_column else (k, N)), dtype=dtype, size=0.2) for k in (K1, K2))
    norm = draw(N, dtype=torch.float32).abs() + 0.5
    magnitude = norm * (1 + 0.2 * draw(N, dtype=torch.float32))
    magnitude[1], norm[2] = 0, 0  # no gain; no direction
    row = draw(N, dtype=dtype) if bias else None
    scalars = {"magnitude": magnitude, "norm": norm} if gain else {}
    out = torch.full((M, N), torch.nan, device=DEVICE, dtype=dtype)
    joined_gemm(SMALL, out, a1, b1, a2, b2, by_column=by_column, bias=row, **scalars)

    def formula(dtype):
        x1, x2, w1, w2 = (t.to(dtype) for t in (a1, a2, b1, b2))
        w1, w2 = (w1.T, w2.T) if by_column else (w1, w2)
        found = x1 @ w1 + x2 @ w2
        if gain:
            found = (found * torch.where(norm > 0, magnitude / norm, 1)).to(dtype)
        return found if row is None else found + row.to(dtype)

    truth = formula(torch.float64)
    assert_within_budget({"out": out}, {"out": formula(dtype)}, {"out": truth}, dtype)
    again = torch.empty_like(out)
    joined_gemm(SMALL, again, a1, b1, a2, b2, by_column=by_column, bias=row, **scalars)
    assert torch.equal(out, again)


def test_not_taken_on_a_cpu_or_for_what_descriptors_cannot_describe():
    x, weight, B = (torch.randn(64, 64).half() for _ in range(3))
    assert joined_tile(x, weight, B, by_column=True) is None
    if DEVICE == "cuda" and tiles(torch.device("cuda", 0)).joined:
        big = torch.randn(4096, 4096, device=DEVICE).half()
        low = torch.randn(4096, 16, device=DEVICE).half()
        assert joined_tile(big, big, low, by_column=True) is not None
        for a, b, c in (
            (big.float(), big.float(), low.float()),  # no half precision
            (big[:, 1:], big[:, 1:], low),  # rows that lie apart
            (big, big, low[:, :12].contiguous()),  # rows of no whole 16 bytes
            (big[:128], big, low),  # too little work for the GPU
            (big.T, big, low),
        ):
            assert joined_tile(a, b, c, by_column=True) is None


LARGE = [(4096, 4096, 4096, 384), (4095, 1024, 4096, 16), (1000, 12288, 520, 8)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_layer_within_budget_at_real_sizes(shape, dtype, bias, dora, monkeypatch):
    taken = []
    monkeypatch.setattr(
        linear, "joined_gemm", lambda *a, **k: taken.append(1) or joined_gemm(*a, **k)
    )
    case = LinearCase.make(shape, bias=bias, dora=dora).to(dtype, DEVICE)
    norm = None
    if dora:
        norm = dora_norm(case.weight, case.lora_A, case.lora_B, scale=case.scale)

    def ours(**leaves):
        return linear.dora_linear(
            leaves["x"], case.weight, leaves["lora_A"], leaves["lora_B"], scale=case.scale,
            magnitude=leaves.get("magnitude"), norm=norm, bias=leaves.get("bias"),
        )  # fmt: skip

    wide = case.to(torch.float64)
    got = outputs_and_gradients(ours, case.leaves())
    plain = outputs_and_gradients(lambda **x: plain_dora_linear(case, **x), case.leaves())
    truth = outputs_and_gradients(lambda **x: plain_dora_linear(wide, **x), wide.leaves())
    assert_within_budget(got, plain, truth, dtype)
    assert relative_rms(got["out"], truth["out"]) <= relative_rms(plain["out"], truth["out"])
    M, N, K, _ = shape
    least = min(tile.least for tile in tiles(case.x.device).joined)
    large = [-(-M // 128) * -(-columns // 128) >= least for columns in (N, K)]  # y, dx
    assert len(taken) == sum(large) >= 1


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("features", [1024, 4096])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_a_fresh_adapter_is_its_base_at_real_sizes(features, bias):
    """Bit for bit, since cuBLAS adds in the same order at these sizes."""
    x, weight = draw(4096, 512, dtype=torch.bfloat16), draw(features, 512, dtype=torch.bfloat16)
    row = draw(features, dtype=torch.bfloat16) if bias else None
    A, B = draw(16, 512, dtype=torch.float32), torch.zeros(features, 16, device=DEVICE)
    norm = dora_norm(weight, A.bfloat16(), B.bfloat16(), scale=2.0)
    y = linear.dora_linear(
        x, weight, A, B, scale=2.0, magnitude=norm.clone(), norm=norm, bias=row
    )  # fmt: skip
    assert torch.equal(y, F.linear(x, weight, row))

"""The factored norm against the fp64 definition."""

import pytest
import torch

from hirank.kernels._triton import interpreting
from hirank.kernels.dora_norm import dora_gain, dora_norm, dora_norm_ref, row_square_sum
from hirank.testing import FLOATS, LINEAR_SHAPES, LinearCase
from recorder import LiveBytes, OpLog

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIGHT = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def dense(case: LinearCase) -> torch.Tensor:
    weight, A, B = case.weight.double(), case.lora_A.double(), case.lora_B.double()
    return (weight + case.scale * B @ A).norm(dim=1)


def norm_of(case: LinearCase, **more: object) -> torch.Tensor:
    return dora_norm(case.weight, case.lora_A, case.lora_B, scale=case.scale, **more)


@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_the_definition(shape, dtype):
    case = LinearCase.make(shape).to(dtype, DEVICE)
    norm = norm_of(case)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.double(), dense(case), rtol=TIGHT[dtype], atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_zero_is_the_base_norm(dtype):
    case = LinearCase.make((1, 40, 96, 4)).to(dtype, DEVICE)
    with OpLog() as log:
        norm = dora_norm(case.weight, case.lora_A, case.lora_B, scale=0.0)
    assert not log.matmuls()
    torch.testing.assert_close(norm.double(), case.weight.double().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_B_gives_exactly_the_base_norm(dtype):
    case = LinearCase.make((1, 40, 96, 4)).to(dtype, DEVICE)
    norm = dora_norm(case.weight, case.lora_A, torch.zeros_like(case.lora_B), scale=2.0)
    assert torch.equal(norm, root(row_square_sum(case.weight)))


def root(squares: torch.Tensor) -> torch.Tensor:
    """As `dora_norm` takes it: Triton's is correctly rounded, PyTorch's on a CPU is not."""
    return squares.double().sqrt().to(squares.dtype) if interpreting() else squares.sqrt()


def test_kept_base_term_changes_nothing():
    case = LinearCase.make((1, 40, 96, 4)).to(torch.bfloat16, DEVICE)
    assert torch.equal(norm_of(case), norm_of(case, base_sq=row_square_sum(case.weight)))


def test_mixed_dtypes_and_strided_inputs():
    case = LinearCase.make((1, 40, 96, 4)).to(torch.bfloat16, DEVICE)
    A, B = case.lora_A.float(), case.lora_B.half()
    strided = torch.empty(96, 40, dtype=torch.bfloat16, device=DEVICE).T.copy_(case.weight)
    got = dora_norm(strided, A, B, scale=2.0)
    exact = (case.weight.double() + 2 * B.double() @ A.double()).norm(dim=1)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


def test_the_reference_agrees():
    """It is what a CPU runs, whatever runs here."""
    case = LinearCase.make((1, 40, 96, 4)).to(torch.bfloat16, DEVICE)
    norm = dora_norm_ref(case.weight, case.lora_A, case.lora_B, case.scale)
    torch.testing.assert_close(norm.double(), dense(case), rtol=1e-6, atol=0)


def test_writes_where_it_is_told():
    case = LinearCase.make((1, 40, 96, 4)).to(torch.bfloat16, DEVICE)
    out = torch.full((40,), torch.nan, device=DEVICE)
    assert norm_of(case, out=out) is out
    assert torch.equal(out, norm_of(case))


def test_a_call_follows_its_inputs():
    """What is kept between calls are addresses, never values."""
    case = LinearCase.make((1, 40, 96, 4)).to(torch.float32, DEVICE)
    for _ in range(3):
        case.lora_B.mul_(-1.5)
        case.weight.add_(0.01)
        torch.testing.assert_close(norm_of(case).double(), dense(case), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(0, 8, 2), (3, 8, 0), (1, 1, 1)], ids=str)
def test_empty_and_tiny(shape):
    n, k, r = shape
    weight, A, B = (torch.ones(*size, device=DEVICE) for size in ((n, k), (r, k), (n, r)))
    norm = dora_norm(weight, A, B, scale=1.0)
    assert norm.tolist() == pytest.approx([(1 + r) * k**0.5] * n)


def test_autocast_does_not_reach_the_sums():
    case = LinearCase.make((1, 40, 96, 4)).to(torch.float32, DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        inside = norm_of(case)
    assert torch.equal(inside, norm_of(case))


def test_cancelling_rows_are_computed_again():
    """D10: W close to -s B A, where the three terms cancel and fp32 would be 10 % off."""
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(16, 1024, generator=draw, dtype=torch.float64)
    B = torch.randn(256, 16, generator=draw, dtype=torch.float64)
    noise = torch.randn(256, 1024, generator=draw, dtype=torch.float64)
    weight = (1e-3 * noise - 2 * B @ A).bfloat16().to(DEVICE)
    A32, B32 = A.float().to(DEVICE), B.float().to(DEVICE)
    exact = (weight.double() + 2 * B32.double() @ A32.double()).norm(dim=1)
    got = dora_norm(weight, A32, B32, scale=2.0).double()
    assert ((got - exact).abs() / exact).max() < 1e-5
    ordinary = noise.bfloat16().to(DEVICE)
    exact = (ordinary.double() + 2 * B32.double() @ A32.double()).norm(dim=1)
    got = dora_norm(ordinary, A32, B32, scale=2.0).double()
    assert ((got - exact).abs() / exact).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cancelling_rows_among_ordinary_ones(dtype):
    """One dtype throughout, as on a GPU: some rows cancel, their neighbours do not."""
    case = LinearCase.make((1, 100, 200, 16)).to(dtype, DEVICE)
    full = case.scale * case.lora_B.double() @ case.lora_A.double()
    case.weight[::7] = (-full[::7] * (1 + 2.0**-9)).to(dtype)
    torch.testing.assert_close(norm_of(case).double(), dense(case), rtol=1e-4, atol=0)


def _alike(draw, rank, k):
    """Rows of A that are one direction and a little noise."""
    shared = torch.randn(1, k, generator=draw)
    return shared.expand(rank, k) + 1e-5 * torch.randn(rank, k, generator=draw)


def _cancelling(draw, n, rank):
    """Rows of B whose entries sum to nearly nothing."""
    B = torch.randn(n, rank, generator=draw)
    return B - B.mean(1, keepdim=True) * (1 - 1e-4)


@pytest.mark.parametrize("base", ["zero", "tiny", "some-zero"])
@pytest.mark.parametrize("size", [(2, 1), (4, 1), (4, 96), (64, 96), (16, 700)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_that_cancel_among_themselves(dtype, size, base):
    """W says nothing of what is lost there: it may be zero."""
    rank, k = size
    draw = torch.Generator().manual_seed(rank + k)
    A = _alike(draw, rank, k).to(DEVICE, dtype)
    B = _cancelling(draw, 100, rank).to(DEVICE, dtype)
    weight = torch.randn(100, k, generator=draw).to(DEVICE, dtype)
    weight *= {"zero": 0, "tiny": 1e-6, "some-zero": 1}[base]
    weight[::3] = 0
    got = dora_norm_ref(weight, A, B, 2.0)
    exact = (weight.double() + 2 * B.double() @ A.double()).norm(dim=1)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=0)


def test_one_column_drawn_at_random():
    """K = 1: every row of A is alike, so that ranks cancel in many a draw."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        A = torch.randn(4, 1, generator=draw).to(DEVICE)
        B = torch.randn(64, 4, generator=draw).to(DEVICE)
        got = dora_norm_ref(torch.zeros(64, 1, device=DEVICE), A, B, 1.0)
        exact = (B.double() @ A.double()).norm(dim=1)
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=0)


def test_ordinary_rows_are_not_computed_again():
    """Rows of A at random are nearly orthogonal, at any rank and size of B A beside W."""
    for rank, size in [(4, 1e-3), (64, 1.0), (384, 10.0)]:
        weight, A = torch.randn(64, 512, device=DEVICE), torch.randn(rank, 512, device=DEVICE)
        B = size * torch.randn(64, rank, device=DEVICE)
        with OpLog() as log:
            dora_norm_ref(weight, A, B, 1.0)
        assert not any(dtype == torch.float64 for op in log.ops for dtype, _ in op.outputs)


def test_exact_cancellation_is_zero_not_nan():
    case = LinearCase.make((1, 24, 32, 4)).to(torch.float64, DEVICE)
    weight = -(case.scale * case.lora_B @ case.lora_A)
    norm = dora_norm(weight, case.lora_A, case.lora_B, scale=case.scale)
    assert norm.max() < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stays_within_its_budget(dtype):
    """D15: a large layer's norm needs no full-size buffer."""
    weight = torch.randn(2048, 8192).to(DEVICE, dtype)
    A, B = torch.randn(8, 8192).to(DEVICE), torch.randn(2048, 8).to(DEVICE)
    budget = 8 * 2**20
    with LiveBytes() as live:
        norm = dora_norm(weight, A, B, scale=0.5, chunk_bytes=budget)
    assert live.peak < budget
    exact = (weight.double() + 0.5 * B.double() @ A.double()).norm(dim=1)
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64, 384, 768])
@pytest.mark.parametrize("shape", [(4096, 12288), (12288, 4096)], ids=str)
def test_large_in_memory_of_a_few_vectors(shape, rank):
    """No [N, R] and no copy of W, A or B: O(N), and a descriptor for each operand and program."""
    n, k = shape
    weight, A = (torch.randn(size, k, device="cuda").bfloat16() for size in (n, rank))
    B = torch.randn(n, rank, device="cuda").bfloat16()
    dora_norm(weight, A, B, scale=0.5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm = dora_norm(weight, A, B, scale=0.5)
    assert torch.cuda.max_memory_allocated() - before < 256 * n
    exact = (weight.double() + 0.5 * B.double() @ A.double()).norm(dim=1)
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)


def test_half_weights_are_never_widened_as_a_whole():
    weight, A, B = torch.randn(384, 256).bfloat16(), torch.randn(4, 256), torch.randn(384, 4)
    with OpLog() as log:
        dora_norm(weight, A, B, scale=2.0)
    assert not log.made(torch.float32, (384, 256))
    assert not log.made(None, (256, 256))


def test_gain_of_a_row_without_direction_is_one():
    magnitude = torch.tensor([0.0, 2.0, 3.0], requires_grad=True)
    norm = torch.tensor([0.0, 0.0, 1.5])
    gain = dora_gain(magnitude, norm)
    assert gain.tolist() == [1.0, 1.0, 2.0]
    (grad,) = torch.autograd.grad(gain.sum(), magnitude)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 1 / 1.5]))


def test_gain_is_exactly_one_where_m_is_the_norm():
    norm = torch.rand(10_000) + 1e-3
    assert torch.equal(dora_gain(norm.clone(), norm), torch.ones_like(norm))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"A must be \[R, 8\] and B \[4, R\]"):
        dora_norm(torch.zeros(4, 8), torch.zeros(2, 7), torch.zeros(4, 2), scale=1.0)

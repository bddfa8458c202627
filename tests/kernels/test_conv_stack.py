"""The launches around a stacked convolution: on a GPU, or in Triton's interpreter."""

import pytest
import torch

from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.conv_stack import finish, join, spread, stack

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
SCALE = 1.5
SIZES = [(1, 8, 8, (3, 5)), (3, 70, 24, (7,)), (2, 5, 80, (2, 3, 4)), (2, 16, 1, (17, 40))]
DTYPES = [torch.float32, torch.float16]
OFF = {torch.float32: 1e-6, torch.float16: 1e-3}


def draw(*shape, device, dtype=torch.float64):
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=torch.float64).to(device, dtype)


def close(got, exact, dtype):
    off = (got.double() - exact).norm() / exact.norm()
    assert off < OFF[dtype]


def gain_of(n, device):
    norm = draw(n, device=device).abs().float() + 0.5
    magnitude = draw(1, n, 1, 1, device=device).float()
    return magnitude, norm, (magnitude.flatten().double() / norm.double())


@pytest.mark.parametrize("kept", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stack_is_the_cast_of_both(dtype, kept, device):
    weight, A = draw(70, 9, 3, 3, device=device, dtype=kept), draw(8, 9, 3, 3, device=device)
    B = draw(70, 8, 1, 1, device=device).float()
    wa, b = stack(weight, A.float(), B, dtype)
    assert torch.equal(wa, torch.cat([weight.to(dtype), A.float().to(dtype)]))
    assert torch.equal(b, B.flatten(1).to(dtype))


def test_stack_without_a_weight_casts_the_adapter(device):
    weight, A = draw(70, 9, 3, 3, device=device).float(), draw(8, 9, 3, 3, device=device).float()
    B = draw(70, 8, 1, 1, device=device).float()
    wa, b = stack(weight[:0], A, B, torch.float16)
    assert torch.equal(wa, A.half()) and torch.equal(b, B.half().flatten(1))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_join_equals_its_formula(size, dtype, dora, bias, device):
    images, n, r, sizes = size
    uh, B = draw(images, n + r, *sizes, device=device, dtype=dtype), draw(n, r, device=device)
    B = B.to(dtype)
    magnitude, norm, gain = gain_of(n, device)
    row = draw(n, device=device, dtype=dtype)
    given = (magnitude, norm) if dora else (None, None)
    u, h = uh.split([n, r], 1)
    u, h = (t.view(images, -1, *sizes) for t in (u, h))
    y, kept = join(u, h, B, *given, row if bias else None, SCALE, True)
    apart, same = join(u.clone(), h.clone(), B, *given, row if bias else None, SCALE)
    assert torch.equal(y, apart) and torch.equal(kept, same)
    u, hidden = uh.double().flatten(2).split([n, r], 1)
    exact = u + SCALE * B.double() @ hidden
    exact = exact * gain[:, None] if dora else exact
    close(y.flatten(2), exact + (row.double()[:, None] if bias else 0), dtype)
    assert torch.equal(kept, h) and kept.is_contiguous()


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_spread_and_finish_equal_their_formulas(size, dtype, dora, device):
    images, n, r, sizes = size
    uh = draw(images, n + r, *sizes, device=device, dtype=dtype)
    dy = draw(images, n, *sizes, device=device, dtype=dtype) + 1
    B = draw(n, r, 1, 1, device=device).float()
    magnitude, norm, gain = gain_of(n, device)
    given = (magnitude, norm) if dora else (None, None)
    t, part = spread(dy, uh[:, :n] if dora else None, r, *given)
    wide = dy.double().flatten(2)
    assert t.shape == uh.shape
    close(t[:, :n].flatten(2), wide * gain[:, None] if dora else wide, dtype)
    raw = draw(images, n, r, device=device, dtype=dtype)
    dm, dB = finish(part if dora else None, raw, B, *given, SCALE)
    summed = raw.double().sum(0)
    exact = SCALE * summed * (gain[:, None] if dora else 1)
    assert dB.shape == B.shape and dB.dtype == B.dtype
    close(dB.flatten(1), exact, torch.float32)
    if not dora:
        assert dm is None
        return
    u = uh.double().flatten(2)[:, :n]
    sums = (wide * u).sum((0, 2)) + SCALE * (B.flatten(1).double() * summed).sum(1)
    assert dm.shape == magnitude.shape
    close(dm.flatten(), sums / norm.double(), torch.float32)


def test_channels_without_norm_have_a_gain_of_one(device):
    uh, B = draw(1, 24, 4, device=device, dtype=torch.float32), draw(16, 8, device=device).float()
    magnitude, norm, _ = gain_of(16, device)
    norm[5] = 0
    u, h = uh.split([16, 8], 1)
    y, _ = join(u, h, B, magnitude, norm, None, SCALE)
    plain, _ = join(u, h, B, None, None, None, SCALE)
    assert torch.equal(y[:, 5], plain[:, 5])
    dy = torch.ones_like(y)
    t, part = spread(dy, u, 8, magnitude, norm)
    dm, _ = finish(part, torch.ones(1, 16, 8, device=device), B, magnitude, norm, SCALE)
    assert torch.equal(t[:, 5], dy[:, 5]) and dm.flatten()[5] == 0 and dm.isfinite().all()

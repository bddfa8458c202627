"""A convolution as one node of autograd: on a CPU by its formulas, on a GPU by kernels."""

import pytest
import torch
from torch.nn import functional as F

from hirank.adapters import conv, stacked_conv
from hirank.adapters.layers import Adapter
from hirank.adapters.owned_conv import Moves, owned_conv
from hirank.kernels._triton import interpreting
from hirank.testing import assert_within_budget, outputs_and_gradients

SCALE = 1.5
CASES = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 2, "padding": 1},
    "last": {"padding": 1, "last": True},
    "grouped-last": {"groups": 2, "last": True},
    "one image": {"images": 1, "padding": 1},
    # with ranks that tensor cores take, a GPU moves W and A as one kernel
    "stacked": {"rank": 8, "padding": 1},
    "stacked, strided": {"rank": 16, "stride": 2, "padding": 1},
    "stacked, dilated": {"rank": 8, "dilation": 2, "padding": 2},
    "stacked, one image": {"rank": 72, "images": 1},
}


def make(dtype, device, *, groups=1, images=3, last=False, rank=6, **moves):
    draw = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)

    x, A = random(images, 8, 9, 8), random(rank, 8, 3, 3) / 8
    B = random(32, rank // groups, 1, 1)
    weight = random(32, 8 // groups, 3, 3) / 8
    if last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    wide = torch.promote_types(dtype, torch.float32)
    norm = torch.rand(32, generator=draw, dtype=torch.float64).to(device, wide) + 0.5
    leaves = {"x": x, "A": A, "B": B, "m": random(32).to(wide), "bias": random(32)}
    given = Moves(*([moves.get(k, d)] * 2 for k, d in (("stride", 1), ("padding", 0))),
                  [moves.get("dilation", 1)] * 2, groups)  # fmt: skip
    return leaves, weight, norm, given


def formula(weight, norm, moves, x, A, B, m, bias):
    how = {"stride": moves.stride, "padding": moves.padding, "dilation": moves.dilation}
    u = F.conv2d(x, weight, None, **how, groups=moves.groups)
    u = u + SCALE * F.conv2d(F.conv2d(x, A, None, **how), B, groups=moves.groups)
    if m is not None:
        u = ((m / norm)[:, None, None] * u).to(x.dtype)
    return u + bias[:, None, None]


def ours(weight, norm, moves, plain=False):
    def parts(x, A, B, m, bias, W, n):
        return formula(W, n, moves, x, A, B, m, bias)

    def call(x, A, B, bias, m=None):
        return owned_conv(
            x, weight, bias, A, B, m, None if m is None else norm,
            scale=SCALE, moves=moves, plain=plain, formula=parts,
        )  # fmt: skip

    return call


def hold(case, dtype, device, dora):
    leaves, weight, norm, moves = make(dtype, device, **CASES[case])
    if not dora:
        del leaves["m"]

    def fresh(to=None):
        return {k: v.detach().clone().to(to or v.dtype).requires_grad_() for k, v in leaves.items()}

    def plain(wide):
        def call(x, A, B, bias, m=None):
            return formula(weight.to(wide), norm.to(m.dtype if m is not None else wide), moves,
                           x, A, B, m, bias)  # fmt: skip

        return call

    truth = outputs_and_gradients(plain(torch.float64), fresh(torch.float64))
    allowed = outputs_and_gradients(plain(dtype), fresh())
    got = outputs_and_gradients(ours(weight, norm, moves), fresh())
    assert got["out"].stride() == allowed["out"].stride()
    assert_within_budget(got, allowed, truth, dtype)


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, dora):
    hold(case, torch.float32, "cpu", dora)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("case", ["stacked", "stacked, strided", "stacked, one image"])
def test_branches_that_come_apart(case, dora, dtype, device, monkeypatch):
    """Where one more tile of channels would cost more than a second call."""
    monkeypatch.setattr(stacked_conv, "_TILE", 32)
    if dtype == torch.float32 or interpreting() or device.type == "cuda":
        hold(case, dtype, device, dora)


@pytest.mark.parametrize("case", ["plain", "stacked", "last", "grouped"])
def test_plain_lora_gives_the_same_in_parts(case, device, monkeypatch):
    """Which a GPU that waits for the host is given."""
    leaves, weight, _, moves = make(torch.float32, device, **CASES[case])
    margins = [side for side in moves.padding for _ in range(2)]
    geometry = conv.Geometry(*moves[:4], "zeros", margins)
    found = []
    for busy in (0, 2**60):
        monkeypatch.setattr(conv, "_BUSY", busy)
        given = {k: v.clone().requires_grad_() for k, v in leaves.items() if k != "m"}
        adapter = Adapter(given["A"], given["B"], None, SCALE, None, None)
        y = conv.conv_forward(given["x"], weight, given["bias"], geometry, [adapter])
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in given.values())])
    for ours, parts in zip(*found, strict=True):
        torch.testing.assert_close(ours, parts, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_on_a_gpu(case, dora, dtype):
    hold(case, dtype, "cuda", dora)


@pytest.mark.parametrize("case", ["plain", "stacked", "grouped-last"])
@pytest.mark.parametrize("wanted", ["x", "A", "B", "m", "bias", "AB", "xm", "xAB"])
def test_any_of_the_gradients(case, wanted, device):
    leaves, weight, norm, moves = make(torch.float32, device, **CASES[case])
    call, found = ours(weight, norm, moves), {}
    for names in ([*leaves], [n for n in leaves if n in wanted or n == wanted]):
        given = {k: v.clone().requires_grad_(k in names) for k, v in leaves.items()}
        call(**given).square().sum().backward()
        found |= {(k, len(names)): v.grad for k, v in given.items() if k in names}
        assert all(v.grad is None for k, v in given.items() if k not in names)
    for name in names:
        torch.testing.assert_close(
            found[name, len(names)], found[name, len(leaves)], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("wide", [True, False], ids=["fp32", "fp16"])
def test_a_convolution_with_weights_wider_than_its_input(wide, device):
    """As under autocast: the kernels round them."""
    half = torch.float16
    leaves, weight, norm, moves = make(torch.float32, device, rank=8, padding=1)
    leaves = {k: (v if wide and k in "ABm" else v.to(half)) for k, v in leaves.items()}
    leaves["m"], given = leaves["m"].float(), dict(leaves)
    rounded = {k: (v.to(half) if k in "AB" else v) for k, v in leaves.items()}
    got = outputs_and_gradients(ours(weight if wide else weight.to(half), norm, moves), {
        k: v.clone().requires_grad_() for k, v in given.items()
    })  # fmt: skip
    want = outputs_and_gradients(ours(weight.to(half), norm, moves), {
        k: v.clone().requires_grad_() for k, v in rounded.items()
    })  # fmt: skip
    assert got["dA"].dtype == given["A"].dtype and got["dB"].dtype == given["B"].dtype
    for name in want:
        torch.testing.assert_close(got[name].to(half), want[name].to(half), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("case", ["plain", "grouped"])
def test_gradients_of_gradients(case):
    leaves, weight, norm, moves = make(torch.float64, "cpu", **CASES[case])
    names = [*leaves]
    call = ours(weight, norm, moves, plain=True)
    given = [leaves[name][:1] if name == "x" else leaves[name] for name in names]

    def run(*tensors):
        return call(**dict(zip(names, tensors, strict=True)))[..., :2, :2]

    inputs = [t.clone().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("case", ["plain", "stacked"])
def test_a_row_without_norm_is_left_as_lora(case):
    leaves, weight, norm, moves = make(torch.float32, "cpu", **CASES[case])
    norm[3] = 0
    found = outputs_and_gradients(ours(weight, norm, moves), {
        k: v.clone().requires_grad_() for k, v in leaves.items()
    })  # fmt: skip
    leaves.pop("m")
    lora = ours(weight, norm, moves)(**leaves)
    torch.testing.assert_close(found["out"][:, 3], lora[:, 3])
    assert found["dm"][3] == 0 and all(torch.isfinite(t).all() for t in found.values())


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("case", ["plain", "last", "stacked"])
def test_the_next_layer_may_write_over_its_output(case, dora):
    leaves, weight, norm, moves = make(torch.float32, "cpu", **CASES[case])
    found, call = [], ours(weight, norm, moves)
    for relu in (torch.relu_, torch.relu):
        given = {k: v.clone().requires_grad_() for k, v in leaves.items() if dora or k != "m"}
        y = relu(call(**given))
        y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in given.values())])
    assert all(map(torch.equal, *found))

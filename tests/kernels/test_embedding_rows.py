"""An embedding as one node of autograd, by kernels: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from hirank.adapters import owned_embedding as owned
from hirank.adapters.owned_embedding import ownable, owned_embedding
from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.testing import assert_within_budget, outputs_and_gradients

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
SCALE = 1.5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make(dtype, device, rank=5, tokens=(3, 23), entries=37, dim=130):
    draw = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)

    wide = torch.promote_types(dtype, torch.float32)
    ids = torch.randint(0, entries, tokens, generator=draw).to(device)  # most come more than once
    leaves = {"A": random(rank, entries) / 3, "B": random(dim, rank), "m": random(dim).to(wide)}
    norm = torch.rand(dim, generator=draw, dtype=torch.float64).to(device, wide) + 0.5
    return ids, random(entries, dim), norm, leaves


def formula(ids, weight, norm, A, B, m=None, padding=None):
    y = F.embedding(ids, weight) + SCALE * F.embedding(ids, A.T, padding) @ B.T
    return y if m is None else ((m / norm) * y).to(weight.dtype)


def call(ids, weight, norm, padding=None):
    def run(A, B, m=None):
        given = None if m is None else norm
        return owned_embedding(ids, weight, A, B, m, given, scale=SCALE, padding=padding)

    return run


def leaf(tensors, dtype=None):
    return {k: v.detach().clone().to(dtype or v.dtype).requires_grad_() for k, v in tensors.items()}


def hold(dtype, device, dora=True, padding=None, **sizes):
    ids, weight, norm, leaves = make(dtype, device, **sizes)
    assert ownable(ids, weight, leaves["A"], leaves["B"])
    if not dora:
        del leaves["m"]

    def plain(wide):
        return lambda A, B, m=None: formula(
            ids, weight.to(wide), norm.to(wide if m is None else m.dtype), A, B, m, padding
        )

    truth = outputs_and_gradients(plain(torch.float64), leaf(leaves, torch.float64))
    allowed = outputs_and_gradients(plain(dtype), leaf(leaves))
    got = outputs_and_gradients(call(ids, weight, norm, padding), leaf(leaves))
    assert_within_budget(got, allowed, truth, dtype)
    return got, ids


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients(dtype, dora, device):
    hold(dtype, device, dora)


@pytest.mark.parametrize("rank", [1, 16, 33, 72])
def test_every_rank(rank, device):
    hold(torch.float32, device, rank=rank)


@pytest.mark.parametrize("tokens", [(), (1,), (200,), (2, 3, 5)], ids=str)
def test_any_tokens(tokens, device):
    hold(torch.float32, device, tokens=tokens)


def test_the_padding_gets_no_gradient(device):
    got, ids = hold(torch.float32, device, padding=3)
    assert (ids == 3).any() and not got["dA"][:, 3].any()


def test_many_tokens_go_by_sorting(device, monkeypatch):
    monkeypatch.setattr(owned, "MOST_SCATTERED", 8)
    hold(torch.float32, device, padding=3)


@pytest.mark.parametrize("wanted", ["A", "B", "m", "AB", "Am", "Bm"])
def test_any_of_the_gradients(wanted, device):
    ids, weight, norm, leaves = make(torch.float32, device)
    found = []
    for names in ("ABm", wanted):
        given = {k: v.clone().requires_grad_(k in names) for k, v in leaves.items()}
        call(ids, weight, norm)(**given).square().sum().backward()
        found.append({k: given[k].grad for k in wanted})
        assert all(v.grad is None for k, v in given.items() if k not in names)
    for name in wanted:
        assert torch.equal(found[0][name], found[1][name])


def test_weights_wider_than_the_table(device):
    """A and B in fp32 over a half table: gradients come in fp32."""
    ids, weight, norm, leaves = make(torch.float32, device)
    weight = weight.half()
    got = outputs_and_gradients(call(ids, weight, norm), leaf(leaves))
    truth = outputs_and_gradients(
        lambda A, B, m: formula(ids, weight.double(), norm.double(), A, B, m),
        leaf(leaves, torch.float64),
    )
    assert got["out"].dtype == torch.float16 and got["dA"].dtype == torch.float32
    for name, exact in truth.items():
        off = (got[name].double() - exact).norm() / exact.norm()
        assert off < 1e-3, name


def test_two_runs_agree_bitwise_and_gradients_lie_as_their_weights(device):
    ids, weight, norm, leaves = make(torch.float16, device, tokens=(300,))
    found = [outputs_and_gradients(call(ids, weight, norm), leaf(leaves)) for _ in range(2)]
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    assert found[0]["dA"].stride() == leaves["A"].stride()


def test_a_dimension_without_norm_is_left_as_lora(device):
    ids, weight, norm, leaves = make(torch.float32, device)
    norm[3] = 0
    got = outputs_and_gradients(call(ids, weight, norm), leaf(leaves))
    leaves.pop("m")
    torch.testing.assert_close(got["out"][..., 3], call(ids, weight, norm)(**leaves)[..., 3])
    assert got["dm"][3] == 0 and all(torch.isfinite(t).all() for t in got.values())


def test_an_untrained_adapter_leaves_the_rows_as_they_are(device):
    ids, weight, norm, leaves = make(torch.bfloat16, device)
    leaves["B"].zero_()
    assert torch.equal(
        call(ids, weight, norm)(leaves["A"], leaves["B"], norm), F.embedding(ids, weight)
    )


def test_gradients_of_gradients(device):
    ids, weight, norm, leaves = make(torch.float32, device, tokens=(4,), dim=6, entries=7)

    def second(function):
        given = leaf(leaves)
        y = function(**given)
        first = torch.autograd.grad(y.square().sum(), list(given.values()), create_graph=True)
        total = sum(g.square().sum() for g in first)
        return torch.autograd.grad(total, list(given.values()))

    got = second(call(ids, weight, norm))
    want = second(lambda A, B, m: formula(ids, weight, norm, A, B, m))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_step_between_forward_and_backward_is_refused(device):
    ids, weight, norm, leaves = make(torch.float32, device)
    given = leaf(leaves)
    y = call(ids, weight, norm)(**given)
    with torch.no_grad():
        given["B"].add_(1)
    with pytest.raises(RuntimeError, match="step the optimizer after backward"):
        y.sum().backward()

"""How moments are kept, and how many bytes a state takes, to the byte."""

import pytest
import torch

from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW, QGaLoreAdamW
from hirank.kernels.blockquant import affine_bytes, power_bytes
from hirank.optim import state as moments
from hirank.optim.hyper import Hyper
from optim.toys import grads, parameter, run

LLAMA = [(64, 64), (32, 64), (172, 64), (64, 172), (64,), (320, 64)]  # a tiny one's shapes


def stepped(cls: type, shapes: list[tuple[int, ...]], dtype=torch.float32, **options):
    params = [parameter(*shape, dtype=dtype) for shape in shapes]
    optimizer = cls(params, **options)
    for p in params:
        p.grad = grads(1, *p.shape, dtype=dtype)[0]
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("rank", [4, 16])
def test_g19_one_sided_state_is_the_formula(rank: int):
    optimizer = stepped(GaLoreAdamW, [s for s in LLAMA if len(s) == 2], rank=rank)
    sides = [sorted(s) for s in LLAMA if len(s) == 2]
    assert optimizer.state_bytes() == sum(m * rank + 2 * n * rank for m, n in sides) * 4


def test_two_sided_state_is_the_formula():
    optimizer = stepped(GaLoreAdamW, [(64, 172)], rank=8, sides="two")
    assert optimizer.state_bytes() == ((64 + 172) * 8 + 2 * 8 * 8) * 4


def test_int8_and_int4_state_is_the_formula_with_the_threshold():
    optimizer = stepped(QGaLoreAdamW, [(64, 1024), (64, 172), (300, 20), (64,)], rank=8)
    large = affine_bytes(64 * 8, 4) + 2 * power_bytes(8 * 1024)  # 8192 numbers: int8
    small = affine_bytes(64 * 8, 4) + 2 * 8 * 172 * 4  # 1376 numbers: fp32
    right = affine_bytes(20 * 8, 4) + 2 * 300 * 8 * 4
    assert optimizer.state_bytes() == large + small + right + 2 * 64 * 4
    assert power_bytes(8 * 1024) == 8 * 1024 * 8.125 / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("store", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("rounding", ["stochastic", "feedback"])
def test_cost_is_what_is_there(dtype, state, store, rounding):
    shapes = [*LLAMA, (100, 1030), (5000,), (8, 4, 3, 3)]
    options = {"rank": 50, "state": state, "basis_store": store, "rounding": rounding}
    for sides in ("short", "long", "two"):
        optimizer = stepped(GaLoreAdamW, shapes, dtype, sides=sides, **options)
        assert optimizer.state_bytes() == optimizer.cost()


@pytest.mark.parametrize("cls", [Fira, Apollo, ApolloMini])
def test_cost_of_the_other_presets(cls: type):
    optimizer = stepped(cls, LLAMA)
    assert optimizer.state_bytes() == optimizer.cost()
    if cls is ApolloMini:  # two vectors and the limiter's number a matrix
        assert optimizer.cost() == sum(2 * max(s) * 4 + 4 * (len(s) == 2) for s in LLAMA)


def test_parts_of_a_state_are_tensors_and_numbers():
    for cls in (GaLoreAdamW, QGaLoreAdamW, Fira, Apollo):
        for entry in stepped(cls, LLAMA).state.values():
            assert {type(v) for v in entry.values()} <= {torch.Tensor, int, float}


# Writing and reading.


def stored(hyper: Hyper, name: str, values: torch.Tensor, times: int = 1) -> torch.Tensor:
    """The mean of what is read after writing `values`, `times` over."""
    state, span, total = {}, slice(0, values.numel()), 0
    moments.create(state, name, values.shape, values, hyper)
    ok = torch.tensor(True)
    for draw in range(times):
        moments.write(state, name, span, values, ok, 2 * draw)
        total = total + moments.read(state, name, span).double()
    return total / times


@pytest.mark.parametrize("name", [moments.FIRST, moments.SECOND])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_stored_moments_are_right_on_average(name: str, kind: str):
    values = torch.randn(4096)
    values = values.square() if name == moments.SECOND else values
    mean = stored(Hyper(state=kind), name, values, times=400)
    assert (mean - values).norm() < 0.005 * values.norm()


@pytest.mark.parametrize("rounding", ["stochastic", "feedback"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_moment_follows_changes_smaller_than_a_step(kind: str, rounding: str):
    """v <- 0.999 v + 0.001 g^2 changes v by a thousandth: nearest rounding would stand still."""
    hyper, state, span = Hyper(state=kind, rounding=rounding), {}, slice(0, 4096)
    ok = torch.tensor(True)
    moments.create(state, moments.SECOND, (4096,), torch.empty(0), hyper)
    exact = torch.linspace(0.5, 1.0, 4096)
    moments.write(state, moments.SECOND, span, exact, ok, 0)
    for draw in range(1, 1001):
        exact = 0.999 * exact
        read = moments.read(state, moments.SECOND, span)
        moments.write(state, moments.SECOND, span, 0.999 * read, ok, draw)
    mean = moments.read(state, moments.SECOND, span).mean()
    assert mean == pytest.approx(float(exact.mean()), rel=0.02)


def test_feedback_keeps_more_than_eight_bits():
    values = torch.randn(4096)
    plain = stored(Hyper(state="int8"), moments.FIRST, values)
    fed = stored(Hyper(state="int8", rounding="feedback"), moments.FIRST, values)
    assert (fed - values).norm() < 0.1 * (plain - values).norm()


@pytest.mark.parametrize("state", ["bf16", "int8"])
@pytest.mark.parametrize("rounding", ["stochastic", "feedback"])
def test_small_state_trains_like_fp32(state: str, rounding: str):
    target = parameter(64, 128, seed=3).detach()
    losses = []
    for kind in ("fp32", state):
        p = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = GaLoreAdamW(
            [p], rank=48, lr=0.02, scale=1.0, gap=10, state=kind, rounding=rounding
        )
        for _ in range(100):
            run(optimizer, p, [p.detach() - target])
        losses.append(float((p.detach() - target).square().mean()))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_embeddings_are_stepped_in_spans(monkeypatch: pytest.MonkeyPatch):
    made = []
    for span in (moments.SPAN, 2048):
        monkeypatch.setattr(moments, "SPAN", span)
        p = parameter(90, 100)
        optimizer = GaLoreAdamW([{"params": [p]}], weight_decay=0.1)
        made.append(run(optimizer, p, grads(3, 90, 100)))
    assert torch.equal(*made)

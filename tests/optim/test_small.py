"""Norms and biases step together: the same numbers as one by one, in as few launches as one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hirank import GaLoreAdamW
from hirank.optim.hyper import Hyper
from hirank.optim.small import batches, is_small
from hirank.optim.weights import Int8Weight
from optim.toys import grads, mlp, parameter

HP = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(64,), (), (5,), (1, 16), (33, 7), (4095,), (0, 4)]


class Launches(TorchDispatchMode):
    """How many operations are not views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def given(params: list[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = grads(1, *p.shape, seed=100 * step + i, dtype=p.dtype)[0]


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_together_as_torchs_adamw(dtype: torch.dtype):
    ours, theirs = made(SHAPES, dtype), made(SHAPES, dtype)
    a = GaLoreAdamW([{"params": ours}], **HP)
    b = torch.optim.AdamW(theirs, **HP)
    for step in range(5):
        for params, optimizer in ((ours, a), (theirs, b)):
            given(params, step)
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
        assert a.state[p]["exp_avg"].shape == p.shape and a.state[p]["step"] == 5


def test_together_as_alone():
    shapes = [(64,), (5,), (33, 7)]
    joined = made(shapes)
    optimizer = GaLoreAdamW([{"params": joined}], **HP)
    alone = made(shapes)
    each = [GaLoreAdamW([{"params": [p]}], **HP) for p in alone]
    for step in range(4):
        given(joined, step)
        optimizer.step()
        given(alone, step)
        for one in each:
            one.step()
    for p, q in zip(joined, alone, strict=True):
        torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)


def test_g09_forty_tensors_take_the_launches_of_one():
    counts = []
    for number in (1, 40):
        params = made([(16,)] * number)
        optimizer = GaLoreAdamW([{"params": params}], **HP)
        for step in range(2):
            given(params, step)
            with Launches() as launches:
                optimizer.step()
        counts.append(launches.count)
    assert counts[0] == counts[1] < 60


def test_g09_small_tensors_share_a_step_in_backward():
    model = mlp()
    optimizer = GaLoreAdamW(model, rank=4)
    engine = optimizer.step_in_backward()
    model(torch.randn(3, 32)).square().mean().backward()
    assert engine.calls == 2  # the matrices; the biases wait for each other
    optimizer.step()
    assert engine.calls == 3 < len(list(model.parameters()))


def test_one_gradient_that_is_not_finite_stops_one_tensor(caplog):
    params = made([(8,), (9,), (10,)])
    optimizer = GaLoreAdamW([{"params": params}], **HP)
    given(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    given(params, 1)
    params[1].grad[3] = float("inf")
    optimizer.step()
    assert [torch.equal(p, q) for p, q in zip(params, before, strict=True)] == [False, True, False]
    assert [optimizer.state[p]["step"] for p in params] == [2, 1, 2]
    assert optimizer.param_groups[0]["skipped"] == 1 and caplog.text.count("parameter 1") == 1
    given(params, 2)
    optimizer.step()  # of different ages now
    assert [optimizer.state[p]["step"] for p in params] == [3, 2, 3]


def test_bf16_weights_are_rounded_stochastically_and_repeat():
    def go() -> torch.Tensor:
        params = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for _ in range(3)]
        optimizer = GaLoreAdamW(
            [{"params": params}], lr=1e-4, betas=(0.0, 0.5), weight_rounding="stochastic"
        )
        for _ in range(20):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return torch.stack([p.detach() for p in params]).float()

    first = go()
    assert first.mean() == pytest.approx(1 - 20e-4, abs=3e-4)
    assert torch.equal(first, go()) and not torch.equal(first[0], first[1])


def test_a_strided_tensor_is_stepped_in_place():
    base = torch.randn(6, 10)
    p, q = nn.Parameter(base.clone()[:, ::2]), nn.Parameter(base.clone()[:, ::2].contiguous())
    place = p.data_ptr()
    for one in (p, q):
        optimizer = GaLoreAdamW([{"params": [one]}], **HP)
        one.grad = torch.ones(6, 5)
        optimizer.step()
    assert torch.equal(p, q) and p.data_ptr() == place and not p.is_contiguous()


def test_what_is_small_and_what_goes_together():
    plain, low = Hyper(rank=None), Hyper(rank=4)
    assert is_small(parameter(4095), plain) and not is_small(parameter(4096), plain)
    assert is_small(parameter(8, 12), plain) and not is_small(parameter(8, 12), low)
    assert is_small(parameter(12), low)
    assert not is_small(nn.Parameter(Int8Weight.of(torch.ones(8, 12))), plain)
    one, two = parameter(3), parameter(3, dtype=torch.bfloat16)
    members = [(one, one, {}, plain), (two, two, {}, plain), (one, one, {}, Hyper(rank=None, lr=1))]
    assert [len(batch) for batch in batches(members)] == [1, 1, 1]
    assert [len(batch) for batch in batches([members[0]] * 3)] == [3]

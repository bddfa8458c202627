"""What is alive is counted once, from the operation that made it until nothing refers to it."""

import pytest
import torch

from hirank.optim.weights import Int8Weight
from hirank.plan.depth import peaks
from hirank.plan.faked import faking
from hirank.plan.live import Live
from hirank.plan.sizes import in_blocks

ROUNDED, MIB = 512, 2**20


def test_views_share_and_dead_tensors_are_gone():
    with Live() as live:
        x = torch.zeros(1000)
        y = x[10:].view(-1, 2)
        assert live.total == in_blocks(4000)
        del x
        assert live.total == in_blocks(4000)
        z = y + 1
        del y
    assert live.total == in_blocks(z.numel() * 4)


def test_the_smallest_tensor_takes_a_whole_unit():
    with Live() as live:
        kept = torch.zeros(1)
    assert live.total == ROUNDED == in_blocks(kept.element_size())


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (1, 512),
        (MIB, MIB),
        (4 * MIB, 4 * MIB),  # five in a segment of 20 MiB
        (9 * MIB + MIB // 2, 10 * MIB),  # two, and 1 MiB stays with them
        (7 * MIB, 7 * MIB),  # two, and 6 MiB are for others
        (19 * MIB, 20 * MIB),
        (28 * MIB, 28 * MIB),
        (28 * MIB + 512, 28 * MIB + 512),  # the rest of nearly 2 MiB is split off
        (3 * 2**30 - MIB, 3 * 2**30),
    ],
)
def test_what_the_allocator_counts_for_a_tensor(size: int, taken: int):
    assert in_blocks(size) == taken


def test_gradients_that_meet_are_added_in_place():
    """x is used twice: nothing is made beside the gradient that came first."""
    x = torch.randn(64, 64, requires_grad=True)
    with Live() as live:
        (x.sin().sum() + x.cos().sum()).backward()
    (moment,) = (m for m in live.moments() if m.op == "gradients joined")
    assert moment.total == 64 * 64 * 4


def test_a_sum_that_code_makes_is_no_joined_gradient():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.clone() + grad.clone()

    x = torch.randn(64, 64, requires_grad=True)
    with Live() as live:
        Twice.apply(x).sum().backward()
    assert "gradients joined" not in {moment.op for moment in live.moments()}


def test_what_is_adopted_at_once_is_one_moment():
    with Live() as live:
        with live.at_once():
            live.adopt([torch.zeros(128)], "weights")
            live.adopt([torch.zeros(256)], "adapters")
    (moment,) = (m for m in live.moments() if m.op == "adopt")
    assert moment.kinds == {"weights": 512, "adapters": 1024}


def test_classes_may_be_said_afterwards():
    with Live() as live, live.during("forward", "temporary"):
        kept = torch.ones(4096)
        torch.ones(8192).sum()
        live.claim("activations", born="forward")
    moment = peaks(live.moments())["forward"]
    assert moment.kinds == {
        "activations": in_blocks(4 * kept.numel()),
        "temporary": in_blocks(4 * 8192) + ROUNDED,
    }


def test_a_wrapped_weight_is_what_it_wraps():
    with Live() as live:
        weight = Int8Weight.of(torch.randn(64, 64))
        live.adopt([weight], "weights")
    parts = (weight.codes, weight.scale, weight.low)
    assert live.total == sum(in_blocks(part.numel() * part.element_size()) for part in parts)


def test_fake_tensors_count_as_real_ones():
    def work():
        with Live() as live:
            x = torch.randn(100, 50)
            q, r = torch.linalg.qr(x @ x.T)
            if (q.abs().amax() > 0).item():
                r = r + 1
        return [(m.op, m.total) for m in live.moments()]

    with faking():
        traced = work()
    assert traced == work()

"""What is alive is counted once, from the operation that made it until nothing refers to it."""

import torch

from hirank.optim.weights import Int8Weight
from hirank.plan.depth import peaks
from hirank.plan.faked import faking
from hirank.plan.live import ROUNDED, Live, rounded


def test_views_share_and_dead_tensors_are_gone():
    with Live() as live:
        x = torch.zeros(1000)
        y = x[10:].view(-1, 2)
        assert live.total == rounded(4000)
        del x
        assert live.total == rounded(4000)
        z = y + 1
        del y
    assert live.total == rounded(z.numel() * 4)


def test_the_smallest_tensor_takes_a_whole_unit():
    with Live() as live:
        kept = torch.zeros(1)
    assert live.total == ROUNDED == rounded(kept.element_size())


def test_classes_may_be_said_afterwards():
    with Live() as live, live.during("forward", "temporary"):
        kept = torch.ones(4096)
        torch.ones(8192).sum()
        live.claim("activations", born="forward")
    moment = peaks(live.moments())["forward"]
    assert moment.kinds == {
        "activations": rounded(4 * kept.numel()),
        "temporary": rounded(4 * 8192) + ROUNDED,
    }


def test_a_wrapped_weight_is_what_it_wraps():
    with Live() as live:
        weight = Int8Weight.of(torch.randn(64, 64))
        live.adopt([weight], "weights")
    parts = (weight.codes, weight.scale, weight.low)
    assert live.total == sum(rounded(part.numel() * part.element_size()) for part in parts)


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

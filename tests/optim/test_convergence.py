"""Every method gets to the bottom of problems whose bottom is known."""

import pytest
import torch
from torch import Tensor, nn

from hirank import Apollo, ApolloMini, Fira, GaLoreAdamW, QGaLoreAdamW
from optim.toys import parameter

CASES = [
    (GaLoreAdamW, {}),
    (GaLoreAdamW, {"basis": "svd"}),
    (GaLoreAdamW, {"basis": "eigh"}),
    (GaLoreAdamW, {"basis": "randomised"}),
    (GaLoreAdamW, {"basis": "random"}),
    (GaLoreAdamW, {"sides": "two"}),
    (GaLoreAdamW, {"moments": "project"}),
    (GaLoreAdamW, {"moments": "reset"}),
    (GaLoreAdamW, {"state": "int8", "basis_store": "int4"}),
    (GaLoreAdamW, {"basis_store": "bf16", "state": "bf16", "lazy": 0.9}),
    (QGaLoreAdamW, {}),
    (Fira, {}),
    (Apollo, {"scale": 0.25}),
    (ApolloMini, {"scale": 0.25}),
]


def minimised(cls: type, options: dict, value, params: list[nn.Parameter], steps: int) -> float:
    """The share of the first loss that is left after `steps` steps of a falling learning rate."""
    settings = {"rank": 1 if cls is ApolloMini else 8, "gap": 10, "lr": 0.3}
    optimizer = cls(params, **settings | options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        now = value()
        now.backward()
        optimizer.step()
        schedule.step()
        losses.append(now.item())
    return losses[-1] / losses[0]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_a_quadratic(cls: type, options: dict):
    """min |W - T|^2: the gradient's leading directions are those that are furthest off."""
    w, target = nn.Parameter(torch.zeros(24, 40)), parameter(24, 40, seed=3).detach()
    assert minimised(cls, options, lambda: (w - target).square().sum(), [w], 500) < 0.01


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_a_low_rank_regression(cls: type, options: dict):
    """min |X (W - T)'|^2 with T of rank 4."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    x, target = normal(200, 40), normal(24, 4) @ normal(4, 40) / 2
    w = nn.Parameter(torch.zeros(24, 40))
    assert minimised(cls, options, lambda: (x @ (w - target).T).square().mean(), [w], 500) < 0.01


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_a_matrix_factorisation(cls: type, options: dict):
    """min |A B - T|^2, not convex."""
    a = nn.Parameter(0.3 * parameter(24, 12, seed=1).detach())
    b = nn.Parameter(0.3 * parameter(12, 40, seed=2).detach())
    target = (parameter(24, 4, seed=3) @ parameter(4, 40, seed=4)).detach() / 2
    assert minimised(cls, options, lambda: (a @ b - target).square().mean(), [a, b], 500) < 0.01


def test_g22_int8_state_trains_like_fp32_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    torch.manual_seed(0)
    x, target = torch.randn(128, 128), torch.randn(128, 128)
    losses = []
    for state in ("fp32", "int8"):
        w = nn.Parameter(torch.zeros(128, 128))
        optimizer = GaLoreAdamW([w], rank=64, gap=20, scale=1.0, state=state)
        for _ in range(100):
            optimizer.zero_grad()
            value = (x @ w.T - target).square().mean()
            value.backward()
            optimizer.step()
        assert any("codes" in key for key in optimizer.state[w]) == (state == "int8")
        losses.append(value.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)

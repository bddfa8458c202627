"""What waits on the host comes back as it was."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hirank.optim import away
from hirank.optim.away import kept_on_host


class Blocks(nn.Module):
    """Three blocks whose inputs alone are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gradients(model: nn.Module, x: Tensor, on_host: bool) -> list[Tensor]:
    model.zero_grad()
    if on_host:
        with kept_on_host():
            loss = model(x).square().sum()
    else:
        loss = model(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor that is sent away; on a CPU as if it were a GPU's."""
    sent: list[Tensor] = []
    pack = away._packed

    def remembered(tensor: Tensor):
        kept = pack(tensor)
        sent.extend([tensor] if isinstance(kept, away._Away) else [])
        return kept

    monkeypatch.setattr(away, "_packed", remembered)
    return sent


def test_gradients_are_the_same_and_block_inputs_wait(packed, monkeypatch):
    monkeypatch.setattr(away, "_worth", lambda t: type(t) is Tensor and t.dim() == 2)
    model, x = Blocks(), torch.randn(16, 64)
    usual, ours = gradients(model, x, False), gradients(model, x, True)
    assert all(torch.equal(a, b) for a, b in zip(usual, ours, strict=True))
    # The inputs of the three blocks, and what squaring the output keeps.
    assert [tuple(t.shape) for t in packed] == [(16, 64)] * 4


def test_what_is_on_the_cpu_or_small_or_a_parameter_stays(packed):
    gradients(Blocks(), torch.randn(5000, 64), True)
    assert packed == []


@pytest.mark.gpu
def test_a_gpu_keeps_less_and_computes_the_same(packed):
    model, x = Blocks().cuda(), torch.randn(2**14, 64, device="cuda")
    usual = gradients(model, x, False)
    before = torch.cuda.memory_allocated()
    with kept_on_host():
        loss = model(x).square().sum()
    # Of four tensors of 4 MiB, and the output, only what is named is there.
    assert torch.cuda.memory_allocated() - before < 2 * x.nbytes and len(packed) == 4
    model.zero_grad()
    loss.backward()
    ours = [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(usual, ours, strict=True))

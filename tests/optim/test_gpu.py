"""What only a GPU can show: no waiting for the device, bf16 products, memory."""

import pytest
import torch
from torch import nn

from hirank import Apollo, Fira, GaLoreAdamW, QGaLoreAdamW
from hirank.optim.weights import Int8Weight
from optim.toys import data, everything, grads, mlp, parameter, run, same, weights

pytestmark = pytest.mark.gpu
PRESETS = [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo]


@pytest.mark.parametrize("options", [{}, {"sides": "two"}, {"residual": "fira"}], ids=str)
def test_a_gpu_steps_as_a_cpu_does(options: dict):
    moved = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(parameter(48, 80).detach().to(device))
        optimizer = GaLoreAdamW([p], rank=8, gap=3, basis="svd", **options)
        run(optimizer, p, [g.to(device) for g in grads(7, 48, 80)])
        moved.append(p.detach().cpu() - parameter(48, 80).detach())
    assert (moved[0] - moved[1]).norm() < 1e-3 * moved[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_moments_are_rounded_as_on_a_cpu(dtype: torch.dtype):
    """The same noise: only where the last bit decides may a code be another."""
    moved = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(parameter(256, 384).detach().to(device))
        optimizer = GaLoreAdamW([p], rank=32, gap=3, basis="identity", state="int8", scale=1.0)
        run(optimizer, p, [g.to(dtype).to(device, torch.float32) for g in grads(5, 256, 384)])
        moved.append(p.detach().cpu() - parameter(256, 384).detach())
    assert (moved[0] - moved[1]).norm() < 0.01 * moved[0].norm()


def test_a_step_in_8_bits_is_a_few_launches():
    """Not one for every operation of Adam and of the rounding: a step was bound by the host so."""
    p = nn.Parameter(0.01 * torch.randn(2048, 4096, device="cuda").bfloat16())
    optimizer = GaLoreAdamW([p], rank=256, state="int8", weight_rounding="stochastic")
    for _ in range(2):
        p.grad = torch.randn_like(p)
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    launches = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launches) < 20, [e.name for e in launches]


@pytest.mark.parametrize("cls", [GaLoreAdamW, Fira, Apollo])
def test_bf16_gradients_give_nearly_the_fp32_step(cls: type):
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        start = (0.01 * parameter(256, 384).detach()).bfloat16()
        p = nn.Parameter(start.clone().cuda().to(dtype))
        optimizer = cls([p], rank=32, basis="random", basis_store="fp32", lr=0.1, scale=1.0)
        run(optimizer, p, [g.bfloat16().to("cuda", dtype) for g in grads(3, 256, 384)])
        moved.append(p.detach().cpu().float() - start.float())
    assert (moved[0] - moved[1]).norm() < 0.05 * moved[0].norm()


@pytest.mark.parametrize("cls", PRESETS)
def test_runs_repeat_and_resume_bit_by_bit(cls: type, tmp_path):
    def made():
        model = mlp().cuda()
        optimizer = cls(model, rank=4, gap=3, lr=0.01)
        optimizer.step_in_backward()
        return model, optimizer

    def go(model, optimizer, steps: range) -> None:
        for step in steps:
            x, y = (t.cuda() for t in data(64, seed=step))
            (model(x) - y).square().mean().backward()
            optimizer.step()

    whole, first, second = made(), made(), made()
    go(*whole, range(10))
    go(*first, range(5))
    torch.save(first[1].state_dict(), tmp_path / "optimizer.pt")
    for mine, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
        mine.data.copy_(theirs.data)
    second[1].load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    go(*second, range(5, 10))
    assert torch.equal(weights(whole[0]), weights(second[0]))
    assert same(whole[1].state_dict(), second[1].state_dict())


def test_a_converted_model_moves_to_the_gpu():
    model = everything()
    QGaLoreAdamW(model, rank=4)
    model = model.cuda()
    assert isinstance(model[2].weight, Int8Weight) and model[2].weight.codes.is_cuda
    assert model(torch.arange(10).cuda()).isfinite().all()


@pytest.mark.parametrize("cls", PRESETS)
def test_backward_does_not_wait_for_the_device_between_refreshes(cls: type):
    model = everything().cuda()
    optimizer = cls(model, rank=4)
    optimizer.step_in_backward()
    tokens = torch.arange(50).view(5, 10).cuda()
    for step in range(3):
        value = model(tokens).logsumexp(-1).square().mean()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            value.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()


def test_gradients_never_all_exist_at_once():
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(12)]).cuda()
    one, x = 2048 * 2048 * 4, torch.randn(8, 2048, device="cuda")
    peaks = []
    for hooked in (False, True):
        optimizer = GaLoreAdamW(model, rank=16)
        engine = optimizer.step_in_backward() if hooked else None
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            optimizer.step()
            optimizer.zero_grad()
        if engine:
            engine.remove()
    assert peaks[1] > 12 * one > 4 * one > peaks[3]

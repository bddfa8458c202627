"""int8 weights: a parameter like any other, half the bytes of bf16, right on average."""

import copy

import pytest
import torch
from torch import nn

from hirank import GaLoreAdamW, QGaLoreAdamW
from hirank.optim.weights import (
    Int8Weight,
    cost,
    dequantize_weights,
    int8_weights,
    move,
    quantize_weights,
)
from optim.toys import everything, loss, mlp


def linear(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(40, 24).to(dtype)
    quantize_weights(made, ["weight"])
    return made


def test_a_linear_computes_with_the_widened_weight():
    layer, x = linear(), torch.randn(5, 7, 40, requires_grad=True)
    weight, bias = layer.weight.widened().requires_grad_(), layer.bias.detach().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    dout = torch.randn(5, 7, 24)
    layer(x).backward(dout)
    nn.functional.linear(twin, weight, bias).backward(dout)
    for ours, theirs in ((x, twin), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert type(ours.grad) is torch.Tensor
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias))


def test_autocast_computes_in_its_dtype():
    layer, x = linear(), torch.randn(3, 40, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and x.grad.dtype == torch.float32


def test_other_operations_see_the_widened_weight():
    layer = linear()
    wide = layer.weight.widened()
    assert torch.equal(layer.weight + 1, wide + 1)
    assert torch.equal(layer.weight.norm(), wide.norm())
    assert torch.equal(layer.weight.T @ torch.eye(24), wide.T)


def test_copies_and_moves_keep_the_codes():
    layer = linear()
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter) and isinstance(twin.weight, Int8Weight)
    assert torch.equal(twin.weight.codes, layer.weight.codes)
    assert twin.weight.codes.data_ptr() != layer.weight.codes.data_ptr()
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(half.weight.codes, layer.weight.codes)


def test_bytes_are_the_formula():
    weight = linear().weight
    parts = (weight.codes, weight.scale, weight.low)
    assert sum(p.numel() * p.element_size() for p in parts) == cost(40 * 24) == 40 * 24 + 8 * 4


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_moving_is_right_on_average(size: float):
    """Steps of a hundredth of a code: to the nearest, nothing would ever move."""
    weight = linear().weight.detach()
    start, step = weight.widened(), size * float(weight.scale.mean())
    moves = 400
    for seed in range(moves):
        move(weight, slice(0, 960), torch.ones(960), step, None, seed)
    moved = (start - weight.widened()).mean()
    assert moved == pytest.approx(moves * step, rel=0.05)


def test_what_does_not_move_is_not_rounded_again():
    weight = linear().weight.detach()
    lone = torch.zeros(960)
    lone[:256] = weight.scale.max()  # moves past the extremes of the first block
    for seed in range(3):
        before = weight.widened().flatten()
        move(weight, slice(0, 960), lone, 1.0, None, seed)
        assert (weight.widened().flatten()[256:] - before[256:]).abs().max() < 1e-6


def test_bf16_weights_may_be_rounded_stochastically():
    weight = torch.ones(4096, dtype=torch.bfloat16)
    for seed in range(100):
        move(weight, slice(0, 4096), torch.ones(4096), 1e-4, None, seed)
    assert weight.float().mean() == pytest.approx(0.99, abs=2e-4)
    stuck = torch.ones(4096, dtype=torch.bfloat16)
    move(stuck, slice(0, 4096), torch.ones(4096), 1e-4, None, None)
    assert (stuck == 1).all()


def test_the_optimiser_turns_a_models_linears_into_int8():
    model = everything()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = QGaLoreAdamW(model, rank=4)
    kinds = {name: isinstance(p, Int8Weight) for name, p in model.named_parameters()}
    assert {name for name, is_int8 in kinds.items() if is_int8} == {"2.weight", "4.weight"}
    model(torch.randint(50, (4, 6))).logsumexp(-1).sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        wide = p.widened() if isinstance(p, Int8Weight) else p
        assert not torch.equal(before[name], wide), name
        assert before[name].shape == p.shape


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    assert quantize_weights(model, ["0.weight", "1.weight"]) == 1
    assert model[0].weight is model[1].weight
    dequantize_weights(model)
    assert model[0].weight is model[1].weight and type(model[0].weight) is nn.Parameter


def test_exact_weights_for_a_checkpoint(tmp_path):
    model = mlp()
    QGaLoreAdamW(model, rank=4)
    torch.save(int8_weights(model), tmp_path / "weights.pt")
    other = mlp(seed=1)
    QGaLoreAdamW(other, rank=4)
    for name, part in torch.load(tmp_path / "weights.pt").items():
        int8_weights(other)[name].copy_(part)
    assert torch.equal(other[0].weight.codes, model[0].weight.codes)
    dequantize_weights(model)
    assert not any(isinstance(p, Int8Weight) for p in model.parameters())
    assert torch.equal(other[0].weight.widened(), model[0].weight)


def test_training_in_int8_follows_fp32():
    """Until what is left to learn is as small as the noise of rounding to eight bits."""
    draw, losses = torch.Generator().manual_seed(3), []
    x = torch.randn(256, 32, generator=draw)
    target = x @ torch.randn(32, 8, generator=draw) / 6
    for kept in ("keep", "int8"):
        model = mlp()
        optimizer = GaLoreAdamW(model, rank=8, gap=20, lr=0.003, scale=1.0, weights=kept)
        for _ in range(60):
            loss(model, x, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss(model, x, target).item())
    assert losses[0] < 0.05 and losses[1] < 1.1 * losses[0]

"""Weights put where a layer's parameters were, or laid otherwise in the same place."""

import pytest
import torch
from torch import nn

import hirank
from adapters.layer_kinds import KINDS
from adapters.layer_kinds import reference as effective
from adapters.quantised_bases import WARN, base, inputs
from adapters.quantised_bases import adapted as quantised
from adapters.setups import Lin, layer_of, merged_weight, perturb, reference, stock, wrap
from hirank.testing import relative_rms

BUDGET = 1e-6
CASES = {"Linear": (lambda: Lin(16, 24), lambda: torch.randn(5, 16), reference)} | {
    name: (KINDS[name].model, KINDS[name].input, effective) for name in ("Conv2d", "Conv3d")
}


def cases():
    return pytest.mark.parametrize(("build", "draw", "truth"), CASES.values(), ids=CASES.keys())


def parts_of(layer):
    return layer.lora_A["default"], layer.lora_B["default"], layer.base_layer


def loosen(module):
    """Hold the weight as a plain tensor, as those do who generate or gather it."""
    weight = module.weight.detach()
    del module.weight
    module.weight = weight


@cases()
@pytest.mark.parametrize("part", [0, 1, 2], ids=["A", "B", "base"])
def test_a_weight_that_is_no_parameter_is_followed(build, draw, truth, part):
    model, x = perturb(wrap(build())), draw()
    module = parts_of(layer_of(model))[part]
    loosen(module)
    for _ in range(3):
        module.weight = torch.randn_like(module.weight)
        assert relative_rms(model(x).detach(), truth(model, x)) < BUDGET


@cases()
def test_a_base_weight_may_be_a_buffer(build, draw, truth):
    model, x = perturb(wrap(build())), draw()
    layer = layer_of(model).base_layer
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    for _ in range(2):
        assert relative_rms(model(x).detach(), truth(model, x)) < BUDGET
        layer.weight = torch.randn_like(weight)


def test_a_bias_that_is_no_parameter_is_followed():
    model, x = perturb(wrap(Lin(16, 24))), torch.randn(5, 16)
    layer = layer_of(model).base_layer
    del layer.bias
    for _ in range(3):
        layer.bias = torch.randn(24)
        assert relative_rms(model(x).detach(), reference(model, x)) < BUDGET


def test_whoever_generates_B_learns():
    model, x, seeds = perturb(wrap(Lin(16, 24))), torch.randn(5, 16), torch.randn(2, 3)
    module, net, grads = layer_of(model).lora_B["default"], nn.Linear(3, 96), []
    loosen(module)
    for seed in seeds:
        module.weight = net(seed).view(24, 4)
        model(x).sum().backward()
        grads.append(net.bias.grad.clone())
    assert not torch.equal(grads[0], grads[1])


class Two(nn.Module):
    """On a GPU the first layer of a pass looks for them all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.first(x))


def formula(layers, x):
    x = x.double()
    for layer in layers:
        x = x @ merged_weight(layer).T + layer.base_layer.bias.detach().double()
    return x


@pytest.mark.parametrize("training", [True, False])
def test_a_weight_that_is_transposed_where_it_lies(training):
    model = perturb(hirank.accelerate(stock(Two(), target_modules=["first", "last"])))
    layers, x = [model.base_model.model.first, model.base_model.model.last], torch.randn(5, 16)
    weight = layers[1].base_layer.weight
    for _ in range(3):
        with torch.set_grad_enabled(training):
            for _ in range(2):
                assert relative_rms(model(x).detach(), formula(layers, x)) < BUDGET
        weight.data = weight.data.t()


def test_a_kernel_that_is_transposed_where_it_lies():
    model, x = perturb(wrap(KINDS["dilated"].model())), KINDS["dilated"].input()
    weight = layer_of(model).base_layer.weight
    for _ in range(2):
        assert relative_rms(model(x).detach(), effective(model, x)) < BUDGET
        weight.data = weight.data.transpose(2, 3)


@WARN
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_other_options_reach_a_quantised_layer_that_ran(kind):
    model, x = perturb(hirank.accelerate(quantised(base(kind), lora_dropout=0.5))), inputs(9, 128)
    model(x)
    found = []
    for fresh in (False, True):
        hirank.restore(model) if fresh else None
        hirank.accelerate(model, dropout="single-gemm")
        torch.manual_seed(0)
        found.append(model(x).detach())
    assert torch.equal(*found)

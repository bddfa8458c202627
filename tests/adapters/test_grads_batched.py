"""Many gradients at once (`is_grads_batched`, vectorised Jacobians) are those of one by one."""

import pytest
import torch
from torch import nn

from adapters import quantised_bases as few_bits
from adapters.layer_kinds import Holder
from adapters.setups import Lin, perturb, wrap
from hirank import accelerate


def float_model(**config):
    return perturb(wrap(Lin(24, 16), **config)), 24


def nf4_model(**config):
    model = few_bits.adapted(few_bits.base("nf4"), **config)
    return perturb(accelerate(model)), few_bits.K


def check(y, wanted, tolerance):
    dys = torch.randn(5, *y.shape)
    many = torch.autograd.grad(y, wanted, dys, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, wanted, dy, retain_graph=True) for dy in dys]
    for found, expected in zip(many, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("make", [float_model, nf4_model])
def test_many_gradients_are_those_of_one_by_one(make, dora):
    model, width = make(use_dora=dora)
    x = torch.randn(3, width, requires_grad=True)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    check(model(x), wanted, 1e-5)


KINDS = {
    "embedding": (lambda: nn.Embedding(37, 16), lambda: torch.randint(0, 37, (3, 5))),
    "Conv1d": (lambda: nn.Conv1d(4, 16, 3), lambda: torch.randn(2, 4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 16, 3, padding=1), lambda: torch.randn(2, 4, 7, 5)),
}


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_gradients_of_layers_with_kernels(kind, dora):
    make, draw = KINDS[kind]
    model, x = perturb(wrap(Holder(make()), r=8, use_dora=dora)), draw()
    wanted = [p for p in model.parameters() if p.requires_grad]
    check(model(x), wanted, 1e-4)


def test_a_jacobian_may_be_vectorised():
    model, width = float_model()
    x = torch.randn(3, width)
    found = torch.autograd.functional.jacobian(model, x, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(model, x))

"""DoRA over four bits in one graph: the values of uncompiled code, no break, one compilation."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hirank
from adapters.quantised_bases import adapted, layer_of, perturb
from adapters.test_quantised import K, base, floats, inputs, truth
from hirank.testing import relative_rms

pytest.importorskip("bitsandbytes")
# PyTorch 2.13 warns about a line of its own compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def qdora(**config):
    return perturb(hirank.accelerate(adapted(base("nf4"), **config)))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_steps_are_those_of_uncompiled_code_in_one_compilation():
    model, x = qdora(), inputs(5, K)
    other, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    runs = {torch.compile(model, fullgraph=True, backend=counter): model, other: other}
    optimizers = [torch.optim.AdamW(trained(m), 1e-2) for m in runs.values()]
    for _ in range(5):
        found = []
        for run, optimizer in zip(runs, optimizers, strict=True):
            y = run(x)
            (dx,) = torch.autograd.grad(y.square().mean(), x, retain_graph=True)
            y.square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            found.append((y.detach(), dx))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    for a, b in zip(trained(model), trained(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_silent_changes_are_followed():
    model, x = qdora(), inputs(5, K)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        wanted = truth(model, floats(model), x).detach()
        assert relative_rms(run(x).detach(), wanted) < 1e-5
        layer_of(model).lora_B["default"].weight.data.mul_(2)


def test_a_copy_is_computed_with_weights_of_its_own():
    model, x = qdora(), inputs(5, K)
    twin = copy.deepcopy(model)
    layer_of(twin).lora_B["default"].weight.data.mul_(3)
    run = torch.compile(twin, fullgraph=True, backend="aot_eager")
    wanted = truth(twin, floats(twin), x).detach()
    assert relative_rms(run(x).detach(), wanted) < 1e-5


def test_layers_that_are_alike_share_a_graph():
    layers = nn.ModuleList([layer_of(qdora()) for _ in range(3)])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(layer, fullgraph=True, backend=counter) for layer in layers]
    x = inputs(5, K)
    for run, layer in zip(compiled, layers, strict=True):
        torch.testing.assert_close(run(x), layer(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
def test_opcheck(training):
    layer, x = layer_of(qdora()), inputs(5, K)
    parts = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    parts += (layer.lora_magnitude_vector["default"].weight, layer.base_layer.bias)
    given = (x, layer._hirank_handle, *parts, None, 2.0, "auto", training)
    utils = ("test_schema", "test_faketensor", *(["test_aot_dispatch_static"] if training else []))
    torch.library.opcheck(torch.ops.hirank.adapted_quantised.default, given, test_utils=utils)


def test_a_layer_that_is_gone_before_backward_is_named():
    model, x = qdora(), inputs(5, K)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    del model
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(RuntimeError, match="keep the model until after backward"):
        y.sum().backward()

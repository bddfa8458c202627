"""DoRA over few bits in one graph: the values of uncompiled code, no break, one compilation."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hirank
from adapters.quantised_bases import (
    WARN,
    K,
    adapted,
    base,
    floats,
    gradients,
    inputs,
    layer_of,
    perturb,
    truth,
)
from hirank.adapters.peft.traced_quantised import in_one_graph
from hirank.testing import relative_rms

pytestmark = [
    # PyTorch 2.13 warns about a line of its own compiler.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # and asks for the gradient of HQQ's bias, which is no leaf, with the layer alone as well.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    WARN,
]
KINDS = ("nf4", "int8", "int8-outliers", "hqq", "torchao")


@pytest.fixture(autouse=True)
def a_fresh_compiler_that_never_recompiles():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def qdora(kind="nf4", dtype=torch.float32, **config):
    return perturb(hirank.accelerate(adapted(base(kind, dtype), **config)))


def compiled(model, backend="aot_eager"):
    return torch.compile(model, fullgraph=True, backend=backend)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_uncompiled_code_in_one_compilation(kind, dtype):
    model, budget = qdora(kind, dtype).train(), 1e-6 if dtype == torch.float32 else 1e-2
    counter = CompileCounterWithBackend("aot_eager")
    run, optimizer = compiled(model, counter), torch.optim.AdamW(trained(model), 1e-2)
    for step in range(5):
        x = inputs(2, 3, K, dtype=dtype, seed=step)
        ways = [run(x), model(x), truth(model, floats(model), x)]
        found, wanted, true = ({"y": y} | gradients(model, y, x) for y in ways)
        for name in found:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)
            assert relative_rms(found[name].detach(), true[name].detach()) < budget, name
        if step == 2:
            layer_of(model).set_scale("default", 0.3)
        run(x).float().square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_inference_follows_what_the_first_call_moved_and_silent_changes(kind):
    model, x = qdora(kind).eval(), inputs(5, K)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
            layer_of(model).lora_B["default"].weight.data.mul_(2)


def test_the_whole_model_is_one_graph():
    model, x = qdora(), inputs(5, K)
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        wanted = truth(model, floats(model), x).detach()
        assert relative_rms(run(x).detach(), wanted) < 1e-5
        layer_of(model).lora_B["default"].weight.data.mul_(2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["nf4", "hqq", "torchao"])
def test_autocast_decides_what_it_decides_for_the_layer_itself(kind):
    model, x = qdora(kind), inputs(5, K)
    for backend in ("eager", "aot_eager"):  # with autocast on while the graph runs, and off
        with torch.autocast("cpu", torch.bfloat16):
            run, plain = compiled(model, backend)(x), model(x)
        assert run.dtype == plain.dtype
        torch.testing.assert_close(run, plain)
        torch._dynamo.reset()


def test_a_copy_is_computed_with_weights_of_its_own():
    model, x = qdora(), inputs(5, K)
    twin = copy.deepcopy(model)
    layer_of(twin).lora_B["default"].weight.data.mul_(3)
    wanted = truth(twin, floats(twin), x).detach()
    assert relative_rms(compiled(twin)(x).detach(), wanted) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_alike_share_a_graph(kind):
    layers = nn.ModuleList([layer_of(qdora(kind, lora_alpha=alpha)) for alpha in (4, 8, 12)])
    counter, x = CompileCounterWithBackend("aot_eager"), inputs(5, K)

    for layer in layers:
        run = torch.compile(layer, fullgraph=True, backend=counter)
        torch.testing.assert_close(run(x), layer(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def given_to(model, x, live=None):
    layer = layer_of(model)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    m, bias = layer.lora_magnitude_vector["default"].weight, layer.base_layer.bias
    return (x, layer._hirank_handle, A, B, m, bias, live, 2.0, "auto")


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, training):
    model = qdora(kind).train(training)
    given = (*given_to(model, inputs(5, K)), training)
    utils = ("test_schema", "test_faketensor", *(["test_aot_dispatch_static"] if training else []))
    torch.library.opcheck(torch.ops.hirank.adapted_quantised.default, given, test_utils=utils)


@pytest.mark.parametrize("needs", [(True,) * 5, (False, True, False, True, False)], ids=str)
def test_opcheck_of_the_backward_pass(needs):
    model = qdora().train().requires_grad_(False)
    x = inputs(5, K).detach()
    y = model(x)
    dy, h = torch.ones_like(y), torch.ones(5, 4)
    live = torch.tensor(2.0, dtype=torch.float64)
    given = (dy, h, y, *given_to(model, x, live), list(needs))
    torch.library.opcheck(torch.ops.hirank.adapted_quantised_backward.default, given)


@pytest.mark.parametrize("case", ["dropout", "single-gemm", "several", "several, dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_and_several_adapters_stay_in_the_graph(kind, case):
    config = {"lora_dropout": 0.3} if case != "several" else {}
    model = adapted(base(kind), **config)
    if "several" in case:
        plain = LoraConfig(r=3, target_modules=["lin"], lora_dropout=0.1 if config else 0.0)
        model.add_adapter("b", plain)
        model.base_model.set_adapter(["default", "b"])
    hirank.accelerate(perturb(model), dropout="single-gemm" if case == "single-gemm" else "peft")
    counter, x = CompileCounterWithBackend("aot_eager"), inputs(2, 3, K)
    run = compiled(model.train(), counter)
    for scale in (2.0, 0.5):
        layer_of(model).set_scale("default", scale)
        ways = []
        for call in (run, model):
            torch.manual_seed(3)
            y = call(x)
            ways.append({"y": y} | gradients(model, y, x))
        torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-6)
    if case == "several":
        true = truth(model, floats(model), x)
        wanted = {"y": true} | gradients(model, true, x)
        for name, found in ways[0].items():
            assert relative_rms(found.detach(), wanted[name].detach()) < 1e-6, name
    assert counter.frame_count == 1


@pytest.mark.parametrize("live", [None, torch.tensor(2.0, dtype=torch.float64)], ids=["", "live"])
def test_opcheck_of_the_parts(live):
    layer, rows = layer_of(qdora().train()), inputs(5, K)
    A, B = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    ops, handle = torch.ops.hirank, layer._hirank_handle
    bias = layer.base_layer.bias.detach().requires_grad_()
    # a fake handle finds no layer, so what the op itself computes is not asked for here
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        ops.frozen_quantised.default, (rows, handle, bias, len(B), True), test_utils=utils
    )
    backward = torch.ones(5, len(B)), handle, K
    torch.library.opcheck(ops.frozen_quantised_backward.default, backward)
    norm = handle, A, B, live, 2.0, torch.float32, True
    torch.library.opcheck(ops.quantised_norm.default, norm)


OTHERS = {
    "adapters off": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "a hook on the base": lambda model: layer_of(model).base_layer.register_forward_hook(print),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_what_hirank_does_not_compute_is_left_alone(change):
    model = qdora()
    change(model)
    assert in_one_graph(layer_of(model), inputs(5, K)) is None


def test_a_weight_that_is_lost_after_compiling_is_named():
    model, x = qdora("int8"), inputs(5, K)
    run = compiled(model)
    run(x)
    weight, state = layer_of(model).base_layer.weight, layer_of(model).base_layer.state
    weight.SCB = state.SCB = None
    with pytest.raises(RuntimeError, match="lost the row scales"):
        run(x)


def test_a_layer_that_is_gone_before_backward_is_named():
    model, x = qdora(), inputs(5, K)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    del model
    torch.compiler.reset()
    gc.collect()
    with pytest.raises(RuntimeError, match="keep the model until after backward"):
        y.sum().backward()

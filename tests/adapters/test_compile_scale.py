"""A new scale does not compile anew: a graph reads it, unless the graph may outlive its layer."""

import copy

import pytest
import torch
from peft import LoraConfig
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import hirank
from adapters.setups import Lin, layer_of, merged_weight, perturb, reference, stock, wrap
from adapters.test_compile import both, compiled
from hirank.adapters.traced_handles import found_layer, handle_for, reads_scales
from hirank.kernels._triton import interpreting
from hirank.testing import relative_rms

pytestmark = [
    # PyTorch warns about lines of its own compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(interpreting(), reason="nothing here depends on Triton"),
]


@pytest.fixture(autouse=True)
def a_fresh_compiler_that_never_recompiles():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


CHANGES = {
    "set_scale": lambda layer: layer.set_scale("default", 0.3),
    "scale_layer": lambda layer: layer.scale_layer(3.0),
    "unscale_layer": lambda layer: layer.unscale_layer(2.0),
    "an entry": lambda layer: layer.scaling.__setitem__("default", 0.7),
    "a dictionary": lambda layer: setattr(layer, "scaling", {"default": 0.9}),
}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16 autocast"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_way_to_a_new_scale_is_followed(dora, dropout, half):
    model = perturb(wrap(Lin(24, 16), use_dora=dora, lora_dropout=dropout)).train()
    run, x = compiled(model), torch.randn(2, 5, 24)
    slack = 2e-2 if half and dropout else 1e-6  # s in B is rounded where s of a GEMM is not
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for change in (lambda layer: None, *CHANGES.values()):
            change(layer_of(model))
            expected, found = both(model, model, x), both(run, model, x)
            torch.testing.assert_close(found, expected, rtol=slack, atol=slack)


def test_values_are_those_of_the_formula():
    model = perturb(wrap(Lin(24, 16)))
    run, x = compiled(model, "inductor"), torch.randn(5, 24)
    for scale in (2.0, 0.3, -1.0, 0.0, 17.0):
        layer_of(model).set_scale("default", scale)
        y, dx, *_ = both(run, model, x)
        assert relative_rms(y.detach(), reference(model, x)) < 1e-6
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape).double()
        assert relative_rms(dx, dy @ merged_weight(layer_of(model))) < 1e-6


def test_several_adapters_each_have_their_own():
    model = stock(Lin(24, 16))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=False))
    model.base_model.set_adapter(["default", "b"])
    hirank.accelerate(perturb(model))
    run, x = compiled(model), torch.randn(3, 24)
    for scales in ((1.0, 1.0), (0.5, 1.0), (0.5, -2.0)):
        for name, scale in zip(("default", "b"), scales, strict=True):
            layer_of(model).set_scale(name, scale)
        torch.testing.assert_close(both(run, model, x), both(model, model, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_are_of_the_scale_of_their_forward(backend):
    model = perturb(wrap(Lin(24, 16)))
    x = torch.randn(3, 24)
    expected, run = both(model, model, x)[1:], compiled(model, backend)
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    layer_of(model).set_scale("default", 0.1)
    weights = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    factors = torch.linspace(-1, 1, y.numel()).view(y.shape)
    torch.testing.assert_close(list(torch.autograd.grad((y * factors).sum(), weights)), expected)


def test_layers_that_differ_in_scale_alone_share_a_graph():
    layers = [layer_of(perturb(wrap(Lin(24, 16), lora_alpha=alpha))) for alpha in (4, 8, 12)]
    counter, x = CompileCounter(), torch.randn(3, 24)
    for layer in layers:
        run = torch.compile(layer, fullgraph=True, backend=counter)
        torch.testing.assert_close(run(x), layer(x))
    assert counter.frame_count == 1


def test_a_copy_has_a_scale_of_its_own():
    model = perturb(wrap(Lin(24, 16)))
    twin, x = copy.deepcopy(model), torch.randn(3, 24)
    layer_of(twin).set_scale("default", 0.1)
    torch.testing.assert_close(compiled(twin)(x), twin(x))
    assert found_layer(layer_of(model)._hirank_handle) is layer_of(model)


def test_half_precision_keeps_a_scale_that_would_overflow_b_in_its_gemm():
    model = perturb(wrap(Lin(24, 16).half(), lora_dropout=0.3)).train()
    x = torch.randn(3, 24).half()
    layer_of(model).lora_B["default"].weight.data.fill_(100.0)
    layer_of(model).lora_A["default"].weight.data.mul_(1e-3)
    layer_of(model).scaling["default"] = 1000.0
    found = both(compiled(model), model, x)
    assert all(tensor.isfinite().all() for tensor in found)


def test_what_is_exported_keeps_its_scale():
    model = perturb(wrap(Lin(24, 16))).eval()
    x = torch.randn(3, 24)
    expected = model(x)
    program = torch.export.export(model, (x,), strict=True)
    layer_of(model).set_scale("default", 0.1)
    torch.testing.assert_close(program.module()(x), expected)


@pytest.mark.parametrize(
    ("how", "lives"),
    [
        ({}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"mode": "reduce-overhead"}, False),
        ({"options": {"triton.cudagraphs": True}}, False),
        ({"backend": "cudagraphs"}, False),
        ({"backend": CompileCounterWithBackend("eager")}, False),
    ],
    ids=["inductor", "autotuned", "reduce-overhead", "option", "cudagraphs", "another backend"],
)
def test_on_a_gpu_only_inductor_without_graphs_reads_it(how, lives):
    layer = layer_of(wrap(Lin(24, 16)))
    run = torch.compile(lambda x: x + reads_scales(layer, on_gpu=True), fullgraph=True, **how)
    assert run(torch.zeros(1)) == lives


def test_scales_that_peft_made_tensors_are_left_to_peft():
    model = perturb(wrap(Lin(24, 16), use_dora=False))  # PEFT's DoRA is no one graph
    run, x = compiled(model), torch.randn(3, 24)
    run(x)
    prepare_model_for_compiled_hotswap(model)
    with pytest.raises(RuntimeError, match="compile the model again"):
        run(x)
    torch._dynamo.reset()
    run = compiled(model)
    for scale in (0.5, 2.0):
        layer_of(model).scaling["default"].fill_(scale)
        torch.testing.assert_close(run(x), model(x))


def test_a_layer_that_is_gone_is_named():
    handle = handle_for(layer_of(wrap(Lin(24, 16))))
    with pytest.raises(RuntimeError, match="keep the model until after backward"):
        found_layer(handle)

"""Case D55: torch.compile takes converted models as one graph, once; norms follow the weights."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import hirank
from adapters.setups import Lin, checkpoint, fresh_norm, layer_of, perturb, stock, wrap
from helpers import tiny_llama
from hirank.adapters.gain import norm_of
from hirank.kernels._triton import interpreting

pytestmark = [
    # PyTorch warns about lines of its own compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(interpreting(), reason="nothing here depends on Triton"),
]
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def a_fresh_compiler_that_never_recompiles():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend="aot_eager"):
    return torch.compile(model, fullgraph=True, backend=backend)


def both(call, model: nn.Module, x: torch.Tensor, seed: int = 3):
    """Output and gradients of `call`, which runs `model`."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = call(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    factors = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
    return [y, *torch.autograd.grad((y * factors).sum(), [x, *weights])]


KINDS = {
    "dora": {},
    "lora": {"use_dora": False},
    "dora with dropout": {"lora_dropout": 0.1},
    "lora with dropout": {"lora_dropout": 0.1, "use_dora": False},
    "trainable bias": {"bias": "lora_only"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_d55_one_graph_and_the_same_numbers(kind, training, backend):
    model = perturb(wrap(Lin(24, 16), **kind)).train(training)
    x = torch.randn(2, 5, 24)
    expected, found = both(model, model, x), both(compiled(model, backend), model, x)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if "lora_dropout" in kind and training and backend == "inductor":
            continue  # it draws other masks
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("single", [False, True], ids=["peft", "single-gemm"])
def test_d55_dropout_draws_anew_at_each_call(single):
    model = perturb(stock(Lin(24, 16), lora_dropout=0.5))
    hirank.accelerate(model, dropout="single-gemm" if single else "peft")
    run, x = compiled(model, "inductor"), torch.randn(3, 24)
    assert not torch.equal(run(x), run(x))
    many = torch.stack([run(x) for _ in range(2000)]).mean(0)
    model.eval()
    torch.testing.assert_close(many, model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_d55_no_recompile_over_steps_and_norms_follow(dropout, backend):
    model = perturb(wrap(Lin(24, 16), lora_dropout=dropout)).train()
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend(backend)
    runs = (compiled(model, counter), twin)
    weights = [[p for p in m.parameters() if p.requires_grad] for m in (model, twin)]
    optimizers = [torch.optim.AdamW(ps, lr=1e-2, fused=True) for ps in weights]
    layer = layer_of(model)
    for step in range(5):
        for run, optimizer in zip(runs, optimizers, strict=True):
            torch.manual_seed(step)
            for _ in range(2):  # accumulation
                run(torch.randn(4, 24)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert layer._hirank_norms["default"].computed == step + 1
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
        where = (layer.base_layer.weight, layer.lora_A["default"].weight,
                 layer.lora_B["default"].weight)  # fmt: skip
        used = norm_of(*where, layer.scaling["default"], torch.float32)
        torch.testing.assert_close(used.double(), fresh_norm(layer), rtol=1e-5, atol=0)
    assert counter.frame_count == 1


CHANGES = {
    "data": lambda layer: layer.lora_A["default"].weight.data.add_(0.1),
    "one entry": lambda layer: layer.lora_B["default"].weight.data[3, 1].add_(0.05),
    "assigned": lambda layer: setattr(
        layer.lora_A["default"].weight, "data", layer.lora_A["default"].weight.data * 1.5
    ),
    "base weight": lambda layer: layer.base_layer.weight.data.mul_(1.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_d55_a_silent_change_is_noticed_without_recompiling(change, training):
    model = perturb(wrap(Lin(24, 16))).train(training)
    run, x = compiled(model, "inductor"), torch.randn(3, 24)
    run(x)
    change(layer_of(model))
    found = run(x)
    torch.testing.assert_close(found, copy.deepcopy(model)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dropout", "checkpointing", "autocast"),
    [(0.0, False, False), (0.1, False, True), (0.0, True, True), (0.1, True, False)],
    ids=["plain", "dropout, autocast", "checkpointing, autocast", "dropout, checkpointing"],
)
def test_d55_a_whole_language_model_trains(dropout, checkpointing, autocast):
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True, lora_dropout=dropout)
    model = hirank.accelerate(perturb(get_peft_model(tiny_llama(layers=1), config), 0.02)).train()
    if checkpointing:
        checkpoint(model, use_reentrant=False)
        model.disable_input_require_grads()  # a hook that PyTorch cannot trace, and nobody needs
    model.config.use_cache = False
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(model, counter)
    weights = [[p for p in m.parameters() if p.requires_grad] for m in (model, twin)]
    optimizers = [torch.optim.AdamW(ps, lr=1e-3, fused=True) for ps in weights]
    for step in range(5):
        ids = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(step))
        for call, optimizer in zip((run, twin), optimizers, strict=True):
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = call(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    slack = 2e-3 if autocast else 1e-5
    if not dropout or not checkpointing:
        torch.testing.assert_close(*weights, rtol=slack, atol=slack)
    layers = [m for m in model.modules() if hasattr(m, "_hirank_norms")]
    assert [layer._hirank_norms["default"].computed for layer in layers] == [5] * 7


def test_d55_a_whole_language_model_infers():
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    model = hirank.accelerate(perturb(get_peft_model(tiny_llama(), config), 0.02)).eval()
    ids = torch.randint(0, 320, (2, 12))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        found = compiled(model)(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_alike_share_one_graph():
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    model = hirank.accelerate(perturb(get_peft_model(tiny_llama(layers=4), config), 0.02))
    ids = torch.randint(0, 320, (2, 12))
    model.enable_input_require_grads()  # else the first block differs from the rest
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    counter = CompileCounter()
    for block in model.base_model.model.model.layers:
        block.compile(fullgraph=True, backend=counter)
    found = model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_several_adapters_compile(kinds, dropout):
    model = stock(Lin(24, 16), use_dora=kinds[0], lora_dropout=dropout)
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=kinds[1]))
    model.base_model.set_adapter(["default", "b"])
    hirank.accelerate(perturb(model)).train()
    x = torch.randn(3, 24)
    expected, found = both(model, model, x), both(compiled(model), model, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_what_changes_the_route_compiles_again_and_is_right():
    model = stock(Lin(24, 16))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    model = hirank.accelerate(perturb(model))
    run, x = compiled(model), torch.randn(3, 24)
    changes = (
        lambda: None, lambda: model.set_adapter("b"), lambda: layer_of(model).set_scale("b", 0.3),
        lambda: model.eval(), lambda: model.merge_adapter(), lambda: model.unmerge_adapter(),
        lambda: hirank.accelerate(model, backend="torch"),
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=False):
        for change in changes:
            change()
            torch.testing.assert_close(run(x), copy.deepcopy(model)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 2, 3, 24)], ids=str)
def test_any_input_shape(shape):
    model = perturb(wrap(Lin(24, 16)))
    x = torch.randn(shape)
    torch.testing.assert_close(both(compiled(model), model, x), both(model, model, x))


def test_sizes_that_vary_compile_twice_at_most():
    model = perturb(wrap(Lin(24, 16)))
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(model, counter)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for size in (3, 5, 7, 9, 11):
            x = torch.randn(size, 24)
            torch.testing.assert_close(run(x), model(x))
    assert counter.frame_count == 2  # the second is for any size


def test_half_weights_under_autocast():
    model = perturb(wrap(Lin(24, 16).bfloat16())).train()
    x = torch.randn(3, 24)
    run = compiled(model, "inductor")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = both(model, model, x), both(run, model, x)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_wrong_input_is_refused_while_compiling():
    model = wrap(Lin(24, 16))
    with pytest.raises(Exception, match="it must end in 24"):
        compiled(model)(torch.ones(2, 23))


def test_a_restored_layer_is_no_trouble_to_others():
    """Its norms may outlive its conversion."""
    before = perturb(wrap(Lin(24, 16)))
    x = torch.randn(2, 24)
    before(x)
    (layer,) = [m for m in before.modules() if hasattr(m, "_hirank_norms")]
    kept = dict(layer._hirank_norms)
    hirank.restore(before)
    model = perturb(wrap(Lin(24, 16)))
    torch.testing.assert_close(compiled(model, "eager")(x), model(x))
    assert kept

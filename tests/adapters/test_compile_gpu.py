"""Case D55 on a GPU: inductor, CUDA graphs by the compiler, and graphs captured by hand."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hirank
from adapters.setups import Lin, checkpoint, fresh_norm, layer_of, perturb, stock, wrap
from helpers import tiny_llama
from hirank.adapters.capture import capture_id

pytestmark = [
    pytest.mark.gpu,
    # PyTorch and Triton warn about lines of their own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Online softmax is disabled:UserWarning"),
]
SIZE = 128  # rows and columns that kernels like


@pytest.fixture(autouse=True)
def a_fresh_compiler_that_never_recompiles():
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)  # its fills would be recorded and compiled, too
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def llama(**config) -> nn.Module:
    settings = {"r": 8, "target_modules": "all-linear", "use_dora": True} | config
    model = get_peft_model(
        tiny_llama(hidden=SIZE, layers=1).bfloat16().cuda(), LoraConfig(**settings)
    )
    model = hirank.accelerate(perturb(model, size=0.01))
    model.config.use_cache = False
    return model


def layers(model: nn.Module) -> list:
    return [module for module in model.modules() if hasattr(module, "_hirank_norms")]


# The compiler.


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_d55_a_language_model_trains_without_recompiling(dropout, checkpointing):
    model = llama(lora_dropout=dropout).train()
    if checkpointing:
        checkpoint(model, use_reentrant=False)
        model.disable_input_require_grads()  # a hook that PyTorch cannot trace, and nobody needs
    twin = copy.deepcopy(model)
    counter = CompileCounterWithBackend("inductor")
    run = torch.compile(model, fullgraph=True, backend=counter)
    losses = {}
    for name, call, trained in (("compiled", run, model), ("eager", twin, twin)):
        weights = [p for p in trained.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
        losses[name] = []
        for step in range(5):
            draw = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 320, (2, 64), generator=draw).cuda()
            for _ in range(2):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = call(input_ids=ids, labels=ids).loss
                loss.backward()
                losses[name].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    assert [layer._hirank_norms["default"].computed for layer in layers(model)] == [5] * 7
    pairs = zip(losses["compiled"], losses["eager"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < (0.1 if dropout else 2e-2)


@pytest.mark.parametrize("kind", ["dora", "lora", "bias"])
def test_outputs_and_gradients_equal_eager(kind):
    model = perturb(stock(Lin(SIZE, 2 * SIZE, bias=kind == "bias").cuda(), use_dora=kind != "lora"))
    hirank.accelerate(model.bfloat16()).train()
    x = torch.randn(4, 32, SIZE, device="cuda", dtype=torch.bfloat16)
    found = []
    for call in (model, torch.compile(model, fullgraph=True)):
        x_ = x.clone().requires_grad_()
        y = call(x_)
        weights = [p for p in model.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [x_, *weights])])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0][0], found[1][0])  # the same kernels


CHANGES = {
    "data": lambda layer: layer.lora_A["default"].weight.data.add_(0.1),
    "one entry": lambda layer: layer.lora_B["default"].weight.data[3, 1].add_(0.5),
    "in place": lambda layer: torch.no_grad()(layer.lora_B["default"].weight.mul_)(1.5),
    "magnitude": lambda layer: layer.lora_magnitude_vector["default"].weight.data.mul_(1.5),
}


def infer(call, x):
    with torch.no_grad():
        return call(x).clone()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_new_scale_does_not_compile_anew(half, dropout):
    dtype = torch.bfloat16 if half else torch.float32
    model = perturb(stock(Lin(SIZE, 2 * SIZE).cuda(), lora_dropout=dropout)).to(dtype)
    hirank.accelerate(model).train()  # keeps m in fp32
    run = torch.compile(model, fullgraph=True)
    x = torch.randn(8, SIZE, device="cuda", dtype=dtype)
    weights = [p for p in model.parameters() if p.requires_grad]
    for scale in (2.0, 0.3, 1.7):
        layer_of(model).set_scale("default", scale)
        if dropout:  # the compiler draws other masks
            assert run(x).isfinite().all()
            continue
        outputs = run(x), model(x)
        grads = [torch.autograd.grad(y.float().square().sum(), weights) for y in outputs]
        torch.testing.assert_close(*outputs, rtol=1e-2 if half else 1e-5, atol=1e-4)
        torch.testing.assert_close(*grads, rtol=2e-2 if half else 1e-4, atol=1e-2 if half else 1e-3)


def test_reduce_overhead_follows_a_new_scale_by_compiling_anew():
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(8, SIZE, device="cuda")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for scale in (2.0, 0.3, 1.7):
            layer_of(model).set_scale("default", scale)
            for _ in range(4):  # warm, record, play
                torch.compiler.cudagraph_mark_step_begin()
                found = infer(run, x)
            torch.testing.assert_close(found, infer(model, x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_d55_reduce_overhead_follows_every_change(half):
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    model = model.bfloat16() if half else model
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = torch.randn(8, SIZE, device="cuda", dtype=torch.bfloat16 if half else torch.float32)
    for _ in range(4):  # warm, record, play
        torch.compiler.cudagraph_mark_step_begin()
        infer(run, x)
    for change in CHANGES.values():
        change(layer_of(model))
        torch.compiler.cudagraph_mark_step_begin()
        found = infer(run, x)
        expected = infer(copy.deepcopy(model), x)
        torch.testing.assert_close(found, expected, rtol=1e-2 if half else 1e-5, atol=1e-3)


def test_d55_a_language_model_infers_with_reduce_overhead():
    model = llama().eval()
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    ids = torch.randint(0, 320, (1, 16), device="cuda")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*computes hirank's norms.*")
        for round in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            found = run(input_ids=ids).logits.clone()
            if round > 2:
                for layer in layers(model):
                    layer.lora_B["default"].weight.data.mul_(1.5)
        torch.compiler.cudagraph_mark_step_begin()
        found = run(input_ids=ids).logits.clone()
        expected = copy.deepcopy(model)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


# By hand.


def captured(call, x):
    """A graph of `call(x)`, warmed up as PyTorch asks for; its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        call(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(x)
    return graph, out


def assert_follows(model, graph, out, x, half=False):
    for change in CHANGES.values():
        change(layer_of(model))
        graph.replay()
        found = out.clone()
        expected = infer(copy.deepcopy(model), x)
        torch.testing.assert_close(found, expected, rtol=1e-2 if half else 1e-5, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 64], ids=["decode", "prefill"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_d55_a_captured_graph_follows_every_change(rows, half):
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    model = model.bfloat16() if half else model
    x = torch.randn(rows, SIZE, device="cuda", dtype=torch.bfloat16 if half else torch.float32)
    expected = infer(model, x)
    graph, out = captured(model, x)
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(out, expected)
    assert layer_of(model)._hirank_norms["default"].computed == 1  # played, but nothing changed
    assert_follows(model, graph, out, x, half)


def test_d55_graph_and_host_may_take_turns():
    """Weights go back and forth, and now the one, now the other is the first to notice."""
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    x, layer = torch.randn(4, SIZE, device="cuda"), layer_of(model)
    graph, out = captured(model, x)
    A = layer.lora_A["default"].weight
    first = A.detach().clone()
    for turn in range(8):
        A.data.copy_(first * (2 if turn % 2 else 1))
        host_first = turn % 4 < 2
        found = infer(model, x) if host_first else None
        graph.replay()
        again = infer(model, x)
        expected = infer(copy.deepcopy(model), x)
        for result in (out, again, *([found] if found is not None else [])):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


def test_d55_a_graph_survives_that_the_table_is_built_anew():
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    x = torch.randn(4, SIZE, device="cuda")
    graph, out = captured(model, x)
    hirank.accelerate(model)  # forgets every norm
    infer(model, x)
    torch.cuda.empty_cache()
    assert_follows(model, graph, out, x)


def test_d55_a_model_that_never_ran_is_captured_too_and_says_what_that_costs():
    model = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    x = torch.randn(4, SIZE, device="cuda")
    warm = perturb(wrap(Lin(SIZE, 2 * SIZE).cuda())).eval()
    infer(warm, x)  # kernels and cuBLAS are warm, the model's norms are not known
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="run it once in the same way"):
        with torch.no_grad(), torch.cuda.graph(graph):
            out = model(x)
    graph.replay()
    torch.testing.assert_close(out, infer(copy.deepcopy(model), x), rtol=1e-5, atol=1e-4)
    assert_follows(model, graph, out, x)


def test_d55_a_whole_language_model_records_one_refresh():
    model = llama().eval()
    ids = torch.randint(0, 320, (1, 16), device="cuda")
    with torch.no_grad():
        model(input_ids=ids)
    group = layers(model)[0]._hirank_norms["default"].members[torch.bfloat16].group
    refreshes, refresh = [], group._table.refresh
    group._table.refresh = lambda **options: (refreshes.append(options), refresh(**options))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(input_ids=ids).logits
    assert refreshes == [{}]
    for layer in layers(model):
        layer.lora_B["default"].weight.data.mul_(1.5)
    graph.replay()
    with torch.no_grad():
        expected = copy.deepcopy(model)(input_ids=ids).logits
    torch.testing.assert_close(out, expected, rtol=5e-2, atol=5e-2)


def test_every_capture_has_a_number_of_its_own():
    numbers = []
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda")
            numbers.append(capture_id(torch.cuda.current_stream().cuda_stream))
    assert None not in numbers and numbers[0] != numbers[1]
    assert capture_id(torch.cuda.current_stream().cuda_stream) is None


def test_another_stream_waits_for_the_norm():
    model = perturb(wrap(Lin(4096, 4096).cuda())).eval()
    layer, x = layer_of(model), torch.randn(2, 4096, device="cuda")
    infer(model, x)
    torch.cuda.synchronize()
    layer.lora_A["default"].weight.data.mul_(2)
    torch.cuda.synchronize()
    cache, base = layer._hirank_norms["default"], layer.base_layer.weight
    weights = (base, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 2.0)
    torch.cuda._sleep(50_000_000)  # the default stream is busy: the refresh has to wait
    cache.norm(*weights, torch.float32)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found = cache.norm(*weights, torch.float32).clone()
    side.synchronize()
    torch.testing.assert_close(found.double(), fresh_norm(layer), rtol=1e-5, atol=0)

"""Four and eight bits on a GPU: bf16, fp32 adapters, autocast; norms kept with one wait a pass."""

import copy

import pytest
import torch
from torch import nn

import hirank
from adapters.quantised_bases import Quantised, adapted, layer_of, perturb
from hirank.adapters.dequantise import kind_of
from hirank.testing import assert_within_budget, relative_rms

bits = pytest.importorskip("bitsandbytes").nn
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*(will be cast from|rounding errors).*"),
]
K, N = 1024, 768


def linear(kind: str) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(K, N).bfloat16()
    if kind == "int8":
        made = bits.Linear8bitLt(K, N, has_fp16_weights=False, threshold=6.0)
        made.weight = bits.Int8Params(plain.weight.data, requires_grad=False)
    else:
        made = bits.Linear4bit(K, N, compute_dtype=torch.bfloat16, quant_type=kind)
        made.weight = bits.Params4bit(
            plain.weight.data, requires_grad=False, quant_type=kind, module=made
        )
    made.bias = nn.Parameter(plain.bias.data)
    return made.requires_grad_(False).cuda()


def model_over(kind: str, **config):
    flag = {"is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit": True}
    return perturb(adapted(Quantised(linear(kind), **flag), r=16, lora_alpha=32, **config))


def weight_of(model) -> torch.Tensor:
    base = layer_of(model).base_layer
    return kind_of(base).weight(base, torch.bfloat16).double()


def formula(model, weight, x, dtype):
    layer = layer_of(model)
    A, B = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    v = x.to(dtype) @ weight.to(dtype).T + 2 * (x.to(dtype) @ A.to(dtype).T) @ B.to(dtype).T
    if layer.lora_variant:
        full = weight + 2 * B.detach().bfloat16().double() @ A.detach().bfloat16().double()
        m = layer.lora_magnitude_vector["default"].weight
        v = (m.double() / full.norm(dim=1)).to(dtype) * v
    return v + layer.base_layer.bias.to(dtype)


def measured(model, y, x):
    draw = torch.Generator("cuda").manual_seed(5)
    dy = torch.randn(y.shape, generator=draw, device="cuda").to(y.dtype)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad} | {"x": x}
    grads = torch.autograd.grad(y, list(named.values()), dy)
    return {"y": y.detach(), **dict(zip(named, grads, strict=True))}


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("tokens", [3, 333])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_outputs_and_gradients(kind, tokens, dora):
    model = hirank.accelerate(model_over(kind, use_dora=dora))
    x = torch.randn(2, tokens, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    weight = weight_of(model)
    found = [measured(model, y, x)]
    found += [measured(model, formula(model, weight, x, d), x) for d in (x.dtype, torch.float64)]
    assert y.dtype == torch.bfloat16
    assert_within_budget(*found, torch.bfloat16)


def test_eight_bits_are_as_near_as_stock():
    stock = model_over("int8")
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    exact = formula(stock, weight_of(stock), x, torch.float64)
    wanted, theirs = measured(stock, exact, x), measured(stock, stock(x), x)
    hirank.accelerate(stock)
    ours = measured(stock, stock(x), x)
    for name, right in wanted.items():
        off = relative_rms(theirs[name], right)
        assert relative_rms(ours[name], right) <= 1.5 * off + 2.0**-8, name


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_identity_at_initialisation(kind):
    flag = {"is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit": True}
    model = hirank.accelerate(adapted(Quantised(linear(kind), **flag)))
    for tokens in (1, 200):
        x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
        for training in (False, True):  # bitsandbytes has a kernel of its own for one frozen token
            own = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                with model.disable_adapter():
                    wanted = model(own).detach()
                assert relative_rms(model(own).detach(), wanted) < 2.0**-9


def test_few_tokens_without_gradient_read_the_four_bits():
    model = hirank.accelerate(model_over("nf4")).eval()
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    exact = formula(model, weight_of(model), x, torch.float64).detach()
    with torch.no_grad():
        for _ in range(2):
            assert relative_rms(model(x), exact) < 2.0**-7
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
    assert torch.cuda.max_memory_allocated() - before < K * N  # half a dequantised weight


def two_layers():
    two = nn.Sequential(linear("nf4"), nn.Linear(N, K).cuda().bfloat16(), linear("nf4"))
    made = Quantised(two, is_loaded_in_4bit=True)
    return hirank.accelerate(perturb(adapted(made, target_modules=["lin.0", "lin.2"])))


def test_never_stale():
    model = two_layers()
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    x = torch.randn(8, K, device="cuda", dtype=torch.bfloat16)

    def current():
        twin = copy.deepcopy(model)
        return torch.equal(model(x), hirank.accelerate(twin)(x))

    for _ in range(2):
        assert current()
    for layer in layers:
        layer.lora_B["default"].weight.data.mul_(1.3)
        assert current()
        layer.set_scale("default", 0.4)
        assert current()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, fused=True)
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        assert current()


def test_one_norm_a_step():
    model = two_layers()
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    for step in range(3):
        for _ in range(4):
            x = torch.randn(8, K, device="cuda", dtype=torch.bfloat16)
            model(x).float().square().mean().backward()
        assert [m.norms_of("default").computed for m in layers] == [step + 1] * 2
        optimizer.step()
        optimizer.zero_grad()


def test_peak_memory_is_one_dequantised_weight():
    model = hirank.accelerate(model_over("nf4"))
    x = torch.randn(4, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * K * N * 2

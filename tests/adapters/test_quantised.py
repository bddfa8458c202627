"""LoRA and DoRA over quantised bases, against fp64 of the dequantised weight and against PEFT."""

import copy
import pickle

import pytest
import torch
from torch import nn

import hirank
from adapters.quantised_bases import (
    MAKERS,
    WARN,
    Int4Linear,
    K,
    N,
    Quantised,
    adapted,
    base,
    floats,
    gradients,
    inputs,
    int4,
    layer_of,
    perturb,
    truth,
)
from hirank.adapters import dequantise, four_bits
from hirank.errors import HirankError
from hirank.kernels._triton import interpreting
from hirank.testing import assert_within_budget, relative_rms
from recorder import LiveBytes, OpLog

KINDS = list(MAKERS)
pytestmark = [WARN]
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def registered():
    hirank.register_quantised_linear(Int4Linear, Int4Linear.dequantize)
    yield
    dequantise._registered.clear()


def compare(model, x, floor):
    weight = floats(model)
    y = model(x)
    exact = truth(model, weight, x)
    assert relative_rms(y.detach(), exact.detach()) < floor
    found, wanted = gradients(model, y, x), gradients(model, exact, x)
    for name, grad in wanted.items():
        assert relative_rms(found[name], grad) < floor, name


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_outputs_and_gradients(kind, dtype, dora):
    model = hirank.accelerate(adapted(base(kind, dtype), use_dora=dora))
    perturb(model)
    compare(model, inputs(2, 5, K, dtype=dtype), FLOORS[dtype])
    assert "peft" not in str(hirank.explain(model))


def test_without_bias_and_without_input_gradient(kind):
    model = perturb(hirank.accelerate(adapted(base(kind, bias=False))))
    x = inputs(7, K).detach()
    y, exact = model(x), truth(model, floats(model), x)
    assert relative_rms(y.detach(), exact.detach()) < 2e-6
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_within_budget(kind):
    """The budget of `hirank.testing`: twice the error of the plain formula in bf16."""
    model = perturb(adapted(base(kind, torch.bfloat16)))
    x = inputs(33, K, dtype=torch.bfloat16)
    stock, results = model(x), []
    hirank.accelerate(model)
    weight = floats(model)
    for y in (model(x), truth(model, weight, x, torch.bfloat16), truth(model, weight, x)):
        results.append({"y": y.detach(), **gradients(model, y, x)})
    assert results[0]["y"].dtype == stock.dtype
    assert_within_budget(*results, torch.bfloat16)
    assert relative_rms(stock.detach(), results[2]["y"]) < 2.0**-7


def test_identity_at_initialisation(kind):
    for dtype in FLOORS:
        model = hirank.accelerate(adapted(base(kind, dtype)))
        x = inputs(9, K, dtype=dtype)
        layer = layer_of(model)
        packed = dequantise.Packed(layer.base_layer, dequantise.kind_of(layer.base_layer), x)
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        norm = layer.norms_of("default").norm(packed, A, B, 2.0)
        magnitude = layer.lora_magnitude_vector["default"].weight
        assert magnitude.dtype == torch.float32
        assert torch.equal(magnitude, norm)
        with model.disable_adapter():
            wanted = model(x)
        if kind in ("hqq", "torchao"):  # they round once more before they add the bias
            assert relative_rms(model(x).detach(), wanted.detach()) < FLOORS[dtype]
        else:
            assert torch.equal(model(x), wanted)


def test_made_by_the_patch(kind):
    with hirank.patch_peft():
        model = adapted(base(kind, torch.bfloat16))
    stock = adapted(base(kind, torch.bfloat16))
    assert type(layer_of(model)).__name__ != type(layer_of(stock)).__name__
    magnitude = layer_of(model).lora_magnitude_vector["default"].weight
    assert magnitude.dtype == torch.float32
    assert torch.allclose(
        magnitude, layer_of(stock).lora_magnitude_vector["default"].weight, rtol=2**-7
    )
    perturb(model)
    compare(model, inputs(5, K, dtype=torch.bfloat16), 2.0**-7)


@pytest.fixture
def counted(monkeypatch):
    """How often a weight was made into floats."""
    calls = []
    known = dict(dequantise._KNOWN)

    def counting(kind):
        def weight(layer, dtype):
            calls.append(dtype)
            return kind.weight(layer, dtype)

        return kind._replace(
            weight=weight,
            square_sum=lambda layer: calls.append("norm") or kind.square_sum(layer),
        )

    monkeypatch.setattr(dequantise, "_KNOWN", {name: counting(k) for name, k in known.items()})
    monkeypatch.setattr(dequantise, "_TORCHAO", counting(dequantise._TORCHAO))
    return calls


def test_one_dequantisation_a_pass(kind, counted):
    model = perturb(hirank.accelerate(adapted(base(kind))))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    norms = layer_of(model).norms_of("default")
    for step in range(3):
        for micro in range(2):
            counted.clear()
            y = model(inputs(6, K, seed=10 * step + micro))
            assert len(counted) <= 1, counted
            counted.clear()
            y.square().sum().backward()
            assert len(counted) == 1, counted
        assert norms.computed == step + 1
        optimizer.step()
        optimizer.zero_grad()


def test_inference_asks_for_floats_once_for_the_norm_at_most(kind, counted):
    model = perturb(hirank.accelerate(adapted(base(kind)))).eval()
    with torch.no_grad():
        for _ in range(3):
            counted.clear()
            model(inputs(4, K))
            assert len(counted) <= 1
    assert layer_of(model).norms_of("default").computed == 1


def test_dropout_and_several_adapters_share_one_dequantisation(kind, counted):
    model = adapted(base(kind), lora_dropout=0.3)
    from peft import LoraConfig

    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True, lora_dropout=0.2))
    model.base_model.set_adapter(["default", "b"])
    hirank.accelerate(perturb(model)).train()
    counted.clear()
    y = model(inputs(6, K))
    assert len(counted) <= 2  # ||W||^2 of a loaded adapter may come in another dtype
    counted.clear()
    y.sum().backward()
    assert len(counted) == 1


def test_dropout_as_peft_means_it(kind):
    model = perturb(adapted(base(kind), lora_dropout=0.4)).train()
    x = inputs(64, K)
    torch.manual_seed(1)
    stock = model(x)
    theirs = gradients(model, stock, x)
    hirank.accelerate(model)
    torch.manual_seed(1)
    ours = model(x)
    found = gradients(model, ours, x)
    assert relative_rms(ours.detach(), stock.detach()) < 3e-6
    assert all(relative_rms(found[n], theirs[n]) < 3e-6 for n in theirs)


def test_single_gemm_dropout_has_the_eval_output_as_its_mean():
    model = perturb(adapted(base("nf4"), lora_dropout=0.3))
    hirank.accelerate(model, dropout="single-gemm").train()
    x = inputs(1, K).detach()
    mean = model(x.expand(20_000, K)).mean(0).detach()
    assert relative_rms(mean, model.eval()(x).detach()) < 0.01


@pytest.mark.parametrize("dora", [(True, True), (True, False), (False, True)], ids=str)
def test_several_adapters(kind, dora):
    from peft import LoraConfig

    model = adapted(base(kind), use_dora=dora[0])
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=dora[1]))
    model.base_model.set_adapter(["b", "default"])
    hirank.accelerate(perturb(model))
    compare(model, inputs(5, K), 3e-6)
    model.base_model.set_adapter("b")
    compare(model, inputs(5, K), 3e-6)
    with model.disable_adapter():
        x = inputs(5, K)
        assert torch.equal(model(x), layer_of(model).base_layer(x))


def test_no_full_copy_wider_than_the_compute_dtype(kind):
    if kind == "hqq":
        pytest.skip("HQQ makes its floats by PyTorch ops of its own, in its compute dtype")
    model = perturb(hirank.accelerate(adapted(base(kind, torch.bfloat16))))
    x = inputs(8, K, dtype=torch.bfloat16)
    with OpLog() as log:
        model(x).float().sum().backward()
    assert not log.made(torch.float32, (N, K))
    assert not log.made(None, (K, K))


def test_peak_memory_is_one_dequantised_weight():
    bnb = pytest.importorskip("bitsandbytes")
    n = k = 1024
    lin = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    from adapters.quantised_bases import Quantised

    model = hirank.accelerate(adapted(Quantised(lin.to("cpu"), is_loaded_in_4bit=True)))
    perturb(model)
    x = inputs(2, k, dtype=torch.bfloat16)
    model(x)
    with LiveBytes() as live:
        model(x).sum().backward()
    assert live.peak < 1.25 * n * k * 2


def stale(model, x):
    """Whether the output is not that of the weights as they are."""
    return relative_rms(model(x).detach(), truth(model, floats(model), x).detach()) > 1e-5


def test_never_stale(kind):
    model = perturb(hirank.accelerate(adapted(base(kind))))
    x, layer = inputs(5, K), layer_of(model)
    assert not stale(model, x)
    B = layer.lora_B["default"].weight
    B.data.add_(0.1)  # no version counter sees this
    assert not stale(model, x)
    layer.lora_A["default"].weight.data = torch.randn(4, K) / 10
    assert not stale(model, x)
    layer.set_scale("default", 0.3)
    assert not stale(model, x)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], 0.1, fused=True
    )
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        assert not stale(model, x)
    state = {k: v + 0.1 for k, v in layer.state_dict().items() if "lora_" in k}
    layer.load_state_dict(state, strict=False)
    assert not stale(model, x)


def test_never_stale_where_a_model_is_compared_once_a_pass(monkeypatch):
    """The way of a GPU, on a CPU: two layers, and writes that no counter sees."""
    from hirank.adapters import quantised_norms

    monkeypatch.setattr(quantised_norms, "_one_by_one", lambda tensor: False)
    two = nn.Sequential(base("nf4").lin, nn.Linear(N, K), base("nf4").lin)
    from adapters.quantised_bases import Quantised

    model = adapted(Quantised(two, is_loaded_in_4bit=True), target_modules=["lin.0", "lin.2"])
    hirank.accelerate(perturb(model))
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    x = inputs(3, K)

    def fresh():
        made = hirank.accelerate(copy.deepcopy(model))
        return made(x)

    for round_ in range(3):
        for layer in layers:
            before = [m.norms_of("default").computed for m in layers]
            assert torch.equal(model(x), fresh())
            assert torch.equal(model(x), fresh())
            after = [m.norms_of("default").computed for m in layers]
            assert round_ == 0 or sum(after) - sum(before) <= 2
            layer.lora_B["default"].weight.data.mul_(1.3)
    assert torch.equal(model(x), fresh())


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1 (make test runs both)")
@pytest.mark.parametrize("part", ["lora_A", "lora_B", "weight", "absmax"])
def test_d12_d19_tables_of_prints_notice_every_change(part, monkeypatch):
    """As the last, by the kernel; of two layers that one which changed is computed again."""
    from hirank.adapters import quantised_norms

    monkeypatch.setattr(quantised_norms, "_one_by_one", lambda tensor: False)
    monkeypatch.setattr(quantised_norms, "_prints", None)
    two = nn.Sequential(base("nf4").lin, nn.Linear(N, K), base("nf4").lin)
    model = adapted(Quantised(two, is_loaded_in_4bit=True), target_modules=["lin.0", "lin.2"])
    hirank.accelerate(perturb(model))
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]
    x, norms = inputs(3, K), [layer.norms_of("default") for layer in layers]
    for _ in range(3):
        model(x)
    assert [found.computed for found in norms] == [1, 1]
    layer = layers[1]
    {
        "lora_A": lambda: layer.lora_A["default"].weight.data[0, 3].add_(1),
        "lora_B": lambda: layer.lora_B["default"].weight.data.mul_(1.3),
        "weight": lambda: layer.base_layer.weight.data[0].bitwise_xor_(255),
        "absmax": lambda: layer.base_layer.weight.quant_state.absmax.data[0].sub_(9),
    }[part]()
    for _ in range(3):
        y = model(x)
    assert [found.computed for found in norms] == [1, 2]
    for found in norms:
        found.clear()
    assert torch.equal(y, model(x))


def test_a_new_base_weight_is_noticed():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    x = inputs(5, K)
    assert not stale(model, x)
    state = layer_of(model).base_layer.weight.quant_state
    layer_of(model).base_layer.weight.data.copy_(layer_of(model).base_layer.weight.data.flip(0))
    assert not stale(model, x)
    state.absmax = state.absmax.flip(0)
    assert not stale(model, x)


def test_checkpointing_gives_the_same_gradients(kind):
    from torch.utils.checkpoint import checkpoint

    model = perturb(hirank.accelerate(adapted(base(kind))))
    x = inputs(6, K)
    wanted = gradients(model, model(x), x)
    for reentrant in (True, False):
        model.zero_grad()
        x.grad = None
        y = checkpoint(model, x, use_reentrant=reentrant)
        draw = torch.Generator().manual_seed(5)
        y.backward(torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y))
        found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad} | {"x": x.grad}
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_double_backward(kind):
    model = perturb(hirank.accelerate(adapted(base(kind))))
    x = inputs(3, K)

    def second(y):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), layer_of(model).lora_B["default"].weight)[0]

    found, wanted = second(model(x)), second(truth(model, floats(model), x))
    assert relative_rms(found, wanted) < 1e-5


def test_files_go_both_ways(kind, tmp_path):
    from peft import PeftModel

    ours = perturb(hirank.accelerate(adapted(base(kind))))
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(base(kind), tmp_path)
    x = inputs(4, K).detach()
    assert relative_rms(ours.train()(x).detach(), stock.train()(x).detach()) < 3e-6
    again = hirank.accelerate(PeftModel.from_pretrained(base(kind), tmp_path))
    assert torch.equal(again.train()(x), ours(x))


def test_deep_copies_and_pickles_are_independent(kind):
    if kind.startswith("int8") or kind == "hqq":
        pytest.skip("the base layer itself loses its state in a copy")
    model = perturb(hirank.accelerate(adapted(base(kind))))
    x = inputs(4, K)
    wanted = model(x)
    copies = [copy.deepcopy(model)]
    if kind != "torchao":
        copies.append(pickle.loads(pickle.dumps(model)))
    for twin in copies:
        assert torch.equal(twin(x), wanted)
        layer_of(twin).lora_B["default"].weight.data.mul_(2)
        assert not stale(twin, x)
        assert torch.equal(model(x), wanted)


def test_converting_twice_changes_nothing(kind):
    model = perturb(hirank.accelerate(adapted(base(kind))))
    x = inputs(4, K)
    wanted, kept = model(x), type(layer_of(model))
    assert torch.equal(hirank.accelerate(model)(x), wanted)
    assert type(layer_of(model)) is kept


def test_explain(kind):
    model = adapted(base(kind))
    assert "not converted: call hirank.accelerate" in str(hirank.explain(model))
    text = str(hirank.explain(hirank.accelerate(model)))
    assert "dora" in text and "eager" in text and "one adapter over" in text
    model.base_model.disable_adapter_layers()
    assert "adapters are disabled" in str(hirank.explain(model))


def test_d35_output_dtype_under_autocast(monkeypatch):
    model = perturb(hirank.accelerate(adapted(base("nf4", torch.bfloat16))))
    for mode in (True, False):
        model.train(mode)
        with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patched:
            patched.setattr(torch, "is_autocast_enabled", lambda *_: True)
            assert model(inputs(3, K, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapters", FLOORS, ids=str)
@pytest.mark.parametrize("x_dtype", FLOORS, ids=str)
def test_d36_mixed_dtypes(kind, x_dtype, adapters, autocast):
    model = perturb(hirank.accelerate(adapted(base(kind, torch.bfloat16))))
    for name, p in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            p.data = p.data.to(adapters)
    x = inputs(6, K, dtype=x_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            with model.disable_adapter():
                wanted = model(x).dtype
        except (RuntimeError, NotImplementedError):
            return
        y = model(x)
    assert y.dtype == wanted or kind in ("int8", "int8-outliers", "hqq")
    assert relative_rms(y.detach(), truth(model, floats(model), x).detach()) < 2.0**-6


def test_d37_called_before_it_was_wrapped(kind):
    if not kind.startswith("int8"):
        pytest.skip("8 bits only")
    plain = base(kind)
    plain(inputs(2, K))
    with hirank.patch_peft():
        model = perturb(adapted(plain))
    for _ in range(2):
        compare(model, inputs(5, K), 2e-6)
    plain = base(kind)
    plain(inputs(2, K))
    model = perturb(hirank.accelerate(adapted(plain)))
    for _ in range(2):
        compare(model, inputs(5, K), 2e-6)


def test_d37_lost_row_scales_are_named():
    plain = base("int8")
    plain(inputs(2, K))
    model = adapted(plain)
    layer_of(model).base_layer.state.SCB = None
    hirank.accelerate(model)
    assert "SCB" in str(hirank.explain(model))


def test_eval_of_eight_bits_goes_through_integers():
    model = perturb(hirank.accelerate(adapted(base("int8", torch.float16), use_dora=True))).eval()
    x = inputs(5, K, dtype=torch.float16)
    exact = truth(model, floats(model), x).detach()
    found = model(x).detach()
    assert 1e-4 < relative_rms(found, exact) < 0.02  # the activations are integers, too
    assert torch.equal(hirank.accelerate(model)(x), found)


def test_packed_for_a_cpu():
    """Four bits as a CPU's own kernels want them: PEFT's DoRA reads garbage from that."""
    functional = pytest.importorskip("bitsandbytes.functional")
    model = perturb(hirank.accelerate(adapted(base("nf4", torch.bfloat16))))
    layer = layer_of(model)
    before = four_bits.weight_4bit(layer.base_layer, torch.float32)
    weight = layer.base_layer.weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    after = four_bits.weight_4bit(layer.base_layer, torch.float32)
    assert weight.quant_state.packing_format_for_cpu
    assert relative_rms(after, before) < 2.0**-8  # its scales are bf16 now


def test_training_over_four_bits_reaches_the_loss_of_stock():
    def losses(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        x = inputs(32, K).detach()
        target, found = torch.randn(32, N, generator=torch.Generator().manual_seed(2)), []
        for _ in range(10):
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    stock = losses(adapted(base("nf4")))
    torch.manual_seed(0)
    ours = losses(hirank.accelerate(adapted(base("nf4"))))
    assert ours == pytest.approx(stock, rel=1e-4)
    assert ours[-1] < ours[0]


# Classes that nobody knew.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_d40_a_registered_class(registered, dora, bias):
    with hirank.patch_peft():
        model = adapted(int4(bias=bias), use_dora=dora)
    lin = layer_of(model).base_layer
    assert lin.dequantised == (1 if dora else 0)
    perturb(model)
    compare(model, inputs(2, 3, K), 3e-6)
    lin.dequantised = 0
    with torch.no_grad():
        model(inputs(2, 3, K))
    assert lin.dequantised == 0
    assert "eager" in str(hirank.explain(model))


def test_d40_identity_at_initialisation(registered):
    with hirank.patch_peft():
        model = adapted(int4(torch.bfloat16))
    x = inputs(5, K, dtype=torch.bfloat16)
    with model.disable_adapter():
        wanted = model(x)
    assert torch.equal(model(x), wanted)


def test_d40_operations_of_a_registered_class(registered, tmp_path):
    from peft import LoraConfig, PeftModel

    with hirank.patch_peft():
        model = adapted(int4(), lora_dropout=0.2)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["lin"], use_dora=True))
    model.base_model.set_adapter(["default", "b"])
    perturb(model).eval()
    compare(model, inputs(4, K), 3e-6)
    compare(copy.deepcopy(model), inputs(4, K), 3e-6)
    with pytest.raises(HirankError, match="nothing can be merged"):
        model.merge_adapter()
    assert not stale(model, inputs(4, K))
    model.base_model.set_adapter("default")
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    with hirank.patch_peft():
        again = PeftModel.from_pretrained(int4(), tmp_path)
    x = inputs(4, K)
    assert torch.equal(again.eval()(x), model(x))


def test_d40_an_unregistered_class_names_the_way_out():
    with (
        hirank.patch_peft(),
        pytest.raises(HirankError, match="Int4Linear.*register_quantised_linear"),
    ):
        adapted(int4())


def test_what_is_refused_of_a_known_layer_is_not_blamed_on_its_class():
    """PEFT's own sentence: no registration would help an embedding."""
    from adapters.layer_kinds import Holder

    with hirank.patch_peft(), pytest.raises(ValueError, match="lora_bias=True") as refused:
        adapted(Holder(nn.Embedding(7, 4)), use_dora=False, lora_bias=True)
    assert "register_quantised_linear" not in str(refused.value)


@pytest.mark.parametrize("wrong", [nn.Linear, nn.Module, "Int4Linear", int], ids=str)
def test_what_cannot_be_registered(wrong):
    with pytest.raises(HirankError, match="register_quantised_linear got"):
        hirank.register_quantised_linear(wrong, lambda layer: layer.weight)


def test_a_dequantize_that_returns_something_else(registered):
    hirank.register_quantised_linear(Int4Linear, lambda layer: layer.qweight)
    with hirank.patch_peft():
        model = adapted(int4(), use_dora=False)
    with pytest.raises(HirankError, match="must return the weight as a float"):
        model(inputs(2, K)).sum().backward()


def test_wrong_inputs_name_the_layer(kind):
    model = hirank.accelerate(adapted(base(kind)))
    with pytest.raises(HirankError, match=f"lin.*the last dimension must be {K}"):
        model(torch.randn(3, K + 1))


def test_the_definition_that_a_graph_records():
    from hirank.adapters import quantised_norms

    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    layer = layer_of(model)
    packed = dequantise.Packed(
        layer.base_layer, dequantise.kind_of(layer.base_layer), torch.empty(0, K)
    )
    A, B = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
    with pytest.warns(RuntimeWarning, match="each time it is played"):
        found = quantised_norms._in_capture(packed, A, B, 2.0)
    wanted = (floats(model) + 2.0 * B.double() @ A.double()).norm(dim=1)
    assert relative_rms(found, wanted) < 1e-6


def test_triton_where_it_cannot_run():
    with pytest.raises(HirankError, match="lin.*'triton' on cpu"):
        hirank.accelerate(adapted(base("nf4")), backend="triton")


def test_weights_that_do_not_fit_or_are_not_finite_are_named():
    model = adapted(base("nf4"))
    layer_of(model).lora_A["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(HirankError, match="lin has NaN or infinity in lora_A"):
        hirank.accelerate(model)
    model = adapted(base("nf4"))
    layer_of(model).lora_B["default"].weight = nn.Parameter(torch.zeros(N, 3))
    with pytest.raises(HirankError, match="parts of shapes"):
        hirank.accelerate(model)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # bnb
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_compiled_models_compute_the_same(dora):
    model = perturb(hirank.accelerate(adapted(base("nf4"), use_dora=dora)))
    x = inputs(5, K)
    wanted = model(x)
    compiled = torch.compile(model, backend="eager")
    assert relative_rms(compiled(x).detach(), wanted.detach()) < 1e-6
    layer_of(model).lora_B["default"].weight.data.mul_(2)
    assert relative_rms(compiled(x).detach(), truth(model, floats(model), x).detach()) < 1e-5


def test_d33_merging_into_the_floats_that_were_trained_with():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    layer, weight, x = layer_of(model), floats(model), inputs(4, K).detach()
    A, B = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    full = weight + 2 * B @ A
    gain = layer.lora_magnitude_vector["default"].weight.double() / full.norm(dim=1)
    merged = x.double() @ (gain[:, None] * full).T + layer.base_layer.bias.double()
    assert relative_rms(model(x).detach(), merged.detach()) < 1e-5


def test_a_frozen_magnitude_saves_no_output():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    layer_of(model).lora_magnitude_vector["default"].weight.requires_grad_(False)
    compare(model, inputs(5, K), 2e-6)


def test_weights_changed_between_forward_and_backward_are_refused():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    y = model(inputs(5, K))
    with torch.no_grad():
        layer_of(model).lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("together", [False, True], ids=["one-by-one", "once-a-pass"])
def test_checkpointing_meets_no_norm_from_before_a_change(together, monkeypatch):
    """Another forward saw other weights, written as no counter sees, before the backward pass."""
    from torch.utils.checkpoint import checkpoint

    from hirank.adapters import quantised_norms

    if together:  # the way of a GPU
        monkeypatch.setattr(quantised_norms, "_one_by_one", lambda tensor: False)
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    x, B = inputs(6, K), layer_of(model).lora_B["default"].weight
    kept = B.data.clone()
    wanted = gradients(model, model(x), x)
    y = checkpoint(model, x, use_reentrant=False)
    B.data.mul_(3)
    with torch.no_grad():
        model(x)
    B.data.copy_(kept)
    assert all(torch.equal(grad, wanted[n]) for n, grad in gradients(model, y, x).items())


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["owned", "composed"])
def test_a_base_replaced_between_forward_and_backward(kind, dora, dropout):
    """Refused; but HQQ's layer is replaced as a whole, and the old one lives for the backward."""
    if kind == "torchao":
        pytest.skip("PEFT merges into it with an argument that Transformers gives")
    model = perturb(hirank.accelerate(adapted(base(kind), use_dora=dora, lora_dropout=dropout)))
    x, (y, again) = inputs(5, K), (None, None)
    for merges in (False, True):
        torch.manual_seed(0)
        y, again = model(x), y
        if merges:
            model.merge_adapter()
    if kind == "hqq":
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in (y, again)]
        assert torch.equal(*grads)
    else:
        with pytest.raises(RuntimeError, match="merge, unmerge or load after backward"):
            y.sum().backward()


def test_meta_tensors():
    model = hirank.accelerate(adapted(base("torchao"))).to("meta")
    x = torch.empty(3, K, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.is_meta
    model = hirank.accelerate(adapted(base("hqq"))).to("meta")  # its scales stay where they are
    with pytest.raises(HirankError, match=r"lin has its quantised weight on cpu and meta at once"):
        model(x)


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_meta_tensors_of_a_registered_class(registered, dora):
    with hirank.patch_peft():
        model = adapted(int4(), use_dora=dora).to("meta")
    x = torch.empty(3, K, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.is_meta


def test_adapters_with_hooks_go_peft_s_way_and_say_so():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    x = inputs(5, K)
    wanted = model(x)
    layer_of(model).lora_A["default"].register_forward_hook(lambda *_: None)
    assert "not a plain module without hooks" in str(hirank.explain(model))
    assert relative_rms(model(x).detach(), wanted.detach()) < 3e-6


def test_d40_hooks_on_a_registered_class_are_refused(registered):
    with hirank.patch_peft():
        model = adapted(int4())
    layer_of(model).lora_A["default"].register_forward_hook(lambda *_: None)
    with pytest.raises(HirankError, match="only hirank computes with DoRA"):
        model(inputs(2, K))


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_d37_sharded_weights_are_left_to_peft(bits):
    """What FSDP leaves of a weight while it is not gathered."""
    model = hirank.accelerate(adapted(base(bits)))
    weight = layer_of(model).base_layer.weight
    whole = weight.data
    weight.data = whole.flatten()[: whole.numel() // 2]
    assert "the base weight is sharded" in str(hirank.explain(model))
    weight.data = whole
    assert "one adapter over" in str(hirank.explain(model))

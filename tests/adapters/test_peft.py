"""Converted models against stock PEFT: outputs, gradients, files, and everything users do."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as StockLinear
from torch import nn

import hirank
from adapters.setups import Lin, layer_of, pair, perturb, stock, wrap
from helpers import tiny_llama
from hirank.adapters.peft import FastLinear


def both(theirs, ours, x, **kwargs):
    """Outputs and gradients of the two models from one seed."""
    found = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        x_ = x.clone().requires_grad_()
        y = model(x_, **kwargs)
        weights = [p for p in model.parameters() if p.requires_grad]
        coefficient = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)
        grads = torch.autograd.grad((y * coefficient).sum(), [x_, *weights], allow_unused=True)
        found.append([y, *(g for g in grads if g is not None)])
    return zip(*found, strict=True)


def assert_same(theirs, ours, x, **kwargs):
    for stock_tensor, our_tensor in both(theirs, ours, x, **kwargs):
        assert our_tensor.dtype == stock_tensor.dtype
        torch.testing.assert_close(our_tensor, stock_tensor, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["nodrop", "dropout"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_outputs_and_gradients_equal_stock(dora, dropout, bias, training):
    theirs, ours = pair(Lin(24, 16, bias=bias), use_dora=dora, lora_dropout=dropout)
    theirs.train(training), ours.train(training)
    expected = "composed" if dropout and training else "eager"
    assert [row.tier for row in hirank.explain(ours).rows] == [expected]
    assert_same(theirs, ours, torch.randn(2, 5, 24))


@pytest.mark.parametrize("shape", [(0, 24), (3, 24), (2, 2, 3, 24)], ids=str)
def test_any_input_shape(shape):
    theirs, ours = pair(Lin(24, 16))
    assert_same(theirs, ours, torch.randn(shape))


def test_a_single_vector_stays_one():
    """As plain linear layers do; PEFT's DoRA adds a dimension."""
    theirs, ours = pair(Lin(24, 16))
    x = torch.randn(24)
    assert ours(x).shape == (16,)
    torch.testing.assert_close(ours(x), theirs(x)[0])


def test_trainable_base_bias():
    theirs, ours = pair(Lin(24, 16), bias="lora_only")
    assert layer_of(ours).base_layer.bias.requires_grad
    assert_same(theirs, ours, torch.randn(3, 24))


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)], ids=str)
def test_several_active_adapters(kinds):
    first, second = kinds
    model = stock(Lin(16, 16), use_dora=first)
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=second))
    perturb(model)
    for order in (["default", "b"], ["b", "default"]):
        model.base_model.set_adapter(order)
        theirs, ours = copy.deepcopy(model), hirank.accelerate(copy.deepcopy(model))
        assert hirank.explain(ours).rows[0].reason == "2 active adapters; eager: on the CPU"
        assert_same(theirs, ours, torch.randn(4, 16))


def test_switching_disabling_and_deleting_adapters():
    theirs = stock(Lin(16, 16))
    theirs.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    perturb(theirs)
    ours = hirank.accelerate(copy.deepcopy(theirs))
    x = torch.randn(4, 16)
    for name in ("b", "default", "b"):
        theirs.set_adapter(name), ours.set_adapter(name)
        assert_same(theirs, ours, x)
    with theirs.disable_adapter(), ours.disable_adapter():
        assert torch.equal(theirs(x), ours(x))
        assert hirank.explain(ours).rows[0].reason.startswith("adapters are disabled")
    with pytest.warns(UserWarning, match="Adapter b was active"):
        theirs.delete_adapter("b"), ours.delete_adapter("b")
    theirs.set_adapter("default"), ours.set_adapter("default")
    assert_same(theirs, ours, x)


def test_mixed_batches_equal_pefts():
    theirs, ours = pair(Lin(16, 8), use_dora=False)
    theirs.eval(), ours.eval()
    names = ["default", "__base__"]
    x = torch.randn(2, 16)
    torch.testing.assert_close(theirs(x, adapter_names=names), ours(x, adapter_names=names))


def test_files_are_the_same_bytes(tmp_path):
    theirs, ours = pair(Lin(24, 16))
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = ((tmp_path / who / name).read_bytes() for who in ("theirs", "ours"))
        assert first == second
    assert list(theirs.state_dict()) == list(ours.state_dict())


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"use_dora": False}], ids=str)
def test_a_language_model_goes_to_disk_and_back_both_ways(tmp_path, config):
    settings = {"r": 4, "target_modules": "all-linear", "use_dora": True} | config

    def fresh():
        return tiny_llama(attention_bias=True)

    ours = hirank.accelerate(perturb(get_peft_model(fresh(), LoraConfig(**settings)))).eval()
    ids = torch.randint(0, 320, (2, 11))
    logits = ours(ids).logits
    ours.save_pretrained(tmp_path / "a")
    stock_model = PeftModel.from_pretrained(fresh(), tmp_path / "a").eval()
    torch.testing.assert_close(stock_model(ids).logits, logits, rtol=1e-5, atol=1e-5)
    stock_model.save_pretrained(tmp_path / "b")
    back = hirank.accelerate(PeftModel.from_pretrained(fresh(), tmp_path / "b")).eval()
    assert torch.equal(back(ids).logits, logits)


def test_restore_gives_pefts_layers_back():
    theirs, ours = pair(Lin(24, 16))
    x = torch.randn(3, 24)
    assert type(layer_of(ours)) is FastLinear
    hirank.restore(ours)
    assert type(layer_of(ours)) is StockLinear
    assert not [k for k in vars(layer_of(ours)) if "hirank" in k]
    assert torch.equal(theirs(x), ours(x))
    assert hirank.explain(ours).rows[0].reason == "not converted: call hirank.accelerate(model)"


def test_restore_keeps_merged_adapters_merged():
    theirs, ours = pair(Lin(24, 16))
    x = torch.randn(3, 24)
    ours.merge_adapter()
    hirank.restore(ours)
    assert layer_of(ours).merged
    torch.testing.assert_close(ours(x), theirs(x))
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(x), theirs(x))


def test_patch_makes_converted_layers_until_removed():
    patch = hirank.patch_peft()
    model = stock(Lin(24, 16))
    assert type(layer_of(model)) is FastLinear
    patch.remove()
    patch.remove()  # once is enough, twice is harmless
    assert type(layer_of(stock(Lin(24, 16)))) is StockLinear


def test_patches_may_be_removed_in_any_order():
    first, second = hirank.patch_peft(), hirank.patch_peft()
    first.remove()
    assert type(layer_of(stock(Lin(24, 16)))) is FastLinear
    second.remove()
    assert type(layer_of(stock(Lin(24, 16)))) is StockLinear


def test_patch_is_removed_when_the_block_fails():
    with pytest.raises(RuntimeError), hirank.patch_peft():
        raise RuntimeError
    assert type(layer_of(stock(Lin(24, 16)))) is StockLinear


@pytest.mark.parametrize("init", [True, "gaussian", "pissa", "olora", "orthogonal", False], ids=str)
def test_patched_creation_gives_the_same_model(init):
    base = Lin(24, 16)
    torch.manual_seed(0)
    theirs = stock(copy.deepcopy(base), init_lora_weights=init)
    torch.manual_seed(0)
    with hirank.patch_peft():
        ours = stock(copy.deepcopy(base), init_lora_weights=init)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    assert [n for n, p in theirs.named_parameters() if p.requires_grad] == [
        n for n, p in ours.named_parameters() if p.requires_grad
    ]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_norms_of_their_own(how):
    model = perturb(wrap(Lin(24, 16)))
    x = torch.randn(3, 24)
    expected = model(x)
    twin = how(model)
    assert torch.equal(twin(x), expected)
    perturb(twin)
    assert not torch.equal(twin(x), expected)
    assert torch.equal(model(x), expected)


REASONS = {
    "a base with hooks": (lambda m: layer_of(m).base_layer.register_forward_hook(lambda *a: None),
                          "the base layer has hooks"),
    "an adapter with hooks": (
        lambda m: layer_of(m).lora_A["default"].register_forward_hook(lambda *a: None),
        "not a plain module without hooks"),
    "a trainable base": (lambda m: layer_of(m).base_layer.weight.requires_grad_(),
                         "the base weight is trainable"),
    "a tensor as scaling": (
        lambda m: layer_of(m).scaling.update(default=torch.tensor(2.0)), "is a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS.values(), ids=REASONS.keys())
def test_what_is_not_supported_runs_pefts_code_and_says_why(case):
    change, reason = case
    theirs, ours = pair(Lin(24, 16))
    change(theirs), change(ours)
    row = hirank.explain(ours).rows[0]
    assert row.tier == "peft" and reason in row.reason
    assert_same(theirs, ours, torch.randn(3, 24))


def test_other_layers_are_left_to_peft_with_a_reason():
    layers = {
        "heads": nn.MultiheadAttention(4, 2),
        "emb": nn.Embedding(9, 4, max_norm=1.0),
        "lin": nn.Linear(4, 4),
    }
    model = get_peft_model(nn.ModuleDict(layers), LoraConfig(target_modules=list(layers)))
    rows = {
        row.name.rpartition(".")[2]: row for row in hirank.explain(hirank.accelerate(model)).rows
    }
    assert rows["lin"].tier == "eager"
    assert rows["heads"].reason == "MultiheadAttention over MultiheadAttention is not converted"
    assert rows["emb"].reason == "the embedding has max_norm: each lookup rewrites weights"


def test_subclasses_of_linear_are_left_alone():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    base = nn.ModuleDict({"lin": Odd(4, 4)})
    model = hirank.accelerate(get_peft_model(base, LoraConfig(target_modules=["lin"])))
    assert hirank.explain(model).rows[0].tier == "peft"


def test_explanation_prints_a_table_and_a_summary():
    model = wrap(Lin(24, 16))
    text = str(hirank.explain(model))
    assert text.splitlines()[0].split()[:3] == ["base_model.model.lin", "dora", "eager"]
    assert text.splitlines()[-1] == "1 adapted layers: 1 eager"


def test_a_model_without_adapters_is_refused():
    with pytest.raises(hirank.HirankError, match="wrap it with peft.get_peft_model first"):
        hirank.accelerate(Lin(4, 4))


def test_double_backward_equals_stock():
    theirs, ours = pair(Lin(12, 8))
    theirs.double(), ours.double()
    found = []
    for model in (theirs, ours):
        x = torch.linspace(-1, 1, 36, dtype=torch.float64).view(3, 12).requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        weights = [p for p in model.parameters() if p.requires_grad]
        found.append(torch.autograd.grad(first.square().sum(), weights))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_norm_survives_inference_mode():
    model = perturb(wrap(Lin(24, 16)))
    x = torch.randn(3, 24)
    expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    model(x).sum().backward()  # nothing of inference mode is left behind
    layer = layer_of(model)
    assert layer._hirank_norms["default"].computed == 1


def test_norm_first_computed_in_inference_mode_can_train():
    model = perturb(wrap(Lin(24, 16)))
    x = torch.randn(3, 24)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert layer_of(model).lora_magnitude_vector["default"].weight.grad.abs().max() > 0

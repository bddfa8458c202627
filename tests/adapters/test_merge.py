"""Merging and unmerging through PEFT's own calls."""

import copy

import pytest
import torch
from peft import LoraConfig

import hirank
from adapters.setups import Lin, layer_of, merged_weight, pair, perturb, stock, wrap


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("safe", [False, True], ids=["unsafe", "safe"])
def test_merge_equals_unmerged_and_unmerge_is_exact(dtype, dora, safe):
    model = perturb(wrap(Lin(24, 16).to(dtype), use_dora=dora)).eval()
    x = torch.randn(3, 24).to(dtype)
    before, weight = model(x), layer_of(model).base_layer.weight.detach().clone()
    model.merge_adapter(safe_merge=safe)
    assert layer_of(model).merged_adapters == ["default"]
    error = (model(x).double() - before.double()).abs().max() / before.double().abs().max()
    assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert not torch.equal(layer_of(model).base_layer.weight, weight)
    model.unmerge_adapter()
    assert torch.equal(layer_of(model).base_layer.weight, weight)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)], ids=str)
def test_several_adapters_merge_in_order(kinds):
    """D21: merged equals unmerged, y_k = g_k (y_{k-1} + s_k B_k A_k x), g_k from the bare base."""
    model = stock(Lin(16, 16), use_dora=kinds[0])
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=kinds[1]))
    hirank.accelerate(perturb(model)).eval()
    x = torch.randn(4, 16)
    for order in (["default", "b"], ["b", "default"]):
        model.base_model.set_adapter(order)
        before, weight = model(x), layer_of(model).base_layer.weight.detach().clone()
        model.merge_adapter()
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
        model.unmerge_adapter()
        assert torch.equal(layer_of(model).base_layer.weight, weight)


def test_merging_one_after_the_other():
    model = stock(Lin(16, 16))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    hirank.accelerate(perturb(model)).eval()
    model.base_model.set_adapter(["default", "b"])
    x = torch.randn(4, 16)
    before = model(x)
    model.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="additionally merging b"):
        model.merge_adapter(["b"])
    assert layer_of(model).merged_adapters == ["default", "b"]
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)


def test_merge_and_unload_and_disabling_while_merged():
    theirs, ours = pair(Lin(24, 16))
    x = torch.randn(3, 24)
    expected, base = ours(x).detach(), theirs.get_base_model()
    ours.merge_adapter()
    with ours.disable_adapter(), theirs.disable_adapter():
        assert torch.equal(ours(x), theirs(x))
    assert base is not None
    plain = ours.merge_and_unload()
    assert type(plain.lin) is torch.nn.Linear
    torch.testing.assert_close(plain(x), expected)


def test_an_adapter_that_is_not_finite_is_refused_and_changes_nothing():
    model = perturb(wrap(Lin(24, 16)))
    layer = layer_of(model)
    weight = layer.base_layer.weight.detach().clone()
    layer.lora_B["default"].weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert torch.equal(layer.base_layer.weight, weight) and not layer.merged


def test_a_model_merged_by_stock_peft_can_be_converted_and_unmerged():
    theirs, model = pair(Lin(24, 16))
    hirank.restore(model)
    x = torch.randn(3, 24)
    model.merge_adapter()
    hirank.accelerate(model)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_merged_weight_is_the_definition():
    model = perturb(wrap(Lin(24, 16)))
    exact = merged_weight(layer_of(model))
    copied = copy.deepcopy(model)
    copied.merge_adapter()
    merged = layer_of(copied).base_layer.weight
    torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-7)


def test_unmerging_after_a_change_of_dtype():
    model = perturb(wrap(Lin(24, 16)))
    weight = layer_of(model).base_layer.weight.detach().clone()
    model.merge_adapter()
    model.half()
    model.unmerge_adapter()
    assert torch.equal(layer_of(model).base_layer.weight, weight.half())

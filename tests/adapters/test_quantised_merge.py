"""Merging into quantised bases, unmerging to the bit, and combining adapters over them."""

import copy

import pytest
import torch
from peft import LoraConfig

import hirank
from adapters.quantised_bases import (
    MAKERS,
    WARN,
    K,
    adapted,
    base,
    floats,
    inputs,
    layer_of,
    perturb,
    truth,
)
from hirank.adapters import four_bits
from hirank.adapters.peft.quantised import restore_quantised
from hirank.errors import HirankError
from hirank.testing import relative_rms

pytestmark = [
    WARN,
    pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning"),
]
KINDS = list(MAKERS)
MERGED = [kind for kind in KINDS if kind != "torchao"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_merged_and_restored_as_stock(kind):
    if kind == "torchao":
        pytest.skip("PEFT merges DoRA into torchao weights without its magnitude")
    bias = kind != "hqq"  # PEFT loses its bias when it merges
    torch.manual_seed(0)
    stock = perturb(adapted(base(kind, bias=bias)))
    torch.manual_seed(0)
    ours = perturb(hirank.accelerate(adapted(base(kind, bias=bias))))
    layer_of(ours).lora_magnitude_vector["default"].weight.data.copy_(
        layer_of(stock).lora_magnitude_vector["default"].weight
    )
    x = inputs(4, K).detach()
    with torch.no_grad():
        for model in (stock, ours):
            model.eval().merge_adapter()
        assert relative_rms(ours(x), stock(x)) < 1e-5
        hirank.restore(ours)
        assert type(layer_of(ours)) is type(layer_of(stock))
        assert relative_rms(ours(x), stock(x)) < 1e-5
        for model in (stock, ours):
            model.unmerge_adapter()
        assert relative_rms(ours(x), stock(x)) < 1e-5


def test_merging_dora_into_torchao_is_refused():
    model = hirank.accelerate(adapted(base("torchao")))
    with pytest.raises(HirankError, match="without its magnitude"):
        model.merge_adapter()


def far(found, wanted):
    return relative_rms(found.detach(), wanted.detach())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("merged", MERGED)
def test_unmerging_is_exact_whatever_was_called_meanwhile(merged, dora, training):
    model = perturb(hirank.accelerate(adapted(base(merged), use_dora=dora))).train(training)
    model.add_adapter("b", LoraConfig(r=2, target_modules=["lin"], use_dora=dora))
    perturb(model)
    x, weight = inputs(4, K).detach(), floats(model)
    with torch.no_grad():
        before = model(x)
        for names in (["default"], ["default", "b"], None):
            model.merge_adapter(adapter_names=names)
            assert far(model(x), before) > 1e-4
            model(x)  # in inference bitsandbytes may lay the weight out anew
            model.unmerge_adapter()
            assert torch.equal(floats(model), weight)
            assert torch.equal(model(x), before)
    assert not layer_of(model)._caches


@pytest.mark.parametrize("bits", ["nf4", "fp4", "nf4-plain"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_four_bits_laid_out_for_a_cpu_are_merged_in_their_order(bits, dora):
    functional = pytest.importorskip("bitsandbytes.functional")
    model = perturb(hirank.accelerate(adapted(base(bits, torch.bfloat16), use_dora=dora)))
    layer, x = layer_of(model), inputs(4, K, dtype=torch.bfloat16).detach()
    before, weight = model(x), layer.base_layer.weight
    weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(
        weight.data, weight.quant_state
    )
    model.merge_adapter()
    assert far(model(x), before) < 0.2  # as far as its four bits are
    model.unmerge_adapter()
    assert not four_bits.is_packed(layer.base_layer)
    assert far(model(x), before) < 2.0**-7  # the scales are bf16 now


def test_a_merged_copy_unmerges_by_itself():
    model = perturb(hirank.accelerate(adapted(base("nf4"))))
    x = inputs(4, K)
    before = model(x)
    model.merge_adapter()
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    assert torch.equal(twin(x), before)
    assert far(model(x), before) > 1e-3
    with model.disable_adapter():
        disabled = model(x)
    model.unmerge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(x), disabled)


def test_hqq_keeps_its_bias_when_something_is_merged():
    model = perturb(hirank.accelerate(adapted(base("hqq"))))
    layer, x = layer_of(model), inputs(4, K)
    bias, before = layer.base_layer.bias, model(x)
    model.merge_adapter()
    assert torch.equal(layer.base_layer.bias, bias)
    assert far(model(x), before) < 0.2
    model.unmerge_adapter()
    assert torch.equal(layer.base_layer.bias, bias)


def test_merged_before_it_was_converted():
    model = perturb(adapted(base("int8")))
    x = inputs(4, K)
    before = model(x)
    model.merge_adapter()
    hirank.accelerate(model).unmerge_adapter()
    assert far(model(x), before) < 0.02  # by PEFT: it is quantised again


@pytest.mark.parametrize("method", ["cat", "svd"])
def test_a_weighted_sum_of_dora_adapters(kind, method):
    """s B A = sum w_i s_i B_i A_i and m = ||W|| + sum w_i (m_i - ||W||), against fp64."""
    model = adapted(base(kind))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    hirank.accelerate(perturb(model))
    weights = {"default": 0.7, "b": -0.4}
    ranks = {} if method == "cat" else {"svd_rank": 7}
    model.base_model.add_weighted_adapter(
        list(weights), list(weights.values()), "c", combination_type=method, **ranks
    )
    model.set_adapter("c")
    layer, W = layer_of(model), floats(model)
    norm = W.norm(dim=1)
    change, m = torch.zeros_like(W), norm.clone()
    for name, weight in weights.items():
        A, B = layer.lora_A[name].weight.double(), layer.lora_B[name].weight.double()
        change += weight * layer.scaling[name] * B @ A
        m += weight * (layer.lora_magnitude_vector[name].weight.double() - norm)
    full = W + change
    gain = (m / full.norm(dim=1))[:, None]
    x = inputs(4, K).detach()
    exact = x.double() @ (gain * full).T + layer.base_layer.bias.double()
    assert far(model(x), exact) < 1e-5
    assert far(model(x), truth(model, W, x)) < 1e-5


def test_weighted_sums_of_layers_that_are_not_converted_are_refused():
    model = adapted(base("nf4"))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    hirank.accelerate(model)
    layer = layer_of(model)
    restore_quantised(layer)
    with pytest.raises(HirankError, match="not converted: call hirank.accelerate"):
        model.base_model.add_weighted_adapter(["default", "b"], [1, 1], "c", "cat")

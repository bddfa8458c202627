"""D52, D68: what hirank does not compute runs as in PEFT and is said once, or is refused."""

import copy
import logging

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn

import hirank
from adapters.layer_kinds import KINDS, Holder
from adapters.quantised_bases import adapted, base, inputs
from adapters.quantised_bases import perturb as perturb_quantised
from adapters.setups import Lin, layer_of, perturb, stock
from hirank.errors import HirankError
from hirank.kernels.dora_norm import dora_norm

LOGGER = "hirank.adapters"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.lin(x, x, x, need_weights=False)[0]


class Bilinear(nn.Linear):
    """No plain nn.Linear, so hirank cannot know what it computes."""

    def forward(self, x):
        return super().forward(x) * 2


def _trainable():
    model = stock(Lin(8, 6))
    layer_of(model).base_layer.weight.requires_grad_(True)
    return model


def _hooked():
    model = stock(Lin(8, 6))
    layer_of(model).base_layer.register_forward_hook(lambda *_: None)
    return model


def _renormed():
    return stock(Holder(nn.Embedding(8, 6, max_norm=1.0)))


def _adalora():
    config = AdaLoraConfig(target_modules=["lin"], total_step=10, init_r=4)
    return get_peft_model(Lin(8, 6), config)


LEFT = {
    "attention": (lambda: stock(Attention(), use_dora=False), "no kind that hirank converts"),
    "adalora": (_adalora, "no kind that hirank converts"),
    "subclass": (lambda: stock(Holder(Bilinear(8, 6))), "Bilinear, not nn.Linear"),
    "lora_bias": (lambda: stock(Lin(8, 6), use_dora=False, lora_bias=True), "bias of its own"),
    "trainable base": (_trainable, "the base weight is trainable"),
    "hooks": (_hooked, "the base layer has hooks"),
    "max_norm": (_renormed, "max_norm"),
}


@pytest.mark.parametrize("case", LEFT)
def test_d68_what_is_left_to_peft_computes_the_same_and_is_logged_once(case, caplog):
    make, reason = LEFT[case]
    model = perturb(make())
    x = torch.randint(0, 8, (2, 5)) if case == "max_norm" else torch.randn(2, 5, 8)
    with caplog.at_level(logging.INFO, LOGGER):
        ours = hirank.accelerate(copy.deepcopy(model))
    assert torch.equal(ours(x), model(x))
    said = [r.getMessage() for r in caplog.records if r.name == LOGGER and r.levelname == "INFO"]
    assert all("lin" in line for line in said) and reason in said[0]
    assert len(said) == (2 if case == "attention" else 1)  # its projection is a layer of its own


def hooked(model):
    layer_of(model).base_layer.register_forward_hook(lambda *call: None)
    return model


def assert_left_and_said_once(model, x, caplog):
    wanted = model(x)
    with caplog.at_level(logging.INFO, LOGGER):
        assert torch.equal(hirank.accelerate(model)(x), wanted)
    said = [r.getMessage() for r in caplog.records if r.name == LOGGER and r.levelname == "INFO"]
    assert len(said) == 1 and "lin is left to PEFT: the base layer has hooks" in said[0]


# PEFT's own forward fails where the base is dilated
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [name for name in KINDS if "dilated" not in name])
def test_d68_a_layer_of_any_kind_that_is_left_to_peft(kind, caplog):
    model = hooked(perturb(stock(KINDS[kind].model())))
    assert_left_and_said_once(model, KINDS[kind].input(), caplog)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["nf4", "int8", "hqq", "torchao"])
def test_d68_a_layer_over_few_bits_that_is_left_to_peft(kind, caplog):
    model = hooked(perturb_quantised(adapted(base(kind))))
    assert_left_and_said_once(model, inputs(5, 128).detach(), caplog)


def test_d68_what_is_computed_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        model = hirank.accelerate(stock(Lin(8, 6)))
        model.base_model.disable_adapter_layers()
        hirank.accelerate(model)
    assert not [r for r in caplog.records if r.name == LOGGER]


@pytest.mark.parametrize("plan", ["colwise", "rowwise"])
def test_d52_dora_on_a_part_of_a_layer_is_refused(plan):
    model = stock(Lin(8, 6))
    layer_of(model).base_layer._hf_tp_plan = plan
    with pytest.raises(HirankError, match=f"lin is split over processes.*{plan}.*use LoRA"):
        hirank.accelerate(model)
    model = stock(Lin(8, 6), use_dora=False)
    layer_of(model).base_layer._hf_tp_plan = plan
    assert "tensor-parallel" in str(hirank.explain(hirank.accelerate(model)))


def test_d52_norms_of_parts_are_the_norm_of_the_whole():
    """Rows split: the norms lie side by side. Columns split: their squares add up."""
    W, A, B = torch.randn(6, 8).double(), torch.randn(3, 8).double(), torch.randn(6, 3).double()
    whole = dora_norm(W, A, B, scale=2.0)
    halves = [dora_norm(W[part], A, B[part], scale=2.0) for part in (slice(0, 3), slice(3, 6))]
    assert torch.allclose(torch.cat(halves), whole, rtol=1e-14)
    halves = [
        dora_norm(W[:, part], A[:, part], B, scale=2.0) for part in (slice(0, 4), slice(4, 8))
    ]
    assert torch.allclose(sum(half.square() for half in halves).sqrt(), whole, rtol=1e-14)


def test_d50_a_partitioned_weight_is_never_looked_at():
    """As ZeRO-3 leaves it: empty, its shape elsewhere, filled while its layer runs."""
    model = perturb(stock(Lin(8, 6)))
    x = torch.randn(2, 8)
    wanted, layer = model(x), layer_of(model)
    weight, m = layer.base_layer.weight, layer.lora_magnitude_vector["default"].weight
    full, before = weight.data.clone(), m.detach().clone()
    weight.ds_id, weight.ds_shape, weight.data = 0, full.shape, torch.empty(0)

    hirank.accelerate(model)
    assert "sharded" in str(hirank.explain(model))
    assert torch.equal(m, before)
    weight.data = full  # the gather around the layer's forward
    assert torch.equal(model(x), wanted)
    weight.data = torch.empty(0)
    assert "sharded" in str(hirank.explain(model))

    with hirank.patch_peft():  # whose init would read it: left to PEFT, which gathers
        lin = Lin(8, 6)
        lin.lin.weight.ds_id = 0
        made = get_peft_model(lin, LoraConfig(target_modules=["lin"], use_dora=True))
    norm = layer_of(made).base_layer.weight.norm(dim=1)
    assert torch.allclose(layer_of(made).lora_magnitude_vector["default"].weight, norm)

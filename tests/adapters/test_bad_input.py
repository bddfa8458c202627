"""What is wrong is told in one sentence that names the layer."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd import forward_ad

import hirank
from adapters.setups import Lin, layer_of, stock, wrap
from helpers import tiny_llama

NAME = "base_model.model.lin"


def sentence(call) -> str:
    with pytest.raises(hirank.HirankError) as caught:
        call()
    return str(caught.value)


CALLS = {
    "width": (torch.ones(2, 5, 23),
              "got x of shape [2, 5, 23]: the last dimension must be 24."),
    "no dimension": (torch.ones(()), "got x of shape []: the last dimension must be 24."),
    "dtype": (torch.ones(2, 24, dtype=torch.float64),
              "got x in torch.float64 and has its weight in torch.float32: cast one of them, or "
              "run under autocast."),
    "device": (torch.ones(2, 24, device="meta"),
               "got x on meta and has its weight on cpu: move one of them."),
}  # fmt: skip


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["owned", "composed"])
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_an_input_that_does_not_fit(case, dropout, dora):
    x, told = case
    model = wrap(Lin(24, 16), lora_dropout=dropout, use_dora=dora)
    assert sentence(lambda: model(x)) == f"{NAME} {told}"


def test_an_adapter_on_another_device():
    model = wrap(Lin(24, 16))
    layer_of(model).lora_A.to("meta")
    told = f"{NAME} has its weight on cpu and adapter 'default' on meta: move one of them."
    assert sentence(lambda: model(torch.ones(2, 24))) == told


def reshaped(part: str, shape: tuple[int, ...]):
    def change(model: nn.Module) -> nn.Module:
        getattr(layer_of(model), part)["default"].weight = nn.Parameter(torch.ones(shape))
        return model

    return change


SHAPES = {
    "A": (reshaped("lora_A", (4, 23)), "has a weight 16x24 and adapter 'default' with A 4x23 and "
          "B 16x4: A must be [R, 24] and B [16, R] of one rank R."),
    "B": (reshaped("lora_B", (15, 4)), "has a weight 16x24 and adapter 'default' with A 4x24 and "
          "B 15x4: A must be [R, 24] and B [16, R] of one rank R."),
    "rank": (reshaped("lora_B", (16, 3)), "has a weight 16x24 and adapter 'default' with A 4x24 "
             "and B 16x3: A must be [R, 24] and B [16, R] of one rank R."),
    "magnitude": (reshaped("lora_magnitude_vector", (15,)), "has 16 rows and adapter 'default' a "
                  "magnitude 15: it must have one entry for each row."),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_that_do_not_match(case):
    change, told = case
    assert sentence(lambda: hirank.accelerate(change(stock(Lin(24, 16))))) == f"{NAME} {told}"
    model = wrap(Lin(24, 16))
    model(torch.ones(2, 24))
    change(model)  # after conversion: at the next call
    assert sentence(lambda: model(torch.ones(2, 24))) == f"{NAME} {told}"


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "lora_magnitude_vector"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_at_conversion(part, value):
    model = stock(Lin(24, 16))
    getattr(layer_of(model), part)["default"].weight.data.view(-1)[3] = value
    before = type(layer_of(model))
    assert sentence(lambda: hirank.accelerate(model)) == (
        f"{NAME} has NaN or infinity in {part} of adapter 'default': load a checkpoint from before "
        "the training diverged."
    )
    assert type(layer_of(model)) is before


def test_a_base_weight_that_is_not_finite_is_refused_at_conversion():
    model = stock(Lin(24, 16))
    layer_of(model).base_layer.weight.data[2, 3] = float("nan")
    assert sentence(lambda: hirank.accelerate(model)) == (
        f"{NAME} has NaN or infinity in its base weight: load the base model again."
    )


def test_the_layer_is_named_in_a_whole_model():
    made = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    for model in (made, copy.deepcopy(made)):
        hirank.accelerate(model)
        layer = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj")
        reshaped_B = nn.Parameter(torch.ones(31, 4))
        layer.lora_B["default"].weight = reshaped_B
        ids = torch.ones(1, 3, dtype=torch.long)
        told = sentence(lambda model=model, ids=ids: model(input_ids=ids))
        assert told.startswith("base_model.model.model.layers.1.mlp.down_proj has a weight 32x64")


def test_an_error_that_is_none_of_the_inputs_stays_as_it_is():
    model = wrap(Lin(24, 16), lora_dropout=0.5)

    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of something")

    layer_of(model).lora_dropout["default"] = Broken()
    with pytest.raises(RuntimeError, match="^out of something$"):
        model(torch.ones(2, 24))


def under_dual(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda z: model(z).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
    "forward-mode": under_dual,
}


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_that_is_not_taken_is_named(transform, dora):
    model, x = wrap(Lin(24, 16), use_dora=dora), torch.randn(3, 24)
    where = "forward-mode" if transform == "forward-mode" else "a transform of torch.func"
    found = sentence(lambda: TRANSFORMS[transform](model, x))
    assert where in found and found.endswith("hirank.restore(model), and PEFT computes it.")
    TRANSFORMS[transform](hirank.restore(model), x)

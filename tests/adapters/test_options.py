"""`backend=` and `dropout=`: kept by each layer, told by `explain`, refused where they cannot."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hirank
from adapters.setups import Lin, factors, layer_of, pair, perturb, stock, wrap
from hirank.kernels import _tuning
from hirank.kernels._triton import interpreting

CPU = torch.device("cpu")


def row(model: nn.Module):
    return hirank.explain(model).rows[0]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"backend": "cuda"}, "backend got 'cuda': choose from auto, triton, torch."),
        ({"dropout": "none"}, "dropout got 'none': choose from peft, single-gemm."),
    ],
    ids=["backend", "dropout"],
)
def test_a_value_that_does_not_exist_is_refused(wrong, sentence):
    for call in (lambda: hirank.accelerate(stock(Lin(4, 4)), **wrong),
                 lambda: hirank.patch_peft(**wrong)):  # fmt: skip
        with pytest.raises(hirank.HirankError) as caught:
            call()
        assert str(caught.value) == sentence


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
def test_triton_where_it_cannot_run_names_the_first_layer_and_changes_nothing():
    model = stock(Lin(4, 4))
    before = type(layer_of(model))
    with pytest.raises(hirank.HirankError) as caught:
        hirank.accelerate(model, backend="triton")
    assert str(caught.value) == (
        "base_model.model.lin: backend got 'triton' on cpu (on the CPU): use 'auto'."
    )
    assert type(layer_of(model)) is before


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_patched_model_that_was_not_moved_says_so_at_its_first_call(dropout):
    with hirank.patch_peft(backend="triton"):
        model = stock(Lin(4, 4), lora_dropout=dropout)
    with pytest.raises(ValueError, match=r"lin: backend got 'triton' on cpu \(on the CPU\)"):
        model.train()(torch.ones(2, 4))


def test_a_model_on_meta_may_ask_for_triton():
    with torch.device("meta"):
        model = stock(Lin(4, 4))
    hirank.accelerate(model, backend="triton")


def test_single_gemm_means_what_it_says():
    _, model = pair(Lin(24, 16), lora_dropout=0.5)
    hirank.accelerate(model, dropout="single-gemm")
    layer, x = layer_of(model).train(), torch.randn(3, 24)
    torch.manual_seed(0)
    found = layer(x)
    torch.manual_seed(0)
    dropped = layer.lora_dropout["default"](x).double()
    A, B, m, s = factors(layer)
    W, b = layer.base_layer.weight.double(), layer.base_layer.bias
    gain = m / (W + s * B @ A).norm(dim=1)
    expected = gain * (x.double() @ W.T + s * dropped @ A.T @ B.T) + b.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_calling_again_with_other_options_changes_them():
    model = wrap(Lin(24, 16), lora_dropout=0.5)
    assert row(model).reason.startswith("dropout in training with a second base GEMM")
    hirank.accelerate(model, dropout="single-gemm", backend="torch")
    assert row(model).reason == ("dropout in training with one base GEMM; eager: backend='torch'")
    model.eval()(torch.ones(1, 24))
    assert (row(model).tier, row(model).reason) == (
        "eager", "one adapter, whole linear: backend='torch'",
    )  # fmt: skip
    hirank.accelerate(model)
    assert not row(model).reason.endswith("backend='torch'")


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_options_survive_copies(how):
    model = hirank.accelerate(perturb(stock(Lin(24, 16), lora_dropout=0.5)), dropout="single-gemm")
    model(torch.ones(2, 24))
    assert row(how(model)) == row(model)


def test_restore_leaves_nothing_of_them():
    model = hirank.restore(wrap(Lin(4, 4)))
    assert not [key for key in vars(layer_of(model)) if "hirank" in key]


def test_options_of_a_patch():
    with hirank.patch_peft(), hirank.patch_peft(dropout="single-gemm") as inner:
        model = stock(Lin(24, 16), lora_dropout=0.5)
        assert "one base GEMM" in row(model).reason
        inner.remove()
        model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
        assert "one base GEMM" in row(model).reason  # an existing layer keeps its own
        assert "a second base GEMM" in row(stock(Lin(24, 16), lora_dropout=0.5)).reason


# What `explain` says of a device that has Triton kernels.


@pytest.fixture
def fast():
    """The CPU, as if it were a GPU that was measured."""
    found = replace(_tuning.tiles(CPU), obstacle=None, min_training=2**15, min_inference=0,
                    source="tiles measured on X", crossover_source="measured on X")  # fmt: skip
    with _tuning.override(CPU, found):
        yield


@pytest.mark.usefixtures("fast")
def test_the_tier_is_that_of_the_mode():
    model = wrap(Lin(24, 16))
    assert (row(model).tier, row(model).reason) == (
        "fused training",
        "one adapter, whole linear: tiles measured on X; eager below 2048 tokens (measured on X)",
    )
    model.eval()
    assert (row(model).tier, row(model).reason) == (
        "fused inference", "one adapter, whole linear: tiles measured on X",
    )  # fmt: skip
    model.double()
    assert (row(model).tier, row(model).reason) == ("eager", "one adapter, whole linear: float64")


@pytest.mark.usefixtures("fast")
def test_triton_on_demand():
    model = hirank.accelerate(stock(Lin(24, 16), lora_dropout=0.5), backend="triton")
    assert row(model).reason == "dropout in training with a second base GEMM"
    assert (row(model.eval()).tier, row(model).reason) == (
        "fused inference", "one adapter, whole linear: backend='triton'",
    )  # fmt: skip


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_backends_agree(dropout):
    model = perturb(stock(Lin(24, 16), lora_dropout=dropout))
    x, found = torch.randn(3, 24), []
    for backend in ("auto", "triton", "torch"):
        hirank.accelerate(model, backend=backend)
        torch.manual_seed(0)
        found.append(model(x))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_a_summary_counts_the_tiers():
    base = nn.ModuleDict({"lin": nn.Linear(4, 4), "emb": nn.Embedding(9, 4)})
    model = hirank.accelerate(get_peft_model(base, LoraConfig(target_modules=["lin", "emb"])))
    explanation = hirank.explain(model)
    tier = next(row.tier for row in explanation.rows if row.name.endswith("lin"))
    assert explanation.summary() == f"2 adapted layers: 1 {tier}, 1 composed"

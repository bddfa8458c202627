"""An adapter for each sample, and switching between requests.

The truth is an fp64 formula, or the same layer with one adapter at a time.
"""

import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hirank
from adapters import quantised_bases
from adapters.layer_kinds import KINDS
from adapters.setups import Lin, layer_of, perturb
from adapters.several import meaning, several
from helpers import tiny_llama
from hirank.kernels._triton import interpreting
from hirank.testing import relative_rms

QUANTISED = pytest.mark.parametrize("kind", ["nf4", "int8", "hqq", "torchao"])

NAMES = ["b", "default", "__base__", "c", "b", "default"]


def batch(kind):
    x = kind.input()
    if x.dtype == torch.long:
        return torch.randint(0, 37, (len(NAMES), *x.shape[1:]))
    return torch.randn(len(NAMES), *x.shape[1:])


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_d30_every_sample_has_its_own_adapter(kind):
    model = several(kind.model())
    x = batch(kind)
    with torch.no_grad():
        found = model(x, adapter_names=NAMES)
    exact = torch.cat([meaning(model, n, x[i : i + 1]) for i, n in enumerate(NAMES)])
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "names", [["b"] * 3, ["__base__"] * 3, ["c", "b", "c"], ["c"] * 3], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=str)
def test_d30_rows_equal_runs_alone(names, dtype, shape):
    model = several(Lin(16, 8).to(dtype))
    x = torch.randn(3, *shape, 16).to(dtype)
    with torch.no_grad():
        found = model(x, adapter_names=names)
        for i, name in enumerate(names):
            if name == "__base__":
                with model.disable_adapter():
                    alone = model(x[i : i + 1])[0]
            else:
                model.set_adapter(name)
                alone = model(x[i : i + 1])[0]
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(found[i], alone, **tolerance)


def test_d30_a_failed_call_leaves_nothing_behind():
    model = several(Lin(16, 8))
    x = torch.randn(2, 16)
    expected = model(x)
    for wrong, told in (
        ({"adapter_names": ["b", "nobody"]}, "non-existing adapter"),
        ({"adapter_names": ["b"]}, "Length of `adapter_names`"),
        ({"adapter_names": "b"}, "one name for each sample"),
    ):
        with pytest.raises(ValueError, match=told):
            model(x, **wrong)
        assert not any(m._forward_pre_hooks for m in model.modules())
        assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match="training mode"):
        model.train()(x, adapter_names=["b", "b"])
    model.eval().merge_adapter()
    with pytest.raises(ValueError, match="merged adapters"):
        model(x, adapter_names=["b", "b"])


def test_d30_what_cannot_be_mixed_says_why():
    model = several(Lin(16, 8))
    layer_of(model).base_layer.register_forward_hook(lambda *_: None)
    x = torch.randn(2, 16)
    with pytest.raises(hirank.HirankError, match="DoRA is enabled on .*the base layer has hooks"):
        model(x, adapter_names=["b", "c"])
    assert model(x, adapter_names=["c", "__base__"]).shape == (2, 8)


def test_d30_beam_search_repeats_the_names():
    model = get_peft_model(
        tiny_llama(), LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    )
    model.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    hirank.accelerate(perturb(model, size=0.3)).eval()
    ids = torch.randint(3, 300, (2, 5))
    options = {"num_beams": 3, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    found = model.generate(input_ids=ids, adapter_names=["b", "default"], **options)
    for i, name in enumerate(["b", "default"]):
        model.set_adapter(name)
        assert torch.equal(found[i], model.generate(input_ids=ids[i : i + 1], **options)[0])


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs one kernel at a time")
def test_d30_threads_may_ask_for_different_adapters():
    model = several(Lin(16, 8))
    x = torch.randn(4, 16)
    asked = [["b", "default", "c", "b"], ["default", "__base__", "b", "c"], ["c"] * 4]
    with torch.no_grad():
        alone = [model(x, adapter_names=names) for names in asked]
    failures = []

    def work(k):
        with torch.no_grad():
            for _ in range(50):
                if not torch.equal(model(x, adapter_names=asked[k]), alone[k]):
                    failures.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("through", ["names", "switch"])
def test_d12_d19_no_request_meets_a_stale_norm(through):
    """`b` changes in silence while other adapters serve."""
    model = several(Lin(16, 8))
    layer, x = layer_of(model), torch.randn(2, 16)

    def ask(name):
        with torch.no_grad():
            if through == "names":
                return model(x, adapter_names=[name] * 2)
            model.set_adapter(name)
            return model(x)

    for _ in range(3):
        ask("b"), ask("default"), ask("c"), ask("default")
        layer.lora_B["b"].weight.data.add_(0.1)
        torch.testing.assert_close(ask("b").double(), meaning(model, "b", x), rtol=1e-4, atol=1e-5)


def test_d12_d19_an_adapter_that_was_one_of_several_is_looked_at_anew():
    model = several(Lin(16, 8))
    layer, x = layer_of(model), torch.randn(2, 16)
    with torch.no_grad():
        for active in (["default", "b"], "default"):
            model.base_model.set_adapter(active)
            model(x)
        layer.lora_B["b"].weight.data.add_(0.1)
        model.set_adapter("b")
        torch.testing.assert_close(model(x).double(), meaning(model, "b", x), rtol=1e-4, atol=1e-5)


@QUANTISED
@pytest.mark.filterwarnings("ignore:.*(get_apply_tensor_subclass|will be cast from).*")
def test_d30_quantised_layers_mix_too(kind):
    model = quantised_bases.adapted(quantised_bases.base(kind))
    model.add_adapter("b", LoraConfig(r=3, target_modules=["lin"], use_dora=True))
    model.add_adapter("c", LoraConfig(r=2, target_modules=["lin"]))
    hirank.accelerate(perturb(model)).eval()
    weight, x = quantised_bases.floats(model), torch.randn(len(NAMES), 5, quantised_bases.K)
    with torch.no_grad():
        found = model(x, adapter_names=NAMES)
    for i, name in enumerate(NAMES):
        if name == "__base__":
            exact = x[i].double() @ weight.T + layer_of(model).base_layer.bias.double()
        else:
            model.set_adapter(name)
            exact = quantised_bases.truth(model, weight, x[i])
        assert relative_rms(found[i], exact.detach()) < (0.02 if "int8" in kind else 1e-5)

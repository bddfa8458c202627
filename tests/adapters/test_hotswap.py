"""Hot-swap: equal to a model that loaded the new adapter, or refused without a change."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import hotswap as peft_hotswap
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter

import hirank
from adapters import quantised_bases
from adapters.layer_kinds import KINDS
from adapters.setups import Lin, layer_of, perturb, stock, wrap
from adapters.several import config_of
from helpers import tiny_llama
from hirank.adapters.export import load_adapter

QUANTISED = pytest.mark.parametrize("kind", ["nf4", "int8", "hqq", "torchao"])


def saved(folder, base, seed=3, **config):
    model = perturb(wrap(copy.deepcopy(base), **config_of(base, **config)), seed=seed).eval()
    model.save_pretrained(folder)
    return model


SWAPS = {
    "alike": {},
    "alpha": {"lora_alpha": 3},
    "smaller": {"r": 2},
    "larger": {"r": 7, "lora_alpha": 5},
    "rslora": {"use_rslora": True, "r": 3},
    "pattern": {"rank_pattern": {"lin": 2}, "alpha_pattern": {"lin": 9}},
}


@pytest.mark.parametrize("change", SWAPS.values(), ids=SWAPS.keys())
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_d31_swapped_equals_loaded(change, dora, tmp_path):
    base, x = Lin(16, 8), torch.randn(3, 16)
    other = saved(tmp_path / "b", base, use_dora=dora, **change)
    model = perturb(wrap(copy.deepcopy(base), use_dora=dora)).eval()
    model(x)  # the norm is kept now
    hirank.hotswap_adapter(model, tmp_path / "b")
    assert torch.equal(model(x), other(x))
    layers = [layer_of(m) for m in (model, other)]
    for layer in layers:
        layer.set_scale("default", 0.5)
    assert torch.equal(model(x), other(x))
    model.save_pretrained(tmp_path / "again")  # the settings went along
    again = load_adapter(copy.deepcopy(base), tmp_path / "again").eval()
    for layer in layers:
        layer.set_scale("default", 1)
    assert torch.equal(again(x), other(x))


@pytest.mark.parametrize("kind", ["Conv1D", "Embedding", "Conv2d"])
def test_d31_other_kinds(kind, tmp_path):
    base, x = KINDS[kind].model(), KINDS[kind].input()
    other = saved(tmp_path, base, r=3)
    model = perturb(wrap(copy.deepcopy(base), **config_of(base))).eval()
    hirank.hotswap_adapter(model, tmp_path)
    assert torch.equal(model(x), other(x))


def test_d31_pefts_own_function_under_the_patch(tmp_path):
    base, x = Lin(16, 8), torch.randn(3, 16)
    other = saved(tmp_path, base, lora_alpha=3)
    with hirank.patch_peft():
        model = perturb(stock(copy.deepcopy(base))).eval()
        model(x)
        peft_hotswap.hotswap_adapter(model, str(tmp_path), "default", torch_device="cpu")
    assert torch.equal(model(x), other(x))


def test_d31_refusals_change_nothing(tmp_path):
    base, x = Lin(16, 8), torch.randn(3, 16)
    saved(tmp_path / "good", base)
    saved(tmp_path / "other base", Lin(12, 8))
    saved(tmp_path / "lora", base, use_dora=False)
    saved(tmp_path / "nan", base)
    saved(tmp_path / "half", base)
    for name, change in (
        ("nan", lambda w: w | {k: v * torch.nan for k, v in w.items() if "lora_B" in k}),
        ("half", lambda w: {k: v for k, v in w.items() if "lora_B" not in k}),
    ):
        path = tmp_path / name / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)
    model = perturb(wrap(copy.deepcopy(base))).eval()
    expected, state = model(x), copy.deepcopy(model.state_dict())
    for name, told in (
        ("other base", "another base model"), ("lora", "magnitudes"), ("nan", "NaN"),
        ("half", "lacks .*lora_B"), ("nowhere", "is no folder"),
    ):  # fmt: skip
        with pytest.raises(hirank.HirankError, match=told):
            hirank.hotswap_adapter(model, tmp_path / name)
    with pytest.raises(hirank.HirankError, match="no adapter 'x'"):
        hirank.hotswap_adapter(model, tmp_path / "good", "x")
    assert torch.equal(model(x), expected)
    model.merge_adapter()
    with pytest.raises(hirank.HirankError, match="unmerge_adapter"):
        hirank.hotswap_adapter(model, tmp_path / "good")
    model.unmerge_adapter()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_d31_a_layer_the_new_adapter_lacks_becomes_its_base(tmp_path):
    torch.manual_seed(0)
    base, ids = tiny_llama(), torch.randint(0, 320, (2, 5))

    def made(targets, seed):
        config = LoraConfig(r=4, target_modules=targets, use_dora=True)
        model = get_peft_model(copy.deepcopy(base), config)
        return perturb(hirank.accelerate(model), seed=seed).eval()

    other = made(["q_proj"], 3)
    other.save_pretrained(tmp_path)
    model = made(["q_proj", "v_proj"], 4)
    hirank.hotswap_adapter(model, tmp_path)
    torch.testing.assert_close(model(ids).logits, other(ids).logits)


def test_d31_compiled_models_follow_without_compiling_again(tmp_path):
    base, x = Lin(16, 8), torch.randn(3, 16)
    others = {
        name: saved(tmp_path / name, base, seed=i, **change)
        for i, (name, change) in enumerate(SWAPS.items())
    }
    model = perturb(wrap(copy.deepcopy(base))).eval()
    expected = model(x)
    hirank.prepare_hotswap(model, 7)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        for name, other in others.items():
            hirank.hotswap_adapter(compiled, tmp_path / name)
            torch.testing.assert_close(compiled(x), other(x), rtol=1e-5, atol=1e-6)
            model.save_pretrained(tmp_path / "again")
            again = load_adapter(copy.deepcopy(base), tmp_path / "again").eval()
            torch.testing.assert_close(again(x), other(x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    with pytest.raises(hirank.HirankError, match="before torch.compile"):
        hirank.prepare_hotswap(compiled, 9)
    saved(tmp_path / "huge", base, r=8)
    with pytest.raises(hirank.HirankError, match="room for rank 7"):
        hirank.hotswap_adapter(compiled, tmp_path / "huge")


@QUANTISED
@pytest.mark.filterwarnings("ignore:.*(get_apply_tensor_subclass|will be cast from).*")
def test_d31_quantised_layers_swap_too(kind, tmp_path):
    base, x = quantised_bases.base(kind), torch.randn(5, quantised_bases.K)
    other = hirank.accelerate(perturb(quantised_bases.adapted(base, r=2, lora_alpha=5), seed=3))
    other.eval().save_pretrained(tmp_path)
    expected = other(x).detach()
    model = hirank.accelerate(perturb(quantised_bases.adapted(other.unload()))).eval()
    model(x)
    hirank.hotswap_adapter(model, tmp_path)
    torch.testing.assert_close(model(x), expected)

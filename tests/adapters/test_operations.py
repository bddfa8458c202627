"""What is done to several adapters of one model: mixed batches, swaps, combining, training, saving.

The truth is an fp64 formula, or the same layer with one adapter at a time.
"""

import copy
import gc
import json
import pickle
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import hotswap as peft_hotswap
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import hirank
from adapters import quantised_bases
from adapters.layer_kinds import KINDS, apply, effective, kernel, parts_of
from adapters.setups import Lin, fresh_norm, layer_of, norm_in_use, perturb, reference, stock, wrap
from helpers import tiny_llama
from hirank.adapters.export import load_adapter
from hirank.kernels._triton import interpreting
from hirank.testing import relative_rms


def config_of(base, **config):
    turned = isinstance(base.lin, Conv1D)
    return {"target_modules": ["lin"], "fan_in_fan_out": turned, "use_dora": True, **config}


def several(base):
    """A model with adapters `default`, `b`, `c`: DoRA of ranks 4 and 8, LoRA of rank 4."""
    model = stock(base, **config_of(base))
    for name, r, dora in (("b", 8, True), ("c", 4, False)):
        model.add_adapter(name, LoraConfig(r=r, lora_alpha=5, **config_of(base, use_dora=dora)))
    return hirank.accelerate(perturb(model)).eval()


def meaning(model, name, x):
    """Samples with one adapter, or with none, in fp64."""
    layer = layer_of(model)
    parts = parts_of(layer, "default" if name == "__base__" else name)
    if isinstance(parts.base, nn.Linear):
        bias = parts.bias.double()
        if name == "__base__":
            return x.double() @ parts.weight.T + bias
        full = parts.weight + parts.scale * parts.B @ parts.A
        gain = 1.0 if parts.m is None else (parts.m / full.norm(dim=1))[:, None]
        return x.double() @ (gain * full).T + bias
    return apply(parts, kernel(parts) if name == "__base__" else effective(parts), x)


QUANTISED = pytest.mark.parametrize("kind", ["nf4", "int8", "hqq", "torchao"])

# Mixed batches

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


# Hot-swap


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
        ("half", "lacks .*lora_B"), ("nowhere", "cannot be read"),
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
    counter = torch._dynamo.testing.CompileCounter()
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


# Combining


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("how", ["linear", "cat", "svd"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_d26_one_adapter_at_weight_one_is_itself(dora, rslora, how):
    model = perturb(wrap(Lin(16, 8), use_dora=dora, use_rslora=rslora)).eval()
    x = torch.randn(3, 16)
    expected = model(x)
    model.add_weighted_adapter(["default"], [1.0], "combo", combination_type=how)
    model.set_adapter("combo")
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_d26_weights_share_out_direction_and_magnitude():
    model = several(Lin(16, 8))
    layer = layer_of(model)
    model.add_weighted_adapter(["default", "b"], [0.3, -0.5], "combo", combination_type="cat")
    model.set_adapter("combo")
    W = layer.base_layer.weight.double()
    norm, change, m = W.norm(dim=1), 0, W.norm(dim=1)
    for name, weight in (("default", 0.3), ("b", -0.5)):
        parts = parts_of(layer, name)
        change = change + weight * parts.scale * parts.B @ parts.A
        m = m + weight * (parts.m - norm)
    full = W + change
    x = torch.randn(3, 16)
    exact = x.double() @ (m[:, None] * full / full.norm(dim=1, keepdim=True)).T
    exact = exact + layer.base_layer.bias.double()
    torch.testing.assert_close(model(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_d27_a_weight_is_a_strength_from_base_to_adapter():
    model = perturb(wrap(Lin(16, 8))).eval()
    x = torch.randn(3, 16)
    full, distances = model(x), []
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        model.add_weighted_adapter(["default"], [t], f"at {int(100 * t)}")
        model.set_adapter(f"at {int(100 * t)}")
        distances.append((model(x) - full).norm().item())
        if t == 0:
            with model.disable_adapter():
                torch.testing.assert_close(model.base_model(x), model(x), rtol=1e-5, atol=1e-5)
    assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-4


def test_d26_what_has_no_meaning_is_refused():
    model = several(Lin(16, 8))
    for adapters, weights, how, told in (
        (["default", "c"], [1, 1], "cat", "of one kind"),
        (["default", "b"], [1, 1], "linear", "use 'cat' or 'svd'"),
        (["default", "b"], [1, 1], "ties_svd", "use 'cat' or 'svd'"),
        (["default", "b"], [1], "cat", "one weight for each"),
    ):
        with pytest.raises(hirank.HirankError, match=told):
            model.add_weighted_adapter(adapters, weights, "combo", combination_type=how)
    assert "combo" not in model.peft_config and "combo" not in layer_of(model).scaling


# Training what is active


def weights_of(model, name):
    return {k: p for k, p in model.named_parameters() if f".{name}." in k or k.endswith(f".{name}")}


@pytest.mark.parametrize("zero", ["leave", "zeros", "none"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}], ids=str)
@pytest.mark.filterwarnings("ignore:An optimizer was to step")
def test_only_what_is_active_trains(zero, options):
    model = several(Lin(16, 8)).train()
    model.set_adapter("default")
    every = [p for k, p in model.named_parameters() if "lora_" in k]
    optimizer = torch.optim.AdamW(every, lr=0.1, weight_decay=0.5, **options)
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    if zero != "leave":
        optimizer.zero_grad(set_to_none=zero == "none")
    model.set_adapter("b")
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    changed = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
    assert changed == set(weights_of(model, "b"))
    for name in ("default", "c"):
        for key, p in weights_of(model, name).items():
            assert not p.requires_grad
            assert p.grad is None or (zero == "leave" and p.grad.any()) or not p.grad.any(), key


def test_a_short_switch_loses_no_gradient():
    """As trainers do that ask a reference adapter between two micro-batches."""
    model = several(Lin(16, 8)).train()
    model.set_adapter("default")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(4, 16)
    model(x).square().sum().backward()
    kept = {k: p.grad.clone() for k, p in weights_of(model, "default").items()}
    model.set_adapter("b")
    before = {k: p.detach().clone() for k, p in weights_of(model, "default").items()}
    with pytest.warns(UserWarning, match=r"adapters that are not active \(default\)"):
        optimizer.step()
    model.set_adapter("default")
    for key, p in weights_of(model, "default").items():
        assert torch.equal(p.grad, kept[key]) and torch.equal(p, before[key])
    optimizer.step()
    for key, p in weights_of(model, "default").items():
        torch.testing.assert_close(p, before[key] - 0.1 * kept[key])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_guarded_too(how):
    model = how(several(Lin(16, 8)))
    model.set_adapter("b")
    p = layer_of(model).lora_A["default"].weight
    p.grad, before = torch.zeros_like(p), p.detach().clone()
    torch.optim.AdamW([p], weight_decay=0.5).step()
    assert torch.equal(p, before) and p.grad is not None


def test_states_of_switching():
    model = several(Lin(16, 8)).train()
    x = torch.randn(3, 16)

    def trained():
        return {n for n in ("default", "b", "c") if any(
            p.requires_grad for p in weights_of(model, n).values())}  # fmt: skip

    model.base_model.set_adapter(["default", "b"])
    assert trained() == {"default", "b"}
    model(x).sum().backward()
    grads = {n: [p.grad for p in weights_of(model, n).values()] for n in ("default", "b", "c")}
    assert all(g is not None for n in ("default", "b") for g in grads[n])
    assert all(g is None for g in grads["c"])
    model.base_model.set_adapter("c", inference_mode=True)
    assert trained() == set()
    with model.disable_adapter():
        torch.testing.assert_close(model(x), layer_of(model).base_layer(x))
    model.set_adapter("b")
    assert trained() == {"b"}
    torch.testing.assert_close(model(x).double(), meaning(model, "b", x), rtol=1e-4, atol=1e-5)


# Merging


def test_unloading_frees_the_weight_that_unmerge_would_put_back():
    model = perturb(wrap(Lin(16, 8))).eval()
    x = torch.randn(3, 16)
    expected = model(x).detach()
    model.merge_adapter(safe_merge=True)
    kept = weakref.ref(layer_of(model)._hirank_base)
    plain = model.unload()
    del model
    gc.collect()
    assert kept() is None and type(plain.lin) is nn.Linear
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-5)


def test_merge_and_unload_several_adapters():
    model = several(Lin(16, 8))
    x = torch.randn(3, 16)
    model.base_model.set_adapter(["b", "c", "default"])
    expected = model(x).detach()
    merged = model.merge_and_unload(safe_merge=True, adapter_names=["b", "c", "default"])
    torch.testing.assert_close(merged(x), expected, rtol=1e-5, atol=1e-5)


def test_merged_then_switched_is_unmerged_first():
    model = several(Lin(16, 8))
    x, weight = torch.randn(3, 16), layer_of(model).base_layer.weight.detach().clone()
    model.merge_adapter()
    with pytest.warns(UserWarning, match="Unmerging"):
        model.set_adapter("b")
    assert torch.equal(layer_of(model).base_layer.weight, weight)
    torch.testing.assert_close(model(x).double(), meaning(model, "b", x), rtol=1e-4, atol=1e-5)


# Scales


def test_d28_scales_reach_the_norm():
    model = perturb(wrap(Lin(16, 8), use_rslora=True)).eval()
    layer, x = layer_of(model), torch.randn(3, 16)
    for change, scale in (
        (lambda: layer.set_scale("default", 0.5), 2.0), (lambda: layer.scale_layer(3), 6.0),
        (lambda: layer.unscale_layer(2), 3.0), (lambda: layer.unscale_layer(), 4.0),
    ):  # fmt: skip
        change()
        assert layer.scaling["default"] == pytest.approx(scale)
        torch.testing.assert_close(model(x).double(), reference(model, x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            norm_in_use(layer).double(), fresh_norm(layer), rtol=1e-6, atol=0
        )


def test_modules_to_save_go_along(tmp_path):
    class Two(Lin):
        def __init__(self):
            super().__init__(16, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(super().forward(x))

    base = Two()
    model = perturb(wrap(copy.deepcopy(base), modules_to_save=["head"])).eval()
    model.base_model.model.head.modules_to_save["default"].weight.data.add_(1.0)
    x = torch.randn(3, 16)
    model.save_pretrained(tmp_path)
    loaded = load_adapter(copy.deepcopy(base), tmp_path).eval()
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(hirank.HirankError, match="has no place"):
        hirank.hotswap_adapter(loaded, tmp_path)


def test_d67_target_parameters_with_dora_are_refused():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 8))

        def forward(self, x):
            return torch.bmm(x, self.weight)

    model = nn.Sequential()
    model.experts = Experts()
    config = LoraConfig(target_parameters=["experts.weight"], use_dora=True)
    with pytest.raises(ValueError, match="does not work with use_dora"):
        get_peft_model(model, config)


# Saving


def spoiled(part, value):
    def change(model):
        getattr(layer_of(model), part)["default"].weight.data.view(-1)[1] = value

    return change


def settings(**fields):
    def change(model):
        for field, value in fields.items():
            setattr(model.peft_config["default"], field, value)

    return change


LOSSES = {
    "NaN in A": (spoiled("lora_A", torch.nan), "holds NaN or infinity"),
    "infinite m": (spoiled("lora_magnitude_vector", torch.inf), "holds NaN or infinity"),
    "no alpha": (settings(lora_alpha=None), "whose settings say None"),
    "another alpha": (settings(lora_alpha=5), "whose settings say 5"),
    "another rank": (settings(r=5), "whose settings say 5"),
    "rslora": (settings(use_rslora=True), "another strength"),
    "use_dora": (settings(use_dora=False), "the magnitude would be lost"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_d58_d60_saving_refuses_to_lose(loss, tmp_path):
    change, told = loss
    model = perturb(wrap(Lin(16, 8)))
    change(model)
    with pytest.raises(hirank.HirankError, match=told) as caught:
        model.save_pretrained(tmp_path / "new")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_d60_a_state_dict_without_all_weights_is_refused(lost, tmp_path):
    model = perturb(wrap(Lin(16, 8)))
    state = {k: v for k, v in model.state_dict().items() if lost not in k}
    with pytest.raises(hirank.HirankError, match=f"without .*{lost}"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert {f.name for f in tmp_path.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors"}  # fmt: skip


def test_what_was_there_survives_a_save_that_fails(tmp_path, monkeypatch):
    model = perturb(wrap(Lin(16, 8)))
    model.save_pretrained(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    perturb(model)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(type(model.peft_config["default"]), "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_several_adapters_and_a_card_that_exists(tmp_path):
    model = several(Lin(16, 8))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    model.save_pretrained(tmp_path)
    assert "license: mit" in (tmp_path / "README.md").read_text()
    for folder, rank in ((tmp_path, 4), (tmp_path / "b", 8), (tmp_path / "c", 4)):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
    loaded = PeftModel.from_pretrained(Lin(16, 8), str(tmp_path / "b"))
    key = "base_model.model.lin.lora_magnitude_vector"
    saved_m = load_file(tmp_path / "b" / "adapter_model.safetensors")[key]
    assert torch.equal(layer_of(loaded).lora_magnitude_vector["default"].weight, saved_m)


@pytest.mark.filterwarnings("ignore:.*Setting `save_embedding_layers`")
def test_half_magnitudes_are_saved_with_a_warning(tmp_path):
    model = perturb(wrap(Lin(16, 8)))
    state = {k: v.bfloat16() for k, v in model.state_dict().items()}
    with pytest.warns(UserWarning, match="keep it in float32"):
        model.save_pretrained(tmp_path, state_dict=state)


# The models around the layers


def test_models_keep_their_names_and_come_back():
    model = wrap(Lin(16, 8))
    assert type(model).__name__ == "PeftModel" and isinstance(model, PeftModel)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and type(other.base_model) is type(model.base_model)
    hirank.restore(model)
    assert type(model) is PeftModel
    assert type(model.base_model).__module__ == "peft.tuners.lora.model"
    with hirank.patch_peft():
        patched = stock(Lin(16, 8))
    assert type(patched) is type(wrap(Lin(16, 8)))
    assert type(patched.base_model).__name__ == "FastLoraModel"

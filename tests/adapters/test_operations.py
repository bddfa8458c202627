"""What is done to several adapters of one model: combining, training, merging, scaling."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import hirank
from adapters.layer_kinds import parts_of
from adapters.setups import Lin, fresh_norm, layer_of, norm_in_use, perturb, reference, stock, wrap
from adapters.several import meaning, several
from hirank.adapters.export import load_adapter

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

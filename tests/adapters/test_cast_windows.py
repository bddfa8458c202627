"""Casts that layers share are those of the adapters as they are when a pass begins."""

import copy

import pytest
import torch

from adapters.setups import layer_of, perturb, wrap
from hirank.adapters import groups
from hirank.kernels._triton import HAS_TRITON, interpreting

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (DEVICE.type == "cuda" or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
CLOSE = 2.0**-8  # in bf16


class Three(torch.nn.Module):
    """Three layers, so that a window has more than the one that asks."""

    def __init__(self):
        super().__init__()
        self.lin, self.mid = torch.nn.Linear(64, 48), torch.nn.Linear(48, 40)
        self.last = torch.nn.Linear(40, 48)

    def forward(self, x):
        return self.last(self.mid(self.lin(x)).relu())


CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["lin", "mid", "last"]}


def make():
    torch.manual_seed(0)
    model = perturb(wrap(Three().bfloat16().to(DEVICE), **CONFIG))
    assert layer_of(model).lora_A["default"].weight.dtype == torch.float32
    return model


def outcome(model, x):
    y = model(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    return y, *torch.autograd.grad(y.float().square().sum(), weights)


def without_windows(model, x, monkeypatch):
    """What a copy computes where every call casts."""
    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "_share_casts", lambda self, found: None)
        other = copy.deepcopy(model)
        for name, p in other.named_parameters():
            if interpreting() and ("lora_A" in name or "lora_B" in name):
                p.data = rounded(p.data)
        return outcome(other, x)


def rounded(weight):
    """As kernels round to bf16: in the interpreter towards zero."""
    if not interpreting():
        return weight.bfloat16().float()
    return (weight.view(torch.int32) & -65536).view(torch.float32)


def cast_in_use(layer):
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    W, s = layer.base_layer.weight, layer.scaling["default"]
    casts = layer._hirank_norms["default"].at_hand(W, A, B, s, torch.bfloat16)[1]
    return casts.at(onward=True)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= CLOSE * other.float().norm()


@needs_kernels
def test_d12_outputs_and_gradients_are_those_without_windows(monkeypatch):
    model, x = make(), torch.randn(5, 64, device=DEVICE).bfloat16()
    assert_same(outcome(model, x), without_windows(model, x, monkeypatch))
    layer = layer_of(model)
    cast = cast_in_use(layer)
    assert cast.factor == layer.scaling["default"] == 2
    for kept, whole in ((cast.A / 2, layer.lora_A), (cast.B, layer.lora_B)):
        assert torch.equal(kept.float(), rounded(whole["default"].weight.detach()))


CHANGES = {
    "data": lambda layer: layer.lora_A["default"].weight.data.add_(0.1),
    "one entry": lambda layer: layer.lora_B["default"].weight.data[3, 1].add_(0.5),
    "assigned": lambda layer: setattr(
        layer.lora_A["default"].weight, "data", layer.lora_A["default"].weight.data * 1.5
    ),
    "in place": lambda layer: torch.nn.init.normal_(layer.lora_B["default"].weight),
    "scale 0.5": lambda layer: layer.set_scale("default", 0.5),
    "scale 0.37": lambda layer: layer.set_scale("default", 0.37),
    "scale 0": lambda layer: layer.set_scale("default", 0),
    "new module": lambda layer: layer.lora_A.update(
        {"default": torch.nn.Linear(64, 8, bias=False, device=DEVICE)}
    ),
    "another rank": lambda layer: (
        layer.lora_A.update({"default": torch.nn.Linear(64, 16, bias=False, device=DEVICE)}),
        layer.lora_B.update({"default": torch.nn.Linear(16, 48, bias=False, device=DEVICE)}),
    ),
}


@needs_kernels
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_d12_windows_follow_every_change(change, training, monkeypatch):
    model, x = make().train(training), torch.randn(5, 64, device=DEVICE).bfloat16()
    outcome(model, x)
    change(layer_of(model))
    assert_same(outcome(model, x), without_windows(model, x, monkeypatch))


def turned(layer):
    A = layer.lora_A["default"].weight
    A.data = A.data.t()


@needs_kernels
@pytest.mark.parametrize("which", [0, 1])
def test_d12_a_factor_transposed_where_it_lies(which, monkeypatch):
    """Square, so that only its strides tell; in a layer that is not the first, too."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
    model = perturb(wrap(base.to(DEVICE), r=16, target_modules=["0", "1"]))
    for name, p in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            p.data = rounded(p.data)  # PyTorch's cast and the kernels' are the same then
    x = torch.randn(5, 16, device=DEVICE).bfloat16()
    outcome(model, x)
    turned([m for m in model.modules() if hasattr(m, "_hirank_norms")][which])
    assert_same(outcome(model, x), without_windows(model, x, monkeypatch))


@needs_kernels
def test_d12_a_step_of_any_optimizer_reaches_the_windows(monkeypatch):
    model, x = make(), torch.randn(5, 64, device=DEVICE).bfloat16()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        optimizer.step()
        assert_same(outcome(model, x), without_windows(model, x, monkeypatch))


@needs_kernels
def test_d12_gradients_belong_to_the_scale_of_their_forward_pass():
    """Another scale meanwhile makes other windows."""
    model, x = make(), torch.randn(5, 64, device=DEVICE).bfloat16()
    weights = [p for p in model.parameters() if p.requires_grad]
    expected = outcome(model, x)[1:]
    y = model(x)
    layer_of(model).set_scale("default", 0.5)
    with torch.no_grad():
        model(x)
    found = torch.autograd.grad(y.float().square().sum(), weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)

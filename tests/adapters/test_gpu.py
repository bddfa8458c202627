"""Converted models on a GPU: bf16 base, fp32 adapters, autocast; norms kept without waiting."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hirank
from adapters.setups import Lin, fresh_norm, layer_of, norm_in_use, pair, perturb, stock, wrap
from helpers import tiny_llama

pytestmark = pytest.mark.gpu


def llama(**config):
    model = get_peft_model(
        tiny_llama(hidden=64).bfloat16().cuda(),
        LoraConfig(**({"r": 4, "target_modules": "all-linear", "use_dora": True} | config)),
    )
    return perturb(model, size=0.01)


def train(model, ids, steps=3, accumulation=2):
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        for _ in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "new", "reentrant"])
def test_losses_follow_stock_and_norms_follow_the_weights(checkpointing):
    theirs = llama()
    ours = hirank.accelerate(copy.deepcopy(theirs))
    for model in (theirs, ours):
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
    ids = torch.randint(0, 320, (2, 16), device="cuda")
    expected, found = train(theirs, ids), train(ours, ids)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 2e-2
    layers = [m for m in ours.modules() if hasattr(m, "_hirank_norms")]
    assert [layer._hirank_norms["default"].computed for layer in layers] == [3] * 14


CHANGES = {
    "data": lambda layer: layer.lora_A["default"].weight.data.add_(0.1),
    "one entry": lambda layer: layer.lora_B["default"].weight.data[3, 1].add_(0.5),
    "assigned": lambda layer: setattr(
        layer.lora_A["default"].weight, "data", layer.lora_A["default"].weight.data * 1.5
    ),
    "set_scale": lambda layer: layer.set_scale("default", 0.5),
    "base weight": lambda layer: layer.base_layer.weight.data.mul_(1.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_every_change_is_noticed(change, training):
    model = perturb(wrap(Lin(48, 40).cuda())).train(training)
    layer, x = layer_of(model), torch.randn(3, 48, device="cuda")
    model(x)
    change(layer)
    model(x)
    norm = norm_in_use(layer).double()
    torch.testing.assert_close(norm, fresh_norm(layer), rtol=1e-5, atol=0)


def test_outputs_and_gradients_equal_stock():
    theirs, ours = (model.cuda() for model in pair(Lin(48, 40)))
    x = torch.randn(2, 5, 48, device="cuda")
    for found in zip(*(both(model, x) for model in (theirs, ours)), strict=True):
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def both(model, x):
    y = model(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.square().sum(), weights)
    return y, *grads


@pytest.mark.parametrize("how", ["accelerate", "patch"])
def test_identity_at_initialisation(how):
    base = Lin(1024, 256).bfloat16().cuda()
    x = torch.randn(4, 1024, device="cuda").bfloat16()
    expected = base(x)
    if how == "patch":
        with hirank.patch_peft():
            model = stock(base)
    else:
        model = wrap(base)
    assert torch.equal(model(x), expected)


def test_the_hot_path_never_waits():
    model = hirank.accelerate(llama())
    ids = torch.randint(0, 320, (2, 16), device="cuda")
    train(model, ids, steps=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in (m for m in model.modules() if hasattr(m, "_hirank_norms")):
            layer(torch.ones(2, layer.in_features, device="cuda", dtype=torch.bfloat16))
            layer(torch.ones(2, layer.in_features, device="cuda", dtype=torch.bfloat16))
    finally:
        torch.cuda.set_sync_debug_mode("default")

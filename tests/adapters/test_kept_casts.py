"""Casts kept between calls are those of the adapters as they are; and how many are kept."""

import copy

import pytest
import torch

from adapters.setups import Lin, layer_of, perturb, wrap
from hirank.adapters import kept_casts
from hirank.adapters.kept_casts import allowance
from hirank.kernels._triton import HAS_TRITON, interpreting

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (DEVICE.type == "cuda" or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
CLOSE = 2.0**-8  # in bf16


def chosen(sizes, room, monkeypatch, dtype=torch.bfloat16, held=torch.float32, scale=2.0):
    monkeypatch.setattr(kept_casts, "allowance", lambda weights: room)
    layers = [
        (torch.zeros(n, k), torch.zeros(r, k, dtype=held), torch.zeros(n, r, dtype=held), scale)
        for n, k, r in sizes
    ]
    return kept_casts.kept_casts(layers, dtype)


def test_the_smallest_are_kept_within_the_allowance(monkeypatch):
    sizes = [(64, 64, 16), (32, 32, 8), (64, 64, 8), (32, 32, 8)]
    found = chosen(sizes, 2 * (512 + 512 + 1024), monkeypatch)
    assert [c is not None for c in found] == [False, True, True, True]
    for (n, k, r), cast in zip(sizes, found, strict=True):
        if cast is not None:
            assert (cast.A.shape, cast.A_t.shape, cast.B.shape) == ((r, k), (k, r), (n, r))
            assert all(t.data_ptr() % 16 == 0 for t in (cast.A, cast.B))
            assert cast.A_t.data_ptr() == cast.A.data_ptr()
    places = {t.data_ptr() for c in found if c is not None for t in (c.A, c.B)}
    assert len(places) == 6


@pytest.mark.parametrize("size", [(32, 20, 8), (32, 32, 4), (32, 32, 0)], ids=str)
def test_what_no_descriptor_takes_is_not_kept(size, monkeypatch):
    assert chosen([size, (32, 32, 8)], 2**20, monkeypatch)[0] is None


@pytest.mark.parametrize(
    ("dtype", "held"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32)]
    + [(torch.bfloat16, torch.bfloat16)],
)
def test_only_fp32_adapters_under_bf16_are_kept(dtype, held, monkeypatch):
    assert chosen([(32, 32, 8)], 2**20, monkeypatch, dtype, held) == [None]


@pytest.mark.parametrize(("scale", "factor"), [(2, 2), (-0.25, -0.25), (3.0, 1), (0.0, 1)])
def test_a_power_of_two_is_in_the_cast(scale, factor, monkeypatch):
    assert chosen([(32, 32, 8)], 2**20, monkeypatch, scale=scale)[0].factor == factor


def test_without_memory_nothing_is_kept(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kept_casts.torch, "empty", refuse)
    assert chosen([(32, 32, 8)], 2**20, monkeypatch) == [None]


@pytest.fixture(autouse=True)
def generous(monkeypatch):
    """Of weights so small, a tenth holds no adapter."""
    monkeypatch.setattr(kept_casts, "SHARE", 1.0)


def make():
    torch.manual_seed(0)
    model = perturb(wrap(Lin(64, 48).bfloat16().to(DEVICE), r=8, lora_alpha=16))
    assert layer_of(model).lora_A["default"].weight.dtype == torch.float32
    return model


def outcome(model, x):
    y = model(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    return y, *torch.autograd.grad(y.float().square().sum(), weights)


def without_kept(model, x, monkeypatch):
    """What a copy computes that keeps no casts."""
    with monkeypatch.context() as patch:
        patch.setattr(kept_casts, "allowance", lambda weights: 0)
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
    return layer._hirank_norms["default"].at_hand(W, A, B, s, torch.bfloat16)[1]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other.float()).norm() <= CLOSE * other.float().norm()


@needs_kernels
def test_d12_outputs_and_gradients_are_those_without_kept_casts(monkeypatch):
    model, x = make(), torch.randn(5, 64, device=DEVICE).bfloat16()
    assert_same(outcome(model, x), without_kept(model, x, monkeypatch))
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
def test_d12_kept_casts_follow_every_change(change, training, monkeypatch):
    model, x = make().train(training), torch.randn(5, 64, device=DEVICE).bfloat16()
    outcome(model, x)
    change(layer_of(model))
    assert_same(outcome(model, x), without_kept(model, x, monkeypatch))


@needs_kernels
def test_d12_a_step_of_any_optimizer_reaches_the_kept_casts(monkeypatch):
    model, x = make(), torch.randn(5, 64, device=DEVICE).bfloat16()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.05, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).float().square().sum().backward()
        optimizer.step()
        assert_same(outcome(model, x), without_kept(model, x, monkeypatch))


@needs_kernels
def test_d12_gradients_belong_to_the_scale_of_their_forward_pass():
    """Another scale meanwhile writes the casts anew, but without the scale in them."""
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


def test_a_share_of_the_weights_is_the_most(monkeypatch):
    monkeypatch.setattr(kept_casts, "SHARE", 0.1)
    weights = [torch.zeros(100, 10, dtype=torch.bfloat16), torch.zeros(50, 10)]
    assert allowance(weights) == allowance([*weights, weights[0]]) == 400

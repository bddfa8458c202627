"""Kept norms of weights that are viewed as matrices, by kernels: on a GPU, or interpreted.

The names say d12 and d19 as the cases of stale norms do, so that the interpreter's run has them.
"""

import pytest
import torch
from torch import nn

from adapters.layer_kinds import Holder, apply, conv1d, effective, parts_of
from adapters.setups import layer_of, perturb, wrap
from hirank.adapters import viewed_norms
from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.testing import relative_rms

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
KINDS = {
    "embedding": lambda: nn.Embedding(37, 16),
    "Conv1D": lambda: conv1d(24, 16),
    "convolution": lambda: nn.Conv2d(4, 16, 3, padding=1),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def by_tables(monkeypatch):
    """Small weights on a CPU have a way of their own."""
    monkeypatch.setattr(viewed_norms, "_SMALL", -1)


def wrapped(kind, device):
    fans = {"fan_in_fan_out": True} if kind == "Conv1D" else {}
    return wrap(Holder(KINDS[kind]()).to(device), r=8, **fans)


def make(kind, device, training=True):
    torch.manual_seed(3)
    model = perturb(wrapped(kind, device)).train(training)
    inputs = {
        "embedding": lambda: torch.randint(0, 37, (3, 11), device=device),
        "Conv1D": lambda: torch.randn(5, 16, device=device),
        "convolution": lambda: torch.randn(2, 4, 7, 5, device=device),
    }
    return model, layer_of(model), inputs[kind]()


def exact(layer, x):
    parts = parts_of(layer)
    return apply(parts, effective(parts), x if x.dtype == torch.long else x.double())


def factors(layer):
    if hasattr(layer.base_layer, "num_embeddings"):
        return layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def stepped(layer):
    weights = [p for p in layer.parameters() if p.requires_grad]
    for p in weights:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(weights, lr=0.05).step()


def replaced(layer):
    old = layer.base_layer.weight
    layer.base_layer.weight = nn.Parameter(old.detach() * 1.5, requires_grad=False)


def loaded(layer):
    layer.load_state_dict({k: v * 1.3 for k, v in layer.state_dict().items()})


CHANGES = {
    "data": lambda layer: factors(layer)[0].data.add_(0.1),
    "one entry": lambda layer: factors(layer)[1].data[3, 1].add_(0.5),
    "assigned": lambda layer: setattr(factors(layer)[0], "data", factors(layer)[0].data * 1.5),
    "set_scale": lambda layer: layer.set_scale("default", 0.5),
    "base written": lambda layer: layer.base_layer.weight.data.mul_(1.5),
    "base assigned": lambda layer: setattr(
        layer.base_layer.weight, "data", layer.base_layer.weight.data * 1.5
    ),
    "base replaced": replaced,
    "loaded": loaded,
    "stepped": stepped,
}


@pytest.mark.parametrize("kind", ["embedding", "Conv1D"])
@pytest.mark.parametrize("change", CHANGES)
def test_d12_d19_every_change_is_noticed(kind, change, device):
    training = len(change) % 2 == 0  # one of the two is enough for each
    model, layer, x = make(kind, device, training)
    model(x)
    before = model(x).detach()
    CHANGES[change](layer)
    assert relative_rms(model(x).detach(), exact(layer, x)) < 1e-5
    assert relative_rms(before, exact(layer, x)) > 1e-3


def test_d12_a_vocabulary_that_is_trimmed_where_it_lies(device):
    model, layer, x = make("embedding", device)
    model(x)
    A = layer.lora_embedding_A["default"]
    layer.base_layer.weight.data = layer.base_layer.weight.data[:20]
    A.data = A.data[:, :20]
    x = x.clamp(max=19)
    assert relative_rms(model(x).detach(), exact(layer, x)) < 1e-5


@kinds
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_d12_what_did_not_change_is_computed_once(kind, training, device):
    model, layer, x = make(kind, device, training)
    for _ in range(2):
        model(x).sum().backward()
    assert layer._hirank_norms["default"].computed == 1
    stepped(layer)
    for _ in range(2):
        model(x)
    assert layer._hirank_norms["default"].computed == 2


def several(kind, device, count=2):
    names = [f"layer{i}" for i in range(count)]
    base = nn.ModuleDict({name: KINDS[kind]() for name in names}).to(device)
    fans = {"fan_in_fan_out": True} if kind == "Conv1D" else {}
    model = wrap(base, r=8, target_modules=names, **fans)
    return [m for m in perturb(model).modules() if hasattr(m, "_hirank_norms")]


@kinds
def test_d12_one_refresh_serves_all_layers_of_a_pass(kind, device):
    _, _, x = make(kind, device)
    layers = several(kind, device)
    for _ in range(2):  # the first pass learns the order
        for layer in layers:
            layer(x)
    group = layers[0]._hirank_norms["default"].members[torch.float32].group
    before = group.count
    for _ in range(2):
        for layer in layers:
            layer(x)
    assert group.count == before + 2


@kinds
def test_d19_a_fresh_adapter_has_a_gain_of_one(kind, device):
    """m was made by one launch, the norm by another: they agree to the bit."""
    model = wrapped(kind, device)
    layer = layer_of(model)
    _, _, x = make(kind, device)
    model(x)
    norm = layer._hirank_norms["default"].members[torch.float32].norm
    assert torch.equal(layer.lora_magnitude_vector["default"].weight.flatten(), norm)


@pytest.mark.gpu
@kinds
def test_the_hot_path_never_waits(kind, device):
    layers = several(kind, device)
    _, _, x = make(kind, device)
    for _ in range(2):
        for layer in layers:
            layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            for layer in layers:
                layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")

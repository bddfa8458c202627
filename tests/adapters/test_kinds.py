"""Conv1D, embeddings and convolutions: what must hold for every kind of layer.

The truth is the plain layer with the effective kernel m (W + s B A) / ||W + s B A||, in fp64.
"""

import copy
import pickle

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.utils.checkpoint import checkpoint

import hirank
from adapters.layer_kinds import (
    CONVS,
    EMBEDDINGS,
    KINDS,
    Holder,
    effective,
    parts_of,
    plain,
    reference,
)
from adapters.setups import layer_of, pair, perturb, stock, wrap
from hirank.adapters.gain import _sample
from hirank.adapters.peft.converted import Converted
from hirank.testing import FLOATS, assert_within_budget, outputs_and_gradients, relative_rms
from recorder import LiveBytes

HALVES = (torch.bfloat16, torch.float16)
STOCK = {name: kind for name, kind in KINDS.items() if kind.same_as_stock}
PLAIN = {name: kind for name, kind in KINDS.items() if "grouped" not in name}

pytestmark = pytest.mark.filterwarnings(
    "ignore:LoRA adapter added to ConvNd layer:UserWarning",
    "ignore:fan_in_fan_out is set to False:UserWarning",
)


def kinds(of=KINDS):
    return pytest.mark.parametrize("kind", of.values(), ids=of.keys())


def adapted(kind, dtype=torch.float32, **config):
    """A converted model off its initial values."""
    return perturb(wrap(kind.model(dtype), **config))


def gradients(model, x):
    """Output and gradients of a seeded projection of it."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = model(x)
    draw = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=draw).to(y))
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if x.is_floating_point():
        found["x"] = x.grad
    return {"out": y.detach(), **found}


def short_names(names):
    """Which of a model's parameters are A, B and m."""
    marks = {"A": "_A.", "B": "_B.", "m": "_magnitude"}
    return {key: name for name in names for key, mark in marks.items() if mark in name}


def close(ours, theirs, rtol=1e-5):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert relative_rms(ours[name], tensor) < rtol, name


@kinds()
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_it_is_the_plain_layer_with_the_effective_kernel(kind, dora):
    model, x = adapted(kind, use_dora=dora), kind.input()
    assert isinstance(layer_of(model), Converted)
    for training in (True, False):
        assert relative_rms(model.train(training)(x).detach(), reference(model, x)) < 1e-6
    with torch.no_grad():
        assert relative_rms(model(x), reference(model, x)) < 1e-6


@kinds(STOCK)
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["nodrop", "drop"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_outputs_and_gradients_equal_stock(kind, dora, dropout):
    theirs, ours = pair(kind.model(), use_dora=dora, lora_dropout=dropout)
    x, found = kind.input(), []
    for model in (ours, theirs):
        torch.manual_seed(5)  # the same dropout
        found.append(gradients(model.train(), x))
    close(*found)


@kinds(EMBEDDINGS | CONVS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_outputs_and_gradients_within_budget(kind, dtype, dora):
    model, x = adapted(kind, dtype, use_dora=dora), kind.input()
    layer = layer_of(model)
    given = dict(model.named_parameters())
    names = short_names(given)
    leaves = {key: given[name] for key, name in names.items()}
    if x.is_floating_point():
        leaves["x"] = x.to(dtype)

    def fresh(to=None):
        return {k: v.detach().to(to or v.dtype).clone().requires_grad_() for k, v in leaves.items()}

    def formula(wide):
        def call(x=x, A=None, B=None, m=None):
            return plain(parts_of(layer, dtype=wide)._replace(A=A, B=B, m=m), x)

        return call

    def ours(x=x, **found):
        return torch.func.functional_call(model, {names[k]: v for k, v in found.items()}, (x,))

    truth = outputs_and_gradients(formula(torch.float64), fresh(torch.float64))
    allowed = outputs_and_gradients(formula(dtype), fresh())
    got = outputs_and_gradients(ours, fresh())
    assert got["out"].dtype == dtype
    assert_within_budget(got, allowed, truth, dtype)


@kinds()
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_fresh_adapter_changes_no_bit(kind, dtype, training):
    base = kind.model(dtype)
    x = kind.input()
    x = x.to(dtype) if x.is_floating_point() else x
    before = base(x)
    model = wrap(base, lora_dropout=0.2).train(training)
    assert torch.equal(model(x), before)
    magnitude = layer_of(model).lora_magnitude_vector["default"].weight
    assert magnitude.dtype == torch.float32
    with hirank.patch_peft():
        made = stock(kind.model(dtype).train(training))
    assert isinstance(layer_of(made), Converted)
    assert torch.equal(made(x), layer_of(made).base_layer(x))


@kinds()
def test_patch_makes_what_accelerate_makes(kind):
    base = kind.model()
    torch.manual_seed(1)
    later = wrap(copy.deepcopy(base))
    torch.manual_seed(1)
    with hirank.patch_peft():
        made = stock(base)
    ours, theirs = made.state_dict(), later.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@kinds(PLAIN)
@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
def test_merge_and_unmerge(kind, safe):
    model, x = adapted(kind).eval(), kind.input()
    weight = layer_of(model).base_layer.weight
    before, y = weight.detach().clone(), model(x).detach()
    model.merge_adapter(safe_merge=safe)
    assert relative_rms(weight.detach(), effective_of_base(model, before)) < 1e-6
    assert relative_rms(model(x), y) < 1e-6
    model.unmerge_adapter()
    assert torch.equal(weight, before) and torch.equal(model(x), y)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(model(x), apply_base(model, x))
    assert torch.equal(model(x), y)  # disabling took the merge back


def effective_of_base(model, weight):
    parts = parts_of(layer_of(model))._replace(weight=weight.double())
    return effective(parts)


def apply_base(model, x):
    return layer_of(model).base_layer(x)


@kinds(PLAIN)
@pytest.mark.parametrize("order", [("default", "b"), ("b", "default")], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["dora+dora", "dora+lora"])
def test_two_adapters(kind, order, mixed):
    from peft import LoraConfig

    model = stock(kind.model())
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["lin"], use_dora=not mixed)
    model.add_adapter("b", config)
    hirank.accelerate(perturb(model)).eval()
    model.base_model.set_adapter(list(order))
    x = kind.input()
    y = model(x).detach()
    assert relative_rms(y, reference(model, x, order)) < 1e-6
    model.merge_adapter()
    assert relative_rms(model(x), y) < 1e-6
    model.unmerge_adapter()
    assert torch.equal(model(x), y)
    model.set_adapter("b")
    assert relative_rms(model(x).detach(), reference(model, x, ("b",))) < 1e-6


@kinds()
def test_grouped_or_not_a_merge_never_lies(kind):
    model, x = adapted(kind).eval(), kind.input()
    y = model(x).detach()
    try:
        merged = copy.deepcopy(model).merge_and_unload()
    except NotImplementedError as error:
        assert "groups > 1" in str(error) and kind.layer().groups > 1
    else:
        assert relative_rms(merged(x).detach(), y) < 1e-6


@kinds(STOCK)
def test_files_go_both_ways(kind, tmp_path):
    theirs, ours = pair(kind.model())
    x = kind.input()
    ours.save_pretrained(tmp_path / "ours"), theirs.save_pretrained(tmp_path / "theirs")
    base = theirs.base_model.unload()
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    assert relative_rms(loaded(x).detach(), ours(x).detach()) < 1e-6
    back = hirank.accelerate(PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "theirs"))
    assert torch.equal(back(x), ours.eval()(x))
    one, other = get_peft_model_state_dict(ours), get_peft_model_state_dict(back)
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@kinds()
def test_the_norm_is_computed_once_per_change_of_weights(kind):
    model, x = adapted(kind).train(), kind.input()
    norms = layer_of(model)._hirank_norms["default"]
    for _ in range(3):
        model(x).sum().backward()
    assert norms.computed == 1
    for change in (fused_step, data_write, new_scale):
        change(model)
        for _ in range(2):
            assert relative_rms(model(x).detach(), reference(model, x)) < 1e-6
    assert norms.computed == 4


def fused_step(model):
    params = [p for p in model.parameters() if p.requires_grad]
    torch.optim.AdamW(params, lr=0.05, fused=True).step()


def data_write(model):
    for name, p in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            p.data.add_(0.1 * torch.randn_like(p))


def new_scale(model):
    layer_of(model).set_scale("default", 1.7)


@kinds()
def test_a_changed_base_weight_is_noticed(kind):
    model, x = adapted(kind).eval(), kind.input()
    model(x)
    with torch.no_grad():
        layer_of(model).base_layer.weight.mul_(1.5)
    assert relative_rms(model(x).detach(), reference(model, x)) < 1e-6


@kinds()
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(kind, reentrant):
    model, x = adapted(kind, lora_dropout=0.2).train(), kind.input()
    if reentrant and not x.is_floating_point():
        return  # that way wants an input with gradients
    x = x.requires_grad_() if x.is_floating_point() else x
    found = []
    for run in (model, lambda t: checkpoint(model, t, use_reentrant=reentrant)):
        torch.manual_seed(3)
        y = run(x)
        y.square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert layer_of(model)._hirank_norms["default"].computed == 1


@kinds()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_what_the_base_gives(kind, dtype):
    model, x = adapted(kind, dtype), kind.input()
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype == layer_of(model).base_layer(x).dtype
        y.float().sum().backward()
    assert relative_rms(y.detach(), reference(model, x)) < 6 * 2.0**-9
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@kinds()
def test_copies_and_pickles(kind):
    model, x = adapted(kind), kind.input()
    y = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), y)
        data_write(twin)
        assert relative_rms(twin(x).detach(), reference(twin, x)) < 1e-6
    assert torch.equal(model(x), y)


@kinds()
def test_restore_gives_back_stock(kind):
    model = adapted(kind)
    twice = hirank.accelerate(model)
    assert twice is model
    hirank.restore(model)
    assert type(layer_of(model)).__module__.startswith("peft.")
    assert not [key for key in vars(layer_of(model)) if key.startswith("_hirank")]


@kinds()
def test_nothing_is_computed_on_the_meta_device(kind):
    with torch.device("meta"):
        base = kind.model()
    model = wrap(base)
    norms = layer_of(model)._hirank_norms["default"]
    x = kind.input().to("meta")
    assert model(x).device.type == "meta" and norms.computed == 0
    source = adapted(kind)
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    x = kind.input()
    assert torch.equal(model(x), source(x))


@kinds(STOCK)
def test_low_cpu_mem_usage(kind, tmp_path):
    model = adapted(kind)
    model.save_pretrained(tmp_path)
    base = kind.model()
    base.load_state_dict(layer_state(model))
    loaded = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=True)
    x = kind.input()
    assert torch.equal(hirank.accelerate(loaded)(x), model.eval()(x))


def layer_state(model):
    return {f"lin.{k}": v for k, v in layer_of(model).base_layer.state_dict().items()}


@kinds({k: v for k, v in PLAIN.items() if k not in ("Conv1D", "by-frequency")})
def test_double_backward(kind):
    model, x = adapted(kind, torch.float64).double(), kind.input()
    x = x.double().requires_grad_() if x.is_floating_point() else x
    params = [p for p in model.parameters() if p.requires_grad]
    wanted = [*params, x] if x.is_floating_point() else params

    def second(run):
        first = torch.autograd.grad(run().pow(3).sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    layer = layer_of(model)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    found = second(lambda: model(x))

    def formula():
        given = dict(zip(names, params, strict=True))
        leaves = {key: given[name] for key, name in short_names(names).items()}
        return plain(parts_of(layer)._replace(**leaves), x)

    for got, truth in zip(found, second(formula), strict=True):
        assert relative_rms(got, truth) < 1e-9


@kinds()
def test_a_frozen_magnitude_gets_no_gradient(kind):
    model, x = adapted(kind), kind.input()
    magnitude = layer_of(model).lora_magnitude_vector["default"].weight.requires_grad_(False)
    model(x).sum().backward()
    assert magnitude.grad is None


@kinds()
def test_disabled_adapters_leave_the_base(kind):
    model, x = adapted(kind), kind.input()
    with model.disable_adapter():
        assert torch.equal(model(x), apply_base(model, x))
        assert hirank.explain(model).rows[0].tier == "peft"


@kinds()
def test_explain_tells_the_way(kind):
    model = adapted(kind)
    row = hirank.explain(model).rows[0]
    assert row.kind == "dora" and row.tier in ("eager", "composed", "fused training")
    assert ("lookup" if kind in EMBEDDINGS.values() else "whole") in row.reason
    hirank.restore(model)
    assert "not converted: call hirank.accelerate" in hirank.explain(model).rows[0].reason


@kinds()
def test_state_dict_of_another_adapter_is_followed(kind):
    model, other, x = adapted(kind), perturb(stock(kind.model()), 0.2, seed=3), kind.input()
    model(x)
    set_peft_model_state_dict(model, get_peft_model_state_dict(other))
    assert relative_rms(model(x).detach(), reference(model, x)) < 1e-6


@kinds(EMBEDDINGS | CONVS)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiles_as_one_graph(kind):
    model, x = adapted(kind), kind.input()
    torch._dynamo.reset()
    expected = gradients(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = {name.removeprefix("_orig_mod."): g for name, g in gradients(compiled, x).items()}
    close(got, expected)
    data_write(model)
    assert relative_rms(compiled(x).detach(), reference(model, x)) < 1e-6


@pytest.mark.parametrize("kind", [EMBEDDINGS["Embedding"], CONVS["Conv2d"]])
def test_zero_rows_stay_finite_and_learn(kind):
    base = kind.model()
    with torch.no_grad():
        base.lin.weight[:, 3] = 0
        base.lin.weight[2] = 0
    model, x = wrap(base), kind.input()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.isfinite(g).all() for g in grads)
        optimizer.step()
    model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize(
    ("kind", "x", "words"),
    [
        ("Embedding", torch.randn(2, 3), "ids in torch.float32"),
        ("Embedding", torch.tensor([3, 40]), "from 3 to 40: they must be from 0 to 36"),
        ("Conv2d", torch.randn(2, 5, 7, 8), r"must be \[images, 4, ...\] with 2 dimensions"),
        ("Conv2d", torch.randn(2, 4, 7, 8).double(), "x in torch.float64"),
        ("Conv1D", torch.randn(2, 15), "the last dimension must be 16"),
    ],
)
def test_a_wrong_input_is_named(kind, x, words):
    with pytest.raises(hirank.HirankError, match="base_model.model.lin got .*" + words):
        adapted(KINDS[kind])(x)


def test_no_large_copies():
    """Nothing of the size of the base weight is made, in halves either (D47)."""
    model = perturb(wrap(Holder(nn.Embedding(4096, 64).bfloat16())))
    ids = torch.randint(0, 4096, (8,))
    with LiveBytes() as log:
        model(ids)
    assert log.peak < 4096 * 64 * 4
    assert model(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("turn", [False, True], ids=["rows", "columns"])
def test_the_sample_of_a_base_weight_meets_every_row_and_column(turn):
    rows = torch.arange(50257 * 4).view(50257, 4).float()
    table = (rows.T if turn else rows).contiguous()
    taken = _sample(table.T).long()
    assert len(set((taken % 4).tolist())) == 4
    assert len(set((taken // 4 % 64).tolist())) > 32

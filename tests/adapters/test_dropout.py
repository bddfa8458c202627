"""Case D17: dropout with a second base GEMM, as in PEFT, or with a single one. What each means."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hirank
from adapters.layer_kinds import Holder
from adapters.quantised_bases import base, inputs
from adapters.setups import Lin, layer_of, perturb, stock
from hirank.adapters.layers import Adapter, composed_forward, owned_forward
from hirank.kernels.dora_norm import dora_gain
from hirank.testing import (
    FLOATS,
    LinearCase,
    assert_within_budget,
    outputs_and_gradients,
    relative_rms,
)
from recorder import OpLog, SavedBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K, R = SHAPE = (48, 123, 65, 4)
SEMANTICS = pytest.mark.parametrize("single_gemm", [False, True], ids=["peft", "single-gemm"])


class Norms:
    """The norm by its definition, at every call; keeping it is another file's concern."""

    def norm(self, weight, A, B, scale, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        W, A, B = (tensor.detach().to(dtype).to(wide) for tensor in (weight, A, B))
        return (W + scale * B @ A).norm(dim=1)

    def at_hand(self, *asked):
        return self.norm(*asked), None


class Mask(nn.Module):
    """Dropout that drops the same entries every time."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.to(x)


@dataclass(frozen=True)
class Layer:
    """A linear and one adapter with dropout."""

    case: LinearCase
    dropout: nn.Module | None
    single_gemm: bool

    def __call__(self, x, lora_A, lora_B, magnitude=None, bias=None):
        case = self.case
        norms = None if magnitude is None else Norms()
        adapter = Adapter(
            lora_A, lora_B, magnitude, case.scale, self.dropout, norms, self.single_gemm
        )
        return composed_forward(
            x, lambda x: F.linear(x, case.weight, bias), case.weight, bias, [adapter]
        )

    def formula(self, x, lora_A, lora_B, magnitude=None, bias=None):
        """The definition, in the dtype of x."""
        weight, mask = self.case.weight.to(x), self.dropout.mask.to(x)
        frozen = x @ weight.T
        lora = self.case.scale * (x * mask) @ lora_A.T @ lora_B.T
        if magnitude is None:
            out = frozen + lora
        else:
            dense = weight.double() + self.case.scale * lora_B.double() @ lora_A.double()
            gain = dora_gain(magnitude, dense.detach().norm(dim=1).to(magnitude)).to(x)
            if self.single_gemm:
                out = gain * (frozen + lora)
            else:
                out = frozen + (gain - 1) * ((x * mask) @ weight.T) + gain * lora
        return out if bias is None else out + bias


def masked(dtype, single_gemm, *, share=0.4, lead=(M,), **made) -> Layer:
    case = LinearCase.make((M, N, K, R), **made).to(dtype, DEVICE)
    case = replace(case, x=case.x.reshape(*lead, K))
    keep = torch.rand(case.x.shape, generator=torch.Generator().manual_seed(3)) >= share
    return Layer(case, Mask(keep.to(DEVICE) / (1 - share)), single_gemm)


def check(layer: Layer, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = layer.case.leaves()
    exact = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    truth = outputs_and_gradients(layer.formula, exact)
    plain = outputs_and_gradients(layer.formula, layer.case.leaves())
    got = outputs_and_gradients(layer, leaves)
    assert got["out"].dtype == dtype
    assert_within_budget(got, plain, truth, dtype)
    return got


@SEMANTICS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_d17_a_fixed_mask_gives_the_formula_and_its_gradients(single_gemm, dtype, dora, bias):
    check(masked(dtype, single_gemm, dora=dora, bias=bias), dtype)


@SEMANTICS
@pytest.mark.parametrize("lead", [(4, 12), (2, 3, 8)], ids=str)
def test_any_number_of_leading_dimensions(single_gemm, lead):
    got = check(masked(torch.float32, single_gemm, lead=lead), torch.float32)
    assert got["out"].shape == (*lead, N) and got["dx"].shape == (*lead, K)


@SEMANTICS
@pytest.mark.parametrize("shape", [(K,), (0, K)], ids=["vector", "empty"])
def test_a_vector_and_nothing(single_gemm, shape):
    case = LinearCase.make(SHAPE).to(torch.float32, DEVICE)
    leaves = case.leaves() | {"x": torch.randn(shape, device=DEVICE, requires_grad=True)}
    layer = Layer(case, Mask(torch.ones(shape, device=DEVICE)), single_gemm)
    got = outputs_and_gradients(layer, leaves)
    assert got["out"].shape == (*shape[:-1], N)
    assert all(torch.isfinite(tensor).all() for tensor in got.values())


@SEMANTICS
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_d17_the_mean_of_many_masked_forwards_is_the_output_without_dropout(single_gemm, dora):
    case = LinearCase.make(SHAPE, dora=dora).to(torch.float32, DEVICE)
    leaves = {k: v.detach() for k, v in case.leaves().items()}
    x, norms = leaves.pop("x")[0], Norms() if dora else None
    adapter = Adapter(case.lora_A, case.lora_B, case.magnitude, case.scale, None, norms)
    evaluated = owned_forward(x, case.weight, case.bias, adapter)
    layer = Layer(case, nn.Dropout(0.1), single_gemm)
    many = layer(x.expand(20_000, K), **leaves)  # each row draws a mask of its own
    assert relative_rms(many.double().mean(0), evaluated) < 0.01
    assert many.std(0).min() > 0


@pytest.mark.parametrize(
    ("dropout", "single_gemm", "forward", "backward"),
    [(0.1, False, 2, 2), (0.1, True, 1, 1), (None, False, 1, 1), (None, True, 1, 1)],
    ids=["peft", "single-gemm", "no dropout", "no dropout, single-gemm"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_d17_products_of_base_size(dropout, single_gemm, forward, backward, bias):
    case = LinearCase.make(SHAPE, bias=bias).to(torch.float32, DEVICE)
    layer = Layer(case, None if dropout is None else nn.Dropout(dropout), single_gemm)
    leaves = case.leaves()
    with OpLog() as log:
        out = layer(**leaves)
    assert len(log.products(M, N, K)) == forward
    with OpLog() as log:
        torch.autograd.grad(out.sum(), list(leaves.values()))
    assert len(log.products(M, N, K)) == backward


@SEMANTICS
def test_the_two_ways_agree_without_dropout(single_gemm):
    case = LinearCase.make(SHAPE).to(torch.float64, DEVICE)
    leaves = {k: v.detach() for k, v in case.leaves().items()}
    nothing_dropped = Layer(case, nn.Dropout(0.0), single_gemm)
    torch.testing.assert_close(nothing_dropped(**leaves), Layer(case, None, single_gemm)(**leaves))


def test_d14_a_single_gemm_saves_one_output_more_than_lora():
    def saved(dora: bool) -> int:
        case = LinearCase.make(SHAPE, dora=dora).to(torch.bfloat16, DEVICE)
        leaves = case.leaves()
        own = [nn.Parameter(t.detach()) for t in (case.weight, *leaves.values())]
        module = nn.ParameterList(own)
        leaves = dict(zip(leaves, own[1:], strict=True))
        with SavedBytes(module) as bytes_:
            Layer(case, Mask(torch.ones(M, K, device=DEVICE)), True)(**leaves)
        return bytes_.total

    vectors = 2 * 4 * N  # the norm
    assert saved(dora=True) - saved(dora=False) <= 2 * M * N + vectors


def stack(case: LinearCase, x: Tensor, ways: list[tuple[bool, bool]]) -> list[Adapter]:
    mask = Mask((torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.3).to(x))
    return [
        Adapter(
            case.lora_A * (i + 1), case.lora_B, case.magnitude if dora else None, case.scale,
            mask, Norms() if dora else None, single_gemm,
        )
        for i, (dora, single_gemm) in enumerate(ways)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ways",
    [
        [(True, True), (True, True)],
        [(True, False), (True, True), (False, False)],
        [(False, True), (True, False), (True, True), (False, False)],
    ],
    ids=str,
)
def test_adapters_of_all_kinds_stack(ways):
    case = LinearCase.make(SHAPE).to(torch.float64, DEVICE)
    x, weight, bias = case.x.requires_grad_(), case.weight, case.bias.requires_grad_()
    adapters = stack(case, x, ways)
    out = composed_forward(x, lambda x: F.linear(x, weight, bias), weight, bias, adapters)
    y = x @ weight.T
    for adapter in adapters:
        dropped = adapter.dropout(x)
        lora = adapter.scale * dropped @ adapter.lora_A.T @ adapter.lora_B.T
        gain = torch.ones((), device=DEVICE)
        if adapter.magnitude is not None:
            full = weight + adapter.scale * adapter.lora_B @ adapter.lora_A
            gain = adapter.magnitude / full.norm(dim=1)
        frozen = y if adapter.single_gemm else dropped @ weight.T
        y = y + (gain - 1) * frozen + gain * lora
    torch.testing.assert_close(out, y + bias)
    dout = torch.randn_like(out)
    got, expected = (torch.autograd.grad(o, [x, bias], dout) for o in (out, y + bias))
    torch.testing.assert_close(got, expected)


@SEMANTICS
def test_under_autocast_the_layer_computes_in_half(single_gemm):
    layer = masked(torch.float32, single_gemm)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer(**layer.case.leaves())
    assert out.dtype == torch.bfloat16
    exact = {k: v.detach().double() for k, v in layer.case.leaves().items()}
    assert relative_rms(out.detach(), layer.formula(**exact)) < 2.0**-7


# PyTorch 2.13 warns about a line of its own compiler.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@SEMANTICS
def test_compiles_as_one_graph(single_gemm):
    layer = masked(torch.float32, single_gemm)
    expected = outputs_and_gradients(layer, layer.case.leaves())
    compiled = torch.compile(layer.__call__, fullgraph=True, backend="aot_eager")
    got = outputs_and_gradients(compiled, layer.case.leaves())
    torch.testing.assert_close(got, expected)


# In a model: when PEFT drops, we do.


def _conv():
    return Holder(nn.Conv2d(4, 6, 3, padding=1)), torch.randn(2, 4, 6, 6)


MODELS = {
    "linear": lambda: (Lin(24, 16), torch.randn(7, 24)),
    "conv": _conv,
    "nf4": lambda: (base("nf4"), inputs(7, 128)),
}


@pytest.mark.parametrize("modes", [(False, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_modes_of_layer_and_dropout_count_as_in_peft(kind, dora, modes):
    """Monte Carlo dropout: the dropout modules train, the layer does not."""
    layer, dropout = modes
    torch.manual_seed(0)
    made, x = MODELS[kind]()
    model = perturb(stock(made, use_dora=dora, lora_dropout=0.4))
    ours = hirank.accelerate(copy.deepcopy(model))
    found = []
    for each in (model, ours):
        outputs = []
        for order in ((False, False), (layer, dropout)):  # what is kept of a route must not stay
            each.train(order[0])
            for module in each.modules():
                if type(module) is nn.Dropout:
                    module.train(order[1])
            torch.manual_seed(1)
            outputs.append(each(x))
        found.append(outputs)
    for theirs, mine in zip(*found, strict=True):
        assert relative_rms(mine.detach(), theirs.detach()) < 2e-6
    dropped = dropout and (not dora or layer)
    assert torch.equal(*found[1]) is not dropped or (layer and dora)


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
@pytest.mark.parametrize("kind", MODELS)
def test_hooks_on_a_dropout_run(kind, dora):
    """PEFT calls LoRA's even where it drops nothing; so the layer is left to it, and says so."""
    made, x = MODELS[kind]()
    model = hirank.accelerate(perturb(stock(made, use_dora=dora)))
    before, calls = model(x), []
    handle = (
        layer_of(model).lora_dropout["default"].register_forward_hook(lambda *_: calls.append(1))
    )
    assert relative_rms(model(x).detach(), before.detach()) < 2e-6
    assert len(calls) == (0 if dora else 1)
    assert "the dropout of adapter 'default' has hooks" in str(hirank.explain(model))
    handle.remove()
    assert torch.equal(model(x), before)

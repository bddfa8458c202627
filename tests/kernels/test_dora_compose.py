"""Joining a frozen branch that somebody else computed with the low-rank branch.

Triton against fp64, on a GPU or in Triton's interpreter; on a plain CPU the op is the reference.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_norm import dora_gain
from hirank.testing import FLOATS, assert_within_budget, outputs_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(1, 64), (7, 123), (70, 600), (0, 64), (2, 3, 50, 96), (2, 9, 33), (12,)]
GPU_SHAPES = [(4096, 4096), (1000, 11008), (8191, 12288)]

USES = {
    "delta": {"base"},
    "added": {"base", "y"},
    "joined": set(),
    "joined beside a bias": {"bias"},
    "everything": {"base", "bias", "y"},
}


@dataclass(frozen=True)
class Case:
    """What wants a gradient, and the constants beside it."""

    leaves: dict[str, Tensor]
    norm: Tensor
    scale: float = 1.5

    def __getitem__(self, name: str) -> Tensor:
        return self.leaves[name]

    def but(self, **changed: Tensor) -> "Case":
        return replace(self, leaves=self.leaves | changed)

    def fresh(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        copies = {k: v.detach().to(dtype or v.dtype).clone() for k, v in self.leaves.items()}
        return {k: v.requires_grad_() for k, v in copies.items()}


def make(shape, dtype, given=("base", "y"), spread=0.2) -> Case:
    draw = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    wide = torch.promote_types(dtype, torch.float32)
    norm = (normal(shape[-1]).abs() + 0.5).to(wide)
    magnitude = (norm.double() * (1 + spread * normal(shape[-1]))).to(wide)
    tensors = {
        "base": normal(*shape),
        "lora": normal(*shape),
        "bias": normal(shape[-1]),
        "y": normal(*shape),
    }
    chosen = {k: v.to(dtype) for k, v in tensors.items() if k == "lora" or k in given}
    leaves = {k: v.to(DEVICE) for k, v in {**chosen, "magnitude": magnitude}.items()}
    return Case(leaves, norm.to(DEVICE))


def ours(case: Case):
    def call(lora, magnitude, base=None, bias=None, y=None):
        return dora_compose(base, lora, magnitude, case.norm, scale=case.scale, bias=bias, y=y)

    return call


def formula(case: Case, wide: torch.dtype):
    """The definition in `wide`, rounded to the dtype of the inputs once."""

    def call(lora, magnitude, base=None, bias=None, y=None):
        gain = dora_gain(magnitude.to(wide), case.norm.to(wide))
        out = gain * case.scale * lora.to(wide)
        if base is not None:
            out = out + (gain - 1) * base.to(wide)
        if bias is not None:
            out = out - (gain - 1) * bias.to(wide)
        return (out if y is None else out + y.to(wide)).to(lora.dtype)

    return call


def check(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    truth = outputs_and_gradients(formula(case, torch.float64), case.fresh(torch.float64))
    plain = outputs_and_gradients(formula(case, case.norm.dtype), case.fresh())
    got = outputs_and_gradients(ours(case), case.fresh())
    assert all(got[name].dtype == plain[name].dtype for name in plain)
    assert_within_budget(got, plain, truth, dtype)
    return got


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_output_and_gradients_within_budget(shape, dtype, use):
    got = check(make(shape, dtype, USES[use]), dtype)
    assert got["out"].dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["added", "joined beside a bias"])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_large_within_budget(shape, dtype, use):
    check(make(shape, dtype, USES[use]), dtype)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_gains_of_zero_and_norms_of_zero(dtype):
    case = make((70, 123), dtype, USES["everything"])
    case["magnitude"][3], case["magnitude"][40], case.norm[77] = 0, 1e-7, 0
    got = check(case, dtype)
    # g = 0: nothing reaches the branch, but m can still learn. norm = 0: g = 1, m is not in play
    assert (got["dlora"][:, 3] == 0).all() and got["dmagnitude"][3].abs() > 1e-3
    assert (got["dbase"][:, 77] == 0).all() and got["dmagnitude"][77] == 0


@pytest.mark.parametrize("use", ["added", "joined"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_activations(dtype, use):
    case = make((33, 64), dtype, USES[use])
    large = {name: case[name] * 1e4 for name in ("lora", "base", "y") if name in case.leaves}
    small = case.but(magnitude=case["magnitude"] * 0.5, **large)  # y + ... stays below fp16's end
    got = check(small, dtype)
    assert all(torch.isfinite(tensor).all() for tensor in got.values())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gain_of_one_leaves_the_scaled_branch(dtype):
    case = make((9, 32), dtype, ["base"])
    at_one = case.but(magnitude=case.norm.clone())
    expected = (case.scale * case["lora"].to(case.norm.dtype)).to(torch.float64)
    got = ours(at_one)(**at_one.leaves).double()
    error = (got - expected).abs().max() / expected.abs().max()
    assert error <= {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 0)


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gain_of_one_changes_no_bit_of_joined_branches(dtype, bias):
    case = replace(make((33, 64), dtype, ["bias"] if bias else []), scale=1.0)
    at_one = case.but(magnitude=case.norm.clone())
    assert torch.equal(ours(at_one)(**at_one.leaves), case["lora"])


def test_corrections_below_bf16_resolution_survive():
    """|g - 1| < 2^-9: rounding g to bf16 first, as the naive form does, loses them entirely."""
    case = make((64, 128), torch.bfloat16, ["base"], spread=2.0**-12)
    case = case.but(lora=torch.zeros_like(case["lora"]))
    gain = dora_gain(case["magnitude"].double(), case.norm.double())
    assert (gain - 1).abs().max() < 2.0**-9
    exact = (gain - 1) * case["base"].double()
    naive = (gain.bfloat16() - 1) * case["base"]
    assert (ours(case)(**case.leaves).double() - exact).norm() / exact.norm() < 2.0**-8
    assert (naive.double() - exact).norm() / exact.norm() > 0.9


def test_their_gradients_survive_too():
    case = make((64, 128), torch.bfloat16, ["base"], spread=2.0**-12)
    leaves, dout = case.fresh(), case["base"].flip(0)
    (dbase,) = torch.autograd.grad(ours(case)(**leaves), leaves["base"], dout)
    exact = (dora_gain(case["magnitude"].double(), case.norm.double()) - 1) * dout.double()
    assert (dbase.double() - exact).norm() / exact.norm() < 2.0**-8


@pytest.mark.parametrize("use", USES)
def test_gradients_of_gradients(use):
    case = make((3, 8), torch.float64, USES[use])
    names = list(case.leaves)

    def call(*values):
        return ours(case)(**dict(zip(names, values, strict=True)))

    assert torch.autograd.gradgradcheck(call, tuple(case.fresh().values()))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_strided_inputs(dtype):
    case = make((8, 24), dtype, USES["everything"])
    strided = {k: v.repeat_interleave(2, -1)[..., ::2] for k, v in case.leaves.items()}
    strided["y"] = torch.cat([case["y"], case["y"]], 1)[:, :24]
    strided["base"] = case["base"].T.contiguous().T
    strided = case.but(**strided)
    assert not any(tensor.is_contiguous() for tensor in strided.leaves.values())
    got = check(strided, dtype)
    assert torch.equal(got["out"], ours(case)(**case.leaves))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("layout", ["columns", "rows", "expanded"])
def test_strided_gradients(layout, dtype):
    case = make((70, 240), dtype, USES["everything"])
    wide = torch.randn(70, 480, device=DEVICE, dtype=dtype)
    one = wide[:1, :240]
    dout = {"columns": wide[:, ::2], "rows": wide[:, :240], "expanded": one.expand(70, 240)}

    def run(function, leaves, dout):
        grads = torch.autograd.grad(function(**leaves), list(leaves.values()), dout)
        return dict(zip(leaves, grads, strict=True))

    truth = run(
        formula(case, torch.float64), case.fresh(torch.float64), dout[layout].double().contiguous()
    )
    plain = run(formula(case, torch.float32), case.fresh(), dout[layout].contiguous())
    assert_within_budget(run(ours(case), case.fresh(), dout[layout]), plain, truth, dtype)


@pytest.mark.parametrize("wanted", ["base", "lora", "magnitude", "bias", "y"])
def test_each_gradient_alone_is_the_same(wanted):
    case = make((70, 123), torch.float32, USES["everything"])
    everything = outputs_and_gradients(ours(case), case.fresh())
    leaves = {k: v.requires_grad_(k == wanted) for k, v in case.fresh().items()}
    dout = torch.randn(70, 123, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (alone,) = torch.autograd.grad(ours(case)(**leaves), leaves[wanted], dout.to(leaves["y"]))
    assert torch.equal(alone, everything[f"d{wanted}"])


def test_nothing_of_the_outputs_size_is_saved_with_a_frozen_magnitude():
    saved = []
    case = make((70, 123), torch.float32)
    leaves = {k: v.requires_grad_(k != "magnitude") for k, v in case.fresh().items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(case)(**leaves)
    assert all(tensor.numel() <= 123 for tensor in saved)


def test_two_runs_agree_bit_for_bit():
    case = make((70, 300), torch.bfloat16, USES["everything"])
    first, second = (outputs_and_gradients(ours(case), case.fresh()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_half_magnitude_gets_its_gradient_in_half():
    case = make((7, 40), torch.bfloat16)
    case = case.but(magnitude=case["magnitude"].bfloat16())
    check(case, torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("use", USES)
def test_opcheck(dtype, use):
    case = make((7, 40), dtype, USES[use])
    base, bias, y = (case.leaves.get(name) for name in ("base", "bias", "y"))
    lora, magnitude = case["lora"], case["magnitude"]
    ops = torch.ops.hirank
    torch.library.opcheck(
        ops.dora_compose_fwd.default, (base, lora, magnitude, case.norm, bias, y, 1.5)
    )
    for needs in ((True, True, True), (False, True, False), (False, False, True)):
        args = (lora, base, lora, magnitude, case.norm, bias, 1.5, *needs)
        torch.library.opcheck(ops.dora_compose_bwd.default, args)


# PyTorch 2.13 warns about a line of its own compiler.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_compiles_as_one_graph(use):
    case = make((7, 40), torch.float32, USES[use])
    expected = outputs_and_gradients(ours(case), case.fresh())
    compiled = torch.compile(ours(case), fullgraph=True, backend="aot_eager")
    got = outputs_and_gradients(compiled, case.fresh())
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"base": lambda t: t.bfloat16()}, "y, base and lora must agree"),
        ({"y": lambda t: t[:3]}, "y, base and lora must agree"),
        ({"magnitude": lambda t: t[:3]}, "magnitude must have one entry per last dimension, 24"),
        ({"bias": lambda t: t[None]}, "bias must have one entry per last dimension, 24"),
    ],
)
def test_inputs_that_do_not_fit_are_named(changed, sentence):
    case = make((8, 24), torch.float32, USES["everything"])
    wrong = case.but(**{name: change(case[name]) for name, change in changed.items()})
    with pytest.raises(ValueError, match=sentence):
        ours(wrong)(**wrong.leaves)

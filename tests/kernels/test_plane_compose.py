"""Joining DoRA's branches with channels before positions, against fp64 and against dora_compose."""

import pytest
import torch

from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_norm import dora_gain
from hirank.kernels.plane_compose import plane_compose
from hirank.testing import FLOATS, assert_within_budget, outputs_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 4, 16), (2, 5, 33), (3, 7, 1), (0, 4, 9)]
# several tiles and spans a plane; many channels, as of a few sums of dm an error says little
LONG = [(2, 24, 700), (1, 24, 4200)]
USES = {
    "delta": {"base"},
    "added": {"base", "y"},
    "joined": set(),
    "joined beside a bias": {"bias"},
    "everything": {"base", "bias", "y"},
}
SCALE = 1.5


def make(shape, dtype, given):
    draw = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    wide = torch.promote_types(dtype, torch.float32)
    channels = shape[1]
    norm = (normal(channels).abs() + 0.5).to(wide)
    magnitude = (norm.double() * (1 + 0.2 * normal(channels))).to(wide)
    tensors = {"base": normal(*shape), "bias": normal(channels), "y": normal(*shape)}
    chosen = {k: v.to(dtype) for k, v in tensors.items() if k in given}
    leaves = {"lora": normal(*shape).to(dtype), "magnitude": magnitude, **chosen}
    return {k: v.to(DEVICE) for k, v in leaves.items()}, norm.to(DEVICE)


def fresh(leaves, dtype=None):
    copies = {k: v.detach().to(dtype or v.dtype).clone() for k, v in leaves.items()}
    return {k: v.requires_grad_() for k, v in copies.items()}


def ours(norm, backend="auto"):
    def call(lora, magnitude, base=None, bias=None, y=None):
        return plane_compose(
            base, lora, magnitude, norm, scale=SCALE, bias=bias, y=y, backend=backend
        )

    return call


def formula(norm, wide):
    """The definition in `wide`, rounded to the dtype of the inputs once."""

    def call(lora, magnitude, base=None, bias=None, y=None):
        gain = dora_gain(magnitude.to(wide), norm.to(wide))[:, None]
        out = gain * SCALE * lora.to(wide)
        if base is not None:
            out = out + (gain - 1) * base.to(wide)
        if bias is not None:
            out = out - (gain - 1) * bias.to(wide)[:, None]
        return (out if y is None else out + y.to(wide)).to(lora.dtype)

    return call


def check(leaves, norm, dtype, backend="auto"):
    truth = outputs_and_gradients(formula(norm, torch.float64), fresh(leaves, torch.float64))
    plain = outputs_and_gradients(formula(norm, norm.dtype), fresh(leaves))
    got = outputs_and_gradients(ours(norm, backend), fresh(leaves))
    assert all(got[name].dtype == plain[name].dtype for name in plain)
    assert_within_budget(got, plain, truth, dtype)
    return got


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_output_and_gradients_within_budget(shape, dtype, use):
    got = check(*make(shape, dtype, USES[use]), dtype)
    assert got["out"].dtype == dtype


@pytest.mark.parametrize("use", ["everything", "joined"])  # all that a kernel may read, and least
@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_planes_within_budget(shape, dtype, use):
    check(*make(shape, dtype, USES[use]), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["added", "joined beside a bias"])
@pytest.mark.parametrize("shape", [(4, 320, 4096), (2, 1280, 64), (1, 96, 100003)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_large_within_budget(shape, dtype, use):
    check(*make(shape, dtype, USES[use]), dtype)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_gains_of_zero_and_norms_of_zero(dtype, backend):
    leaves, norm = make((2, 9, 123), dtype, USES["everything"])
    leaves["magnitude"][3], leaves["magnitude"][4], norm[7] = 0, 1e-7, 0
    got = check(leaves, norm, dtype, backend)
    # g = 0: nothing reaches the branch, but m can still learn. norm = 0: g = 1, m is not in play
    assert (got["dlora"][:, 3] == 0).all() and got["dmagnitude"][3].abs() > 1e-3
    assert (got["dbase"][:, 7] == 0).all() and got["dmagnitude"][7] == 0


@pytest.mark.parametrize("use", USES)
def test_it_is_dora_compose_with_channels_last(use):
    leaves, norm = make((2, 5, 33), torch.float32, USES[use])
    planes = ours(norm)(**leaves)
    rows = {k: v.transpose(1, 2) if v.dim() == 3 else v for k, v in leaves.items()}
    other = dora_compose(
        rows.get("base"), rows["lora"], rows["magnitude"], norm,
        scale=SCALE, bias=rows.get("bias"), y=rows.get("y"),
    )  # fmt: skip
    torch.testing.assert_close(planes, other.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gain_of_one_changes_no_bit_of_joined_branches(dtype, bias):
    leaves, norm = make((3, 4, 64), dtype, {"bias"} if bias else set())
    out = plane_compose(None, leaves["lora"], norm.clone(), norm, scale=1, bias=leaves.get("bias"))
    assert torch.equal(out, leaves["lora"])


def test_strided_planes():
    leaves, norm = make((4, 6, 30), torch.float32, {"base", "y"})
    strided = {
        k: v.transpose(0, 2).contiguous().transpose(0, 2) if v.dim() == 3 else v
        for k, v in leaves.items()
    }
    assert torch.equal(ours(norm)(**strided), ours(norm)(**leaves))


def test_two_runs_agree_bitwise():
    leaves, norm = make((2, 3, 9000), torch.bfloat16, USES["everything"])
    runs = [outputs_and_gradients(ours(norm), fresh(leaves)) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_double_backward():
    leaves, norm = make((1, 2, 3), torch.float64, USES["everything"])
    names = list(leaves)
    given = tuple(fresh(leaves).values())
    torch.autograd.gradgradcheck(
        lambda *tensors: ours(norm)(**dict(zip(names, tensors, strict=True))), given
    )


@pytest.mark.parametrize("use", USES)
def test_opcheck(use):
    leaves, norm = make((2, 3, 40), torch.float32, USES[use])
    base, lora, bias, y = (leaves.get(name) for name in ("base", "lora", "bias", "y"))
    args = (base, lora, leaves["magnitude"], norm, bias)
    torch.library.opcheck(torch.ops.hirank.plane_compose_fwd.default, (*args, y, SCALE))
    for needs in ((True, True, True), (False, True, False), (False, False, True)):
        back = (lora, *args, SCALE, *needs)
        torch.library.opcheck(torch.ops.hirank.plane_compose_bwd.default, back)


def test_nothing_is_saved_for_a_frozen_magnitude():
    leaves, norm = make((2, 3, 40), torch.float32, {"base"})
    lora = leaves["lora"].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        plane_compose(leaves["base"], lora, leaves["magnitude"], norm, scale=SCALE)
    assert all(t.numel() <= 3 for t in saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": torch.zeros(3, 4)}, "must be"),
        ({"base": torch.zeros(2, 3, 5)}, "must agree"),
        ({"magnitude": torch.ones(4)}, "one entry"),
    ],
)
def test_wrong_shapes_are_named(change, words):
    given = {
        "base": None,
        "lora": torch.zeros(2, 3, 4),
        "magnitude": torch.ones(3),
        "norm": torch.ones(3),
    }
    given |= change
    with pytest.raises(ValueError, match=words):
        plane_compose(**given, scale=1)

"""Reported failures of other GaLores that have no test beside the part they belong to."""

import pytest
import torch
from torch import nn

from hirank import GaLoreAdamW
from hirank.bench.optim_memory import LivePeak
from hirank.optim import bases, costs
from hirank.optim.hyper import Hyper
from hirank.plan.closed import closed_form
from hirank.plan.find import find_shape
from hirank.plan.inventory import Shape
from hirank.plan.ledger import Ledger
from hirank.plan.setting import Setting
from optim.toys import GL, grads, parameter, run

HP = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LLAMA = [(256, 256), (128, 256), (688, 256), (256, 688)]


def linears(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128, bias=bias) for _ in range(6)])


def gradient_bytes_at_once(model: nn.Module, optimizer: GaLoreAdamW, in_backward: bool) -> int:
    """The most there ever were in a step, waiting ones included."""
    seen: list[int] = []
    engine = None

    def look(_: torch.Tensor) -> None:
        held = (p.grad for p in model.parameters() if p.grad is not None)
        waiting = engine.waiting_bytes() if engine else 0
        seen.append(sum(g.numel() * g.element_size() for g in held) + waiting)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)  # sees a gradient before the engine takes it
    if in_backward:
        engine = optimizer.step_in_backward()
    model(torch.randn(2, 128)).square().mean().backward()
    optimizer.step()
    return max(seen)


@pytest.mark.parametrize("in_backward", [False, True])
def test_g20_projecting_makes_no_gradient_smaller_and_stepping_in_backward_does(in_backward: bool):
    model = linears()
    optimizer = GaLoreAdamW(model, rank=4)
    full, largest = 6 * 128 * 128 * 4, 128 * 128 * 4
    assert optimizer.gradient_cost() == full
    assert optimizer.gradient_cost(in_backward=True) == largest
    found = gradient_bytes_at_once(model, optimizer, in_backward)
    assert found == (largest if in_backward else full)


def test_g20_small_gradients_that_wait_are_counted():
    model = linears(bias=True)
    optimizer = GaLoreAdamW(model, rank=4)
    most = optimizer.gradient_cost(in_backward=True)
    assert most == (128 * 128 + 6 * 128) * 4
    assert gradient_bytes_at_once(model, optimizer, True) <= most


def test_g17_no_buffer_of_all_gradients_lives_in_a_step():
    """In bytes that live, whoever holds them."""
    peaks, one = [], 128 * 128 * 4
    for in_backward in (False, True):
        model = linears()
        optimizer = GaLoreAdamW(model, rank=4)
        if in_backward:
            optimizer.step_in_backward()
        for _ in range(2):  # the second one has its state already, and refreshes nothing
            with LivePeak() as live:
                model(torch.randn(2, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(live.peak)
    assert peaks[0] > 6 * one > 3 * one > peaks[1]


def planned(method: str, **more) -> tuple[Ledger, Shape]:
    """`hirank plan` of an 8B in bf16."""
    shape = find_shape("qwen3-8b")
    setting = Setting(model="qwen3-8b", method=method, **({"autocast": False} | more))
    return closed_form(setting, shape), shape


def bytes_of(ledger: Ledger, kind: str) -> int:
    """At most, whole blocks of the allocator and all."""
    return max(kinds.get(kind, 0) for kinds in ledger.phases.values())


def test_g17_the_plan_shows_the_buckets_of_ddp():
    """As large as all gradients, beside the gradients."""
    one, shape = planned("galore", rank=128)
    two, _ = planned("galore", rank=128, sharding="ddp", world=2)
    every = pytest.approx(2 * shape.parameters, rel=1e-3)
    assert bytes_of(one, "gradients") == every
    assert two.allocated - one.allocated == every


@pytest.mark.parametrize("rank", [128, 1024])
def test_g19_the_plan_says_before_the_run_what_the_state_takes(rank: int):
    ledger, shape = planned("galore", rank=rank)
    groups = [torch.empty(x.out, x.inp, device="meta") for x in shape.linears]
    hyper = Hyper(rank=rank)
    each = [costs.cost(tuple(w.shape), hyper) for w in groups]
    projected = sum(x.count * size for x, size in zip(shape.linears, each, strict=True))
    plain = shape.parameters - sum(x.size for x in shape.linears)
    assert bytes_of(ledger, "optimizer state") == projected + 2 * 4 * plain
    adamw, _ = planned("full", state_dtype="int8")
    state = [bytes_of(one, "optimizer state") for one in (ledger, adamw)]
    assert (state[0] < state[1]) == (rank == 128)


def test_g20_the_plan_has_a_line_for_gradients_in_either_mode():
    p, shape = planned("galore", rank=128)
    q, _ = planned("galore", rank=128, step_in_backward=True)
    largest = shape.vocabulary * shape.hidden
    small = sum(x.size for x in shape.matrices() if x.each < costs.SMALL)
    full, waiting = (one.phases["optimizer step"]["gradients"] for one in (p, q))
    assert full == pytest.approx(2 * shape.parameters, rel=1e-3)
    assert waiting == pytest.approx(2 * (largest + small), rel=1e-3)


@pytest.mark.parametrize(
    ("rank", "options", "below"),
    [(16, {}, True), (128, {}, False), (128, {"state": "int8", "basis_store": "int4"}, True)],
    ids=str,
)
def test_g19_a_state_that_saves_nothing_says_so(rank: int, options: dict, below: bool):
    params = [parameter(*shape) for shape in LLAMA]
    optimizer = GaLoreAdamW(params, rank=rank, **options)
    rival = sum(2 * m * n * 8.125 / 8 for m, n in LLAMA)
    assert optimizer.adamw_8bit_cost() == rival
    assert (optimizer.cost() < rival) == below
    assert ("of 8-bit AdamW; a smaller rank" in optimizer.describe()) == (not below)


@pytest.mark.parametrize("in_backward", [False, True])
def test_g21_unprojected_parameters_are_torchs_adamw_in_either_mode(in_backward: bool):
    ours, theirs = (nn.Sequential(nn.Embedding(150, 32), nn.LayerNorm(32)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    a = GaLoreAdamW([{"params": list(ours.parameters())}], **HP)
    b = torch.optim.AdamW(theirs.parameters(), **HP)
    if in_backward:
        a.step_in_backward()
    tokens = torch.arange(150)
    for _ in range(10):
        for model, optimizer in ((ours, a), (theirs, b)):
            model(tokens).pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["std", "reverse_std", "left", "right", "full"])
@pytest.mark.parametrize("shape", [(48, 48), (48, 80), (80, 48)], ids=str)
def test_gb2_what_is_projected_back_has_the_gradients_shape(shape: tuple[int, int], kind: str):
    w, (g,) = parameter(*shape), grads(1, *shape)
    optimizer = GaLoreAdamW([{"params": [w], "rank": 8, "proj_type": kind}])
    run(optimizer, w, [g])
    hyper = optimizer.hyper_of(w)
    basis = bases.load(optimizer.state[w], bases.layout(shape, hyper), hyper, g)
    left, right = basis.factors(basis.project(g))
    assert (left @ right).shape == g.shape


def test_gb3_more_than_two_axes_train_and_their_bases_are_replaced():
    w = parameter(8, 4, 3, 3)
    optimizer = GaLoreAdamW([{"params": [w], **GL, "update_proj_gap": 3}])
    kept = []
    for g in grads(4, 8, 4, 3, 3):
        run(optimizer, w, [g])
        kept.append(optimizer.state[w]["left"].clone())
    assert torch.equal(kept[0], kept[2]) and not torch.equal(kept[0], kept[3])
    moved = []
    for sign in (1, -1):  # what comes back is Adam's direction, not the gradient
        v = parameter(8, 4, 3, 3)
        run(GaLoreAdamW([{"params": [v], **GL}], betas=(0.0, 0.0)), v, [sign * g])
        moved.append(v.detach() - parameter(8, 4, 3, 3))
    assert torch.allclose(moved[0], -moved[1], atol=1e-6)
    basis, rows = kept[0], grads(1, 8, 4, 3, 3)[0].view(8, 36)
    direction = basis @ (basis.T @ rows).sign()
    first = nn.Parameter(torch.zeros(8, 4, 3, 3))
    run(GaLoreAdamW([{"params": [first], **GL}], lr=1.0), first, grads(1, 8, 4, 3, 3))
    torch.testing.assert_close(first.detach().view(8, 36), -direction, atol=1e-4, rtol=1e-4)


def test_an_optimiser_of_parameters_that_are_not_the_models_says_so_once(caplog):
    """Built before fully_shard, or before another library exchanged the parameters."""
    optimizer = GaLoreAdamW([parameter(8, 12), parameter(5)], rank=2)
    for _ in range(2):
        optimizer.step()
    assert caplog.text.count("no parameter of the optimiser has a gradient") == 1

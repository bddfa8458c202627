"""All norms in a few launches: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import pytest
import torch

from hirank.kernels import _norm_layout, norm_table
from hirank.kernels._norm_tuning import HALF_SMALL, SCRATCH_BYTES
from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.dora_norm import dora_norm, row_norm, row_square_sum
from hirank.kernels.norm_table import NormEntry, NormTable

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXES = [
    # of W, of A and B; they multiply in W's
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
HALVES = MIXES[1:]
# more rows, columns and ranks than a tile; more columns than a program takes; all of them odd
SIZES = [(70, 123, 5), (130, 65, 140), (1, 16, 1), (9, 1100, 3)]
EVEN_SIZES = [(128, 256, 64), (200, 1288, 72), (1, 8, 8)]
RANKS = [1, 2, 15, 16, 63, 64, 65, 384, 1024]
GPU_SIZES = [(4096, 12288, 384), (12288, 4096, 384), (1024, 4096, 384), (1000, 4096, 1024),
             (4095, 4100, 383), (12288, 4096, 16)]  # fmt: skip


def make_entries(mix, sizes, scale=1.5, seed=0):
    w_type, ab_type = mix
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=draw, device=DEVICE)

    return [
        NormEntry(
            normal(n, k).to(w_type),
            (normal(r, k) / 4).to(ab_type),
            (normal(n, r) / r**0.5).to(ab_type),
            scale,
            torch.full((n,), torch.nan, device=DEVICE),
        )
        for n, k, r in sizes
    ]


def cast(tensor, dtype):
    """As the kernels cast it: rounded, but that the interpreter rounds to bf16 towards zero."""
    if interpreting() and dtype == torch.bfloat16 and tensor.dtype == torch.float32:
        return (tensor.view(torch.int32) & -65536).view(torch.float32)
    return tensor.to(dtype)


def exact_norm(entry, dtype):
    A, B = (cast(t, dtype).double() for t in (entry.lora_A, entry.lora_B))
    return (entry.weight.double() + entry.scale * B @ A).norm(dim=1)


def assert_right(entries, dtype):
    for entry in entries:
        exact = exact_norm(entry, dtype)
        torch.testing.assert_close(entry.norm.double(), exact, rtol=2e-6, atol=0)


def root(squares):
    """Correctly rounded, as on a GPU; PyTorch's own on a CPU is not."""
    return squares.sqrt() if squares.is_cuda else squares.double().sqrt().float()


def make_table(entries, dtype):
    made = NormTable(entries, dtype)
    made.refresh(force=True)
    return made


@pytest.mark.parametrize("sizes", [SIZES, EVEN_SIZES], ids=["odd", "even"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_equals_the_definition(mix, sizes):
    entries = make_entries(mix, sizes)
    made = make_table(entries, mix[0])
    assert_right(entries, mix[0])
    assert made.computed.tolist() == [1] * len(sizes)


def turned(entries):
    """The same with weights that lie as [K, N], as those of embeddings."""
    return [e._replace(weight=e.weight.t().contiguous().t()) for e in entries]


@pytest.mark.parametrize("sizes", [SIZES, EVEN_SIZES], ids=["odd", "even"])
@pytest.mark.parametrize("mix", [MIXES[0], *HALVES[1:3]], ids=str)
def test_weights_that_lie_turned(mix, sizes):
    entries = turned(make_entries(mix, [size for size in sizes if size[0] > 1]))
    made = make_table(entries, mix[0])
    assert_right(entries, mix[0])
    made.refresh()
    entries[0].weight[0, 0] += 64  # one of the sample
    made.refresh()
    assert_right(entries, mix[0])
    assert made.computed.tolist() == [2] + [1] * (len(entries) - 1)


@pytest.mark.parametrize("sizes", [SIZES[:2], EVEN_SIZES[:1]], ids=["odd", "even"])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[2]], ids=str)
def test_turned_weights_without_adapter_have_the_bits_of_their_own_norm(mix, sizes):
    entries = turned(make_entries(mix, sizes))
    for entry in entries:
        entry.lora_B.zero_()
    make_table(entries, mix[0])
    for entry in entries:
        assert torch.equal(row_norm(entry.weight), entry.norm)
        exact = entry.weight.double().norm(dim=1)
        torch.testing.assert_close(entry.norm.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("mix", HALVES, ids=str)
def test_the_tile_of_smaller_gpus_equals_the_definition(mix, monkeypatch):
    monkeypatch.setattr(norm_table, "norm_tile", lambda *_: HALF_SMALL)
    entries = make_entries(mix, SIZES + EVEN_SIZES)
    make_table(entries, mix[0])
    assert_right(entries, mix[0])


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[2], MIXES[3]], ids=str)
def test_every_rank(mix):
    entries = make_entries(mix, [(33, 72, r) for r in RANKS])
    make_table(entries, mix[0])
    assert_right(entries, mix[0])


def test_weights_and_products_of_different_width():
    """A base in fp32 under a half-precision forward: W is taken as it is stored."""
    entries = make_entries((torch.float32, torch.float32), SIZES + EVEN_SIZES)
    make_table(entries, torch.float16)
    assert_right(entries, torch.float16)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e-3])
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[4]], ids=str)
def test_any_scale(mix, scale):
    entries = make_entries(mix, SIZES, scale=scale)
    make_table(entries, mix[0])
    assert_right(entries, mix[0])


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_exact_cancellation_and_zero_rows_give_zero(mix):
    (entry,) = make_entries(mix, [(40, 64, 16)], scale=-0.5)
    entry.lora_A.copy_(torch.randint(-4, 5, entry.lora_A.shape))
    entry.lora_B.copy_(torch.randint(-4, 5, entry.lora_B.shape))
    entry.weight.copy_(0.5 * entry.lora_B.double() @ entry.lora_A.double())
    entry.weight[7], entry.lora_B[7] = 0, 0
    make_table([entry], mix[0])
    assert entry.norm.tolist() == [0.0] * 40


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_cancelling_rows_lose_nothing(mix):
    """W within a rounding of -s B A: the factored sums would lose ten bits and more."""
    (entry,) = make_entries(mix, [(40, 256, 16)])
    A, B = (cast(t, mix[0]).double() for t in (entry.lora_A, entry.lora_B))
    entry.weight[::3] = ((-entry.scale * (1 + 2.0**-9) * B @ A)[::3]).to(mix[0])
    make_table([entry], mix[0])
    torch.testing.assert_close(entry.norm.double(), exact_norm(entry, mix[0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_d10_where_the_factored_sums_are_ten_per_cent_off(dtype):
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(16, 1024, generator=draw, dtype=torch.float64).to(DEVICE, dtype)
    B = torch.randn(256, 16, generator=draw, dtype=torch.float64).to(DEVICE, dtype)
    noise = torch.randn(256, 1024, generator=draw, dtype=torch.float64).to(DEVICE)
    for weight, tight in ((1e-3 * noise - 2 * B.double() @ A.double(), 1e-3), (noise, 1e-5)):
        entry = NormEntry(weight.bfloat16().to(dtype), A, B, 2.0, torch.empty(256, device=DEVICE))
        make_table([entry], dtype)
        torch.testing.assert_close(
            entry.norm.double(), exact_norm(entry, dtype), rtol=tight, atol=0
        )


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[2], MIXES[4]], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, EVEN_SIZES], ids=["odd", "even"])
def test_without_B_the_bits_are_those_of_the_weight_alone(mix, sizes):
    """So that g is exactly 1 at initialisation, wherever m was computed."""
    for entry in make_entries(mix, sizes):
        entry.lora_B.zero_()
        make_table([entry], mix[0])
        assert torch.equal(entry.norm, root(row_square_sum(entry.weight)))
        one = dora_norm(entry.weight, entry.lora_A, entry.lora_B, scale=2.0)
        assert torch.equal(entry.norm, one)


@pytest.mark.parametrize("mix", MIXES[:4], ids=str)
def test_groups_that_share_the_scratch_change_no_bit(mix, monkeypatch):
    whole, parts = make_entries(mix, SIZES), make_entries(mix, SIZES)
    make_table(whole, mix[0])
    for budget in (1, 60_000):
        monkeypatch.setattr(_norm_layout, "SCRATCH_BYTES", budget)
        make_table(parts, mix[0])
        assert all(torch.equal(a.norm, b.norm) for a, b in zip(whole, parts, strict=True))


def test_adapters_that_do_not_start_on_whole_cache_lines():
    """As views into one flat buffer, which FSDP makes of them."""
    (entry,) = make_entries(MIXES[4], [(40, 64, 16)])
    flat = torch.empty(1 + 16 * 64 + 40 * 16, dtype=torch.bfloat16, device=DEVICE)
    A, B = flat[1 : 1 + 16 * 64].view(16, 64), flat[1 + 16 * 64 :].view(40, 16)
    moved = entry._replace(lora_A=A.copy_(entry.lora_A), lora_B=B.copy_(entry.lora_B))
    make_table([moved], torch.bfloat16)
    assert_right([entry], torch.bfloat16)


CHANGES = {
    "nothing": (lambda e: None, 1),
    "A doubled": (lambda e: e.lora_A.mul_(2), 2),
    "B by .data": (lambda e: e.lora_B.data.add_(0.1), 2),
    "one entry": (lambda e: e.lora_B.data[3, 1].add_(0.5), 2),
    "rows swapped": (lambda e: e.lora_A.copy_(e.lora_A.flip(0)), 2),
    "signs": (lambda e: e.lora_B.neg_(), 2),
    "W scaled": (lambda e: e.weight.mul_(1.5), 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("mix", [MIXES[1], MIXES[2]], ids=str)
def test_only_what_changed_is_computed(change, mix):
    alter, count = change
    entries = make_entries(mix, SIZES[:3])
    made = make_table(entries, mix[0])
    made.refresh()
    alter(entries[1])
    for _ in range(3):  # each of the three rows of prints in turn
        made.refresh()
    assert made.computed.tolist() == [1, count, 1]
    assert_right(entries, mix[0])


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[3]], ids=str)
def test_what_did_not_change_is_not_touched(mix):
    entries = make_entries(mix, SIZES[:3])
    made = make_table(entries, mix[0])
    entries[0].norm.fill_(-1)
    entries[2].norm.fill_(-2)
    entries[1].lora_A.neg_()
    made.refresh()
    assert entries[0].norm.eq(-1).all() and entries[2].norm.eq(-2).all()
    assert_right(entries[1:2], mix[0])


def test_the_caller_names_what_changed_and_the_prints_see_the_rest():
    entries = make_entries(MIXES[3], SIZES)
    made = make_table(entries, torch.bfloat16)
    entries[1].lora_B.mul_(2)
    entries[3].lora_A.mul_(2)
    made.refresh(force=[0, 3])
    assert made.computed.tolist() == [2, 2, 1, 2]
    assert_right(entries, torch.bfloat16)
    made.refresh(force=[])
    made.refresh(force=(2,))
    assert made.computed.tolist() == [2, 2, 2, 2]


def test_accepted_weights_are_not_computed_again():
    entries = make_entries(MIXES[1], SIZES[:2])
    made = make_table(entries, torch.float16)
    entries[0].lora_A.mul_(2)
    made.accept()
    made.refresh()
    assert made.computed.tolist() == [1, 1]


def test_compute_leaves_the_prints_alone():
    entries = make_entries(MIXES[1], SIZES[:2])
    made = make_table(entries, torch.float16)
    entries[0].lora_A.mul_(2)
    made.compute()
    assert_right(entries, torch.float16)
    made.refresh()
    assert made.computed.tolist() == [3, 2]


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[3]], ids=str)
def test_two_runs_agree_bit_for_bit(mix):
    first, second = make_entries(mix, SIZES), make_entries(mix, SIZES)
    make_table(first, mix[0]), make_table(second, mix[0])
    assert all(torch.equal(a.norm, b.norm) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_large_equals_the_definition(mix):
    entries = make_entries(mix, GPU_SIZES)
    made = make_table(entries, mix[0])
    assert_right(entries, mix[0])
    first = [entry.norm.clone() for entry in entries]
    made.refresh(force=True)
    assert all(torch.equal(a, e.norm) for a, e in zip(first, entries, strict=True))


@pytest.mark.gpu
def test_large_without_B_has_the_bits_of_the_weight_alone():
    for entry in make_entries(MIXES[3], GPU_SIZES):
        entry.lora_B.zero_()
        make_table([entry], torch.bfloat16)
        assert torch.equal(entry.norm, row_square_sum(entry.weight).sqrt())


@pytest.mark.gpu
def test_a_refresh_never_waits_and_keeps_to_its_memory():
    """Not even where the caller names layers for the first time."""
    entries = make_entries(MIXES[3], GPU_SIZES[:3] * 4)
    made = make_table(entries, torch.bfloat16)
    torch.use_deterministic_algorithms(False)  # it fills fresh memory, which a user's run does not
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.refresh()
        made.refresh(force=[1, 2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = sum(e.weight.shape[0] * -(-e.weight.shape[1] // 1024) * 4 for e in entries)
    descriptors = 16 * 2**20
    assert torch.cuda.max_memory_allocated() - before < SCRATCH_BYTES + parts + descriptors
    assert made.computed.tolist() == [1, 2, 2] + [1] * 9

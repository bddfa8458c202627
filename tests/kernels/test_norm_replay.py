"""Launches that may be recorded: the same buffers each time, and one state for host and graph."""

import pytest
import torch

from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.norm_replay import ReplayableNormTable
from hirank.kernels.norm_table import NormEntry

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(70, 123, 5), (9, 200, 3), (33, 64, 16)]


def make(dtype=torch.float32) -> tuple[list[NormEntry], ReplayableNormTable]:
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=draw, device=DEVICE).to(dtype)

    entries = [
        NormEntry(normal(n, k), normal(r, k) / 4, normal(n, r) / r**0.5, 1.5,
                  torch.full((n,), torch.nan, device=DEVICE))
        for n, k, r in SIZES
    ]  # fmt: skip
    return entries, ReplayableNormTable(entries, dtype)


def assert_right(entries: list[NormEntry]) -> None:
    for W, A, B, s, norm in entries:
        exact = (W.double() + s * B.double() @ A.double()).norm(dim=1)
        torch.testing.assert_close(norm.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("recorded", [0, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_change_is_computed_once(dtype, recorded):
    entries, table = make(dtype)
    table.refresh()
    for round in range(1, 5):  # more rounds than rows of prints
        table._recorded = round > recorded  # as the capture of a graph leaves it
        table.refresh()
        entries[1].lora_B.data[2, 1] += 0.5
        table.refresh()
        table.refresh()
        assert_right(entries)
        assert table.computed.tolist() == [1, 1 + round, 1]


def test_a_change_that_is_taken_back_is_seen_both_times():
    entries, table = make()
    table.refresh()
    before = entries[0].lora_A.clone()
    for value in (before * 2, before, before * 2, before):
        entries[0].lora_A.data.copy_(value)
        table.refresh()
        assert_right(entries)


def test_what_was_computed_on_demand_counts_as_seen():
    entries, table = make()
    table.refresh(force=True)
    entries[2].lora_A.data.mul_(2)
    table.refresh(force=[2])
    table.refresh()
    assert_right(entries)
    assert table.computed.tolist() == [1, 1, 2]


def test_accepted_weights_are_not_computed():
    entries, table = make()
    table.refresh()
    entries[0].lora_A.data.mul_(2)
    table.accept()
    table.refresh()
    assert table.computed.tolist() == [1, 1, 1]


@pytest.mark.gpu
def test_a_recorded_refresh_and_the_hosts_see_one_state():
    entries, table = make()
    table.refresh(force=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.refresh()
    graph.replay()
    assert table.computed.tolist() == [1, 1, 1]
    before = entries[0].lora_A.clone()
    for change, look in ((before * 2, graph.replay), (before, table.refresh),
                         (before * 2, table.refresh), (before, graph.replay)):  # fmt: skip
        entries[0].lora_A.data.copy_(change)
        look()
        assert_right(entries)
        graph.replay()
        table.refresh()
    assert table.computed.tolist() == [5, 1, 1]

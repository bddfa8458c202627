"""Clocks: quantiles, turns, ratios of the same round, spans that overlap."""

import pytest
import torch

from hirank.bench.profiling import GpuSpan, covered, profiled, summary
from hirank.bench.timing import Marks, calls, interleaved, quantiles, ratios

CPU = torch.device("cpu")


def test_quantiles_lie_between_samples():
    assert quantiles([5, 1, 3, 2, 4]) == pytest.approx({"p20": 1.8, "p50": 3, "p80": 4.2, "n": 5})
    assert quantiles([7.0]) == {"p20": 7, "p50": 7, "p80": 7, "n": 1}


def test_arms_take_turns_and_each_begins_once():
    order: list[str] = []

    def arm(name: str):
        return lambda: order.append(name) or {"wall_s": float(len(order))}

    samples = interleaved({name: arm(name) for name in "abc"}, repeats=2, warmup=1)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [sample["wall_s"] for sample in samples["a"]] == [6, 8]


def test_three_rounds_are_measured_even_beyond_the_limit():
    samples = interleaved({"a": lambda: {"wall_s": 1.0}}, repeats=50, limit=0.0)
    assert len(samples["a"]) == 3


def test_a_ratio_compares_times_of_the_same_round():
    slow_second = {"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]}
    samples = {name: [{"t": t} for t in times] for name, times in slow_second.items()}
    assert ratios(samples, "t") == {"a": {"b": 0.5}, "b": {"a": 2.0}}


def test_marks_and_calls_measure_time_on_the_cpu():
    marks = Marks(CPU)
    for _ in range(3):
        marks.mark()
    assert len(marks.spans()) == 2 and min(marks.spans()) >= 0
    assert calls(lambda: None, 3, CPU) >= 0


def test_busy_time_counts_overlap_once():
    assert covered([(5, 7), (0, 4), (3, 4), (1, 2)]) == 6
    assert covered([]) == 0


def test_what_the_gpu_did_is_summed_by_kernel():
    spans = [GpuSpan("sm90_gemm", 0, 10), GpuSpan("add", 8, 12), GpuSpan("sm90_gemm", 20, 25)]
    found = summary(spans)
    assert (found["busy_s"], found["launches"], found["matrix_s"]) == (17e-9, 3, 15e-9)
    assert found["kernels"] == [["sm90_gemm", 2, 15e-9], ["add", 1, 4e-9]]


def test_there_is_nothing_to_profile_without_a_gpu():
    assert profiled(lambda: pytest.fail("must not run"), CPU) == {}


@pytest.mark.gpu
def test_a_gpu_is_busy_for_no_longer_than_the_wall_clock_says():
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    found = profiled(lambda: [x @ x for _ in range(10)], device)
    assert 0 < found["matrix_s"] <= found["busy_s"] * 1.001
    assert found["busy_s"] < 20 * calls(lambda: x @ x, 10, device)


@pytest.mark.gpu
def test_watching_takes_nothing_from_pytorchs_allocator():
    device = torch.device("cuda")
    x = torch.randn(1024, 1024, device=device)

    def peak(run) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    def work():
        for _ in range(1000):
            (x @ x).relu_()

    peak(work)  # cuBLAS takes its workspace
    assert peak(lambda: profiled(work, device)) == peak(work)

"""The products with A and B: any scale, any dtype, and casts that later calls write over."""

import threading
from types import SimpleNamespace

import pytest
import torch

from hirank.kernels import _operands
from hirank.kernels._low_rank import back_of, hidden_of, low_rank
from hirank.kernels._operands import Cast, rides
from hirank.kernels._triton import interpreting
from hirank.testing import assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (2.0, -0.25, 1, 3.0, 0.0)


def draw(dtype, device=DEVICE, seed=0):
    made = torch.Generator().manual_seed(seed)
    sizes = {"x": (5, 24), "A": (8, 24), "B": (16, 8), "t": (5, 16)}
    found = {k: torch.randn(*v, generator=made).to(device) for k, v in sizes.items()}
    return {k: v if k in "AB" else v.to(dtype) for k, v in found.items()}


def formula(given, scale, dtype, compute):
    x, A, B, t = (given[name].to(compute).to(dtype) for name in "xABt")
    return {"delta": scale * (x @ A.T) @ B.T, "tB": scale * t @ B}


def check(given, scale, compute, casts=None):
    h, B = hidden_of(given["x"], given["A"], given["B"], scale, casts)
    delta = h @ B.T
    tB, A, owed = back_of(given["t"], given["A"], given["B"], scale, casts)
    assert torch.equal(A, owed * given["A"].to(compute))
    tB = owed * tB
    truth = formula(given, scale, torch.float64, compute)
    assert_within_budget(
        {"delta": delta, "tB": tB}, formula(given, scale, compute, compute), truth, compute
    )
    return delta, tB


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_products_within_budget(dtype, scale):
    check(draw(dtype), scale, dtype)


@pytest.mark.parametrize("scale", SCALES)
def test_casts_of_a_window_within_budget(scale):
    given = draw(torch.bfloat16)
    A, B = given["A"].bfloat16(), given["B"].bfloat16()
    factor = float(scale) if rides(scale) else 1.0
    cast = Cast(factor * A, factor * A.t(), B, factor)
    check(given, scale, torch.bfloat16, SimpleNamespace(at=lambda onward: cast))


def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_operands, "direct", lambda tensor: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    empty = lambda size, device: torch.empty(size, dtype=torch.int8)  # noqa: E731
    monkeypatch.setattr(_operands, "lasting_bytes", empty)
    monkeypatch.setattr(_operands, "_KEPT", _operands._Kept())


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("scale", SCALES)
def test_casts_in_one_place_within_budget(monkeypatch, scale):
    as_on_a_gpu(monkeypatch)
    for seed in range(2):
        given = draw(torch.bfloat16, "cpu", seed)
        given["A"], given["B"] = (given[k].bfloat16().float() for k in "AB")  # casts truncate here
        check(given, scale, torch.bfloat16)
    assert len(_operands._KEPT.places) == 1


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
def test_a_scale_on_the_cast_changes_no_bit(monkeypatch):
    given = draw(torch.bfloat16, "cpu")
    A, B = (given[k].bfloat16() for k in "AB")
    expected = low_rank(given["x"], A, B, 4.0)[0]
    as_on_a_gpu(monkeypatch)
    found = hidden_of(given["x"], A.float(), B.float(), 4.0)[0]
    assert torch.equal(found, expected)
    assert rides(-0.5) and not any(map(rides, (3.0, 0.0, 2.0**40)))


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
def test_a_kernel_gets_a_float_whatever_the_scale(monkeypatch):
    # launches that look alike share what was compiled, and 2 == 2.0
    as_on_a_gpu(monkeypatch)
    cast, found, given = _operands._cast, [], draw(torch.bfloat16, "cpu")

    def record(grid, tensors, numbers, *more, **options):
        found.extend(map(type, numbers[3:]))
        cast(grid, tensors, numbers, *more, **options)

    monkeypatch.setattr(_operands, "_cast", record)
    for scale in (1, 2, 3, 2.0):
        hidden_of(given["x"], given["A"], given["B"], scale)
        back_of(given["t"], given["A"], given["B"], scale)
    assert set(found) == {float}


@pytest.mark.skipif(not interpreting(), reason="needs Triton's interpreter")
def test_threads_have_places_of_their_own(monkeypatch):
    as_on_a_gpu(monkeypatch)
    given = draw(torch.bfloat16, "cpu")
    places = []

    def work():
        places.append(_operands.brief_cast(given["A"], given["B"], torch.bfloat16, 1.0, 1.0))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    first, second = places
    assert first.A.data_ptr() != second.A.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
def test_streams_have_places_of_their_own(scale):
    given, other = draw(torch.bfloat16), draw(torch.bfloat16, seed=1)
    expected, others = check(given, scale, torch.bfloat16), check(other, scale, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        found = check(given, scale, torch.bfloat16)
        with torch.cuda.stream(side):
            beside = check(other, scale, torch.bfloat16)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found + beside, expected + others))


@pytest.mark.gpu
def test_a_graph_writes_to_memory_of_its_own():
    given = draw(torch.bfloat16)
    expected = check(given, 2.0, torch.bfloat16)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, B = hidden_of(given["x"], given["A"], given["B"], 2.0)
        found = h @ B.T
    kept = [place.cast.B.data_ptr() for place in _operands._KEPT.places.values()]
    assert B.data_ptr() not in kept
    graph.replay()
    assert torch.equal(found, expected)

"""Several adapters cast in one launch: which, when, and that they are what they should be."""

import threading

import pytest
import torch

from hirank.kernels import cast_windows
from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.cast_windows import Castable, CastWindows

pytestmark = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# one of them larger than what a program casts, some with odd sizes
SIZES = [(70, 123, 5), (33, 1100, 16), (1, 1, 1), (64, 64, 8), (8, 24, 3)]


def draw(sizes=SIZES, scale=2.0):
    made = torch.Generator().manual_seed(0)
    return [
        Castable(*(torch.randn(*s, generator=made).to(DEVICE) for s in ((r, k), (n, r))), scale)
        for n, k, r in sizes
    ]


def rounded(weight):
    """As kernels round to bf16: in the interpreter towards zero."""
    if not interpreting():
        return weight.bfloat16()
    return (weight.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def assert_right(cast, layer):
    assert torch.equal(cast.A, cast.factor * rounded(layer.lora_A))
    assert torch.equal(cast.A_t, cast.A.T) and torch.equal(cast.B, rounded(layer.lora_B))


class Counted(CastWindows):
    """Notes the layers of each window."""

    def __init__(self, *more):
        super().__init__(*more)
        self.windows = []

    def _fill(self, place, *more):
        done = super()._fill(place, *more)
        if done:
            self.windows.append((place.first, place.last))
        return done


def run(windows, order, onward=True):
    """Ask for layers one after the other; each is right when it comes."""
    for i in order:
        assert_right(windows.cast(i, onward), windows._layers[i])


@pytest.mark.parametrize("scale", [1, 2.0, -0.25, 3.0, 0.0])
def test_casts_are_right_and_one_launch_serves_them_all(scale):
    layers = draw(scale=scale)
    windows = Counted(layers, torch.bfloat16)
    run(windows, range(5))
    assert windows.windows == [(0, 5)]
    assert windows.cast(0, True).factor == (scale if scale in (2.0, -0.25) else 1)


def test_windows_go_the_way_that_layers_ask(monkeypatch):
    monkeypatch.setattr(cast_windows, "_WIDEST", 3)
    windows = Counted(draw(SIZES * 2), torch.bfloat16)
    run(windows, range(10))
    run(windows, reversed(range(10)), onward=False)
    assert windows.windows == [(0, 3), (3, 6), (6, 9), (9, 10), (6, 9), (3, 6), (0, 3)]


def test_a_recomputed_block_and_its_backward_pass_share_a_window(monkeypatch):
    monkeypatch.setattr(cast_windows, "_WIDEST", 4)
    windows = Counted(draw(SIZES[:3] * 3), torch.bfloat16)
    for first in (6, 3, 0):
        run(windows, range(first, first + 3))
        run(windows, reversed(range(first, first + 3)), onward=False)
    assert windows.windows == [(6, 9), (3, 7), (0, 4)]


def test_a_refresh_ends_all_windows():
    layers = draw()
    windows = Counted(layers, torch.bfloat16)
    run(windows, [0, 1])
    layers[1].lora_A.data.mul_(1.5)
    windows.turn += 1
    run(windows, [1, 2])
    assert windows.windows == [(0, 5), (1, 5)]


def test_a_window_has_so_many_bytes_at_most(monkeypatch):
    layers = draw([(64, 64, 8)] * 6)
    monkeypatch.setattr(cast_windows, "WINDOW_BYTES", 3 * 2 * 8 * 128)
    windows = Counted(layers, torch.bfloat16)
    run(windows, range(6))
    run(windows, reversed(range(6)), onward=False)
    assert windows.windows == [(0, 3), (3, 6), (0, 3)]
    assert windows._place().out.numel() == 3 * 8 * 128


def test_windows_that_nobody_uses_become_narrower_and_end():
    windows = Counted(draw([(8, 8, 8)] * 32), torch.bfloat16)
    order = [*range(0, 32, 9), 1, 10, 28]
    found = [windows.cast(i, True) for i in order]
    assert [b - a for a, b in windows.windows][:3] == [8, 4, 2]
    assert all(cast is None for cast in found[3:])
    windows.turn += 1
    run(windows, range(16))  # a pass in order: it tries again
    assert [b - a for a, b in windows.windows][3:] == [2, 4, 8, 8]


def test_an_adapter_that_lies_elsewhere_is_not_read():
    layers = draw()
    windows = CastWindows(layers, torch.bfloat16)
    run(windows, [0])
    layers[3].lora_B.data = layers[3].lora_B.data.clone()
    windows.turn += 1
    assert windows.cast(1, True) is None


def test_threads_have_places_of_their_own():
    windows, places = CastWindows(draw(), torch.bfloat16), []

    def work():
        places.append(windows.cast(0, True).A.data_ptr())

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert places[0] != places[1]


@pytest.mark.gpu
def test_streams_have_places_of_their_own():
    windows, side = CastWindows(draw(), torch.bfloat16), torch.cuda.Stream()
    first = windows.cast(0, True).A
    with torch.cuda.stream(side):
        assert windows.cast(0, True).A.data_ptr() != first.data_ptr()

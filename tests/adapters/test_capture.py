"""What a group records into a CUDA graph, with a stand-in for the capture."""

import pytest
import torch

from adapters.setups import Lin, fresh_norm, layer_of, norm_in_use, perturb, wrap
from hirank.adapters import gain, groups
from hirank.adapters.capture import capture_id
from hirank.kernels._triton import interpreting

pytestmark = pytest.mark.skipif(
    not interpreting(), reason="needs TRITON_INTERPRET=1 (make test runs both)"
)


class Recorder:
    """Counts the refreshes of a group's table; each is what a graph would play."""

    def __init__(self, group):
        self.table, self.count, self._refresh = group._table, 0, group._table.refresh
        group._table.refresh = self

    def __call__(self, **options):
        assert not options
        self.count += 1

    def play(self):
        self._refresh()


@pytest.fixture
def capture(monkeypatch):
    """Set `capture.number` to begin another capture."""

    class Capture:
        number = 1

    monkeypatch.setattr(groups, "capture_id", lambda stream: Capture.number)
    monkeypatch.setattr(groups, "raw_stream", lambda index: 7)
    return Capture


def make():
    model = perturb(wrap(Lin(24, 16)))
    layer = layer_of(model)
    norm_in_use(layer)
    cache = layer._hirank_norms["default"]
    group = cache.members[torch.float32].group
    group.index = 0
    return model, layer, cache, group


def test_d12_one_refresh_a_capture(capture):
    _, layer, cache, group = make()
    recorder = Recorder(group)
    found = [group.record(cache) for _ in range(3)]
    capture.number = 2
    found.append(group.record(cache))
    assert recorder.count == 2
    assert all(norm is cache.members[torch.float32].live for norm in found)
    layer.lora_B["default"].weight.data.mul_(2)
    recorder.play()
    torch.testing.assert_close(found[0].double(), fresh_norm(layer), rtol=1e-5, atol=0)


def test_d12_without_a_number_every_layer_records(capture):
    _, _, cache, group = make()
    recorder, capture.number = Recorder(group), None
    group.record(cache), group.record(cache)
    assert recorder.count == 2


@pytest.mark.parametrize("part", ["lora_A", "base"])
def test_d12_weights_the_table_does_not_know_are_not_recorded(capture, part):
    _, layer, cache, group = make()
    weight = layer.base_layer.weight if part == "base" else layer.lora_A["default"].weight
    weight.data = weight.data.clone()
    assert group.record(cache) is None


def test_d12_what_a_graph_plays_outlives_the_next_table(capture):
    model, layer, cache, group = make()
    norm, table = group.record(cache), group._table
    layer.lora_A["default"].weight.data = layer.lora_A["default"].weight.data.clone()
    group.index = None
    assert norm_in_use(layer) is not norm
    assert group._table is not table and cache.recorded == [table]
    torch.testing.assert_close(norm, norm_in_use(layer))


def test_what_is_recorded_without_a_table_is_the_definition():
    model = perturb(wrap(Lin(24, 16)))
    layer = layer_of(model)
    weights = (layer.base_layer.weight, layer.lora_A["default"].weight,
               layer.lora_B["default"].weight, layer.scaling["default"])  # fmt: skip
    with pytest.warns(RuntimeWarning, match="run it once in the same way, then capture it"):
        found = gain._in_capture(*weights, torch.float32)
    torch.testing.assert_close(found.double(), fresh_norm(layer), rtol=1e-5, atol=0)


def test_no_driver_no_number():
    assert torch.cuda.is_available() or capture_id(0) is None

"""Tiles and crossovers: a legal table, one lookup, a cache file that cannot do harm."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hirank.kernels import _tuning, _tuning_store
from hirank.kernels._tuning import TABLE, UNKNOWN, override, pays, tier, tiles
from hirank.kernels._tuning_store import Block, Saved

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
OTHER = Saved(Block(4, 1024, 8), Block(2, 512, 4), 4096)
H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132}
STRANGE = {"name": "Acme One", "major": 99, "minor": 0, "multi_processor_count": 10}
OLD = {"name": "NVIDIA GeForce RTX 2080", "major": 7, "minor": 5, "multi_processor_count": 46}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that knows no device yet, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_tuning, "_KNOWN", {})
    _tuning._say_once.cache_clear()
    return tmp_path


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the machine has one GPU with these properties, and Triton 3.6."""

    def be(properties: dict, has_triton: bool = True, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        seen = SimpleNamespace(**properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(_tuning, "HAS_TRITON", has_triton)
        monkeypatch.setattr(_tuning, "triton", SimpleNamespace(__version__="3.6.0"))

    return be


# The table.


@pytest.mark.parametrize("row", [UNKNOWN, *TABLE.values()])
def test_every_row_is_legal_and_says_why(row):
    for block in row[:4]:
        assert _tuning_store.fault(block) is None
    assert row.programs > 0 and row.min_training >= 0 and row.min_inference >= 0
    assert len(row.why) > 20


def test_the_limit_is_that_of_triton():
    utils = pytest.importorskip("triton._utils")
    assert utils.TRITON_MAX_TENSOR_NUMEL == _tuning_store.LARGEST


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        (Block(3, 64, 4), "block_m is 3"),
        (Block(0, 64, 4), "block_m is 0"),
        (Block(-8, 64, 4), "block_m is -8"),
        (Block(8, True, 4), "block_n is True"),
        (Block(8, 64.0, 4), "block_n is 64.0"),
        (Block(2048, 1024, 4), "2048 x 1024"),
        (Block(8, 64, 32), "num_warps is 32"),
    ],
)
def test_an_illegal_block_is_named(block, wrong):
    assert wrong in _tuning_store.fault(block)


@pytest.mark.parametrize(
    ("properties", "hip", "expected"),
    [
        (H200, None, ("nvidia", "hopper")),
        ({"major": 8, "minor": 0}, None, ("nvidia", "ampere")),
        ({"major": 8, "minor": 6}, None, ("nvidia", "ampere")),
        ({"major": 8, "minor": 9}, None, ("nvidia", "ada")),
        ({"major": 10, "minor": 0}, None, ("nvidia", "blackwell")),
        ({"major": 12, "minor": 0}, None, ("nvidia", "blackwell")),
        (STRANGE, None, ("nvidia", "unknown")),
        (
            {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"},
            "6.4",
            ("amd", "gfx942"),
        ),
    ],
)
def test_family(monkeypatch, properties, hip, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert _tuning.family_of(SimpleNamespace(**properties)) == expected


# A device.


def test_a_measured_gpu(pretend):
    pretend(H200)
    found = tiles(GPU)
    row = _tuning.TABLE["nvidia", "hopper"]
    assert found.gain_forward == _tuning.Elementwise(*row.gain_forward, 132 * row.programs)
    assert found.gain_backward == _tuning.Elementwise(*row.gain_backward, 132 * row.programs)
    assert tier(2**24, GPU, True) == ("fused training", "tiles measured on NVIDIA H200")
    assert tier(2**24, GPU, False)[0] == "fused inference"


def test_programs_follow_the_number_of_multiprocessors(pretend):
    pretend(H200 | {"multi_processor_count": 114})
    assert tiles(GPU).gain_backward.programs == 114 * _tuning.TABLE["nvidia", "hopper"].programs


def test_an_unknown_gpu_gets_the_default_and_says_so(pretend):
    pretend(STRANGE)
    assert tier(2**24, GPU, True) == (
        "fused training",
        "unknown GPU 'Acme One': default tiles; run hirank bench tune",
    )
    assert tiles(GPU).gain_forward.programs == 80


def test_amd_is_not_taken_for_hopper(pretend):
    pretend(H200 | {"name": "AMD Instinct", "gcnArchName": "gfx90a"}, hip="6.4")
    assert "unknown GPU 'AMD Instinct'" in tiles(GPU).source
    assert tiles(GPU).obstacle is None


def test_small_results_are_eager(pretend):
    pretend(STRANGE)
    least = tiles(GPU).min_training
    assert least > 0
    assert pays(least, GPU, True) and not pays(least - 1, GPU, True)
    name, reason = tier(least - 1, GPU, True)
    assert name == "eager" and f"{least - 1:,} elements" in reason
    assert tiles(GPU).crossover_source in reason


@pytest.mark.parametrize(
    ("properties", "has_triton", "reason"),
    [(OLD, True, "compute capability 7.5"), (H200, False, "Triton is not installed")],
)
def test_what_stops_triton_is_said_once(pretend, properties, has_triton, reason):
    pretend(properties, has_triton)
    with pytest.warns(RuntimeWarning, match=reason) as said:
        name, why = tier(2**24, GPU, True)
        _tuning._KNOWN.clear()
        tier(2**24, GPU, False)
    assert len(said) == 1
    assert name == "eager" and reason in why
    assert not pays(2**24, GPU, False)


def test_a_cpu_is_eager_but_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(_tuning, "interpreting", lambda: False)
    assert tier(2**24, CPU, True) == ("eager", "on the CPU")
    _tuning._KNOWN.clear()
    monkeypatch.setattr(_tuning, "interpreting", lambda: True)
    assert tier(0, CPU, False)[0] == "fused inference"


def test_other_devices_are_eager():
    name, reason = tier(2**24, torch.device("meta"), True)
    assert name == "eager" and "'meta'" in reason


def test_fake_tensors_of_an_absent_gpu_have_tiles(pretend):
    pretend(H200)
    assert tiles(torch.device("cuda", 7)).source == "default tiles"
    assert _tuning._KNOWN == {}


def test_cuda_without_a_number_is_the_current_gpu(pretend):
    pretend(H200)
    assert tiles(torch.device("cuda")) is tiles(GPU)
    assert set(_tuning._KNOWN) == {GPU}


def test_a_device_is_asked_once(pretend, monkeypatch):
    pretend(H200)
    first = tiles(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pytest.fail("asked"))
    monkeypatch.setattr(_tuning_store, "load", lambda *names: pytest.fail("read"))
    assert tiles(GPU) is first and pays(2**24, GPU, True)


def test_the_choice_compiles_without_a_break(monkeypatch):
    monkeypatch.setitem(_tuning._KNOWN, CPU, replace(tiles(CPU), obstacle=None, min_training=8))

    def choose(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if pays(x.numel(), x.device, True) else x + 5

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    for size in (3, 8, 9):
        assert torch.equal(compiled(torch.ones(size)), choose(torch.ones(size)))


def test_override_is_undone(pretend):
    pretend(H200)
    before = tiles(GPU)
    other = replace(before, min_training=1)
    with pytest.raises(ValueError), override(GPU, other):
        assert tiles(GPU) is other
        raise ValueError
    assert tiles(GPU) is before
    _tuning._KNOWN.clear()
    with override(GPU, other):
        assert tiles(GPU) is other
    assert _tuning._KNOWN == {}


# The file.


def test_what_was_saved_is_used_and_said(pretend, fresh):
    pretend(H200)
    table = tiles(GPU)
    path = _tuning_store.save("NVIDIA H200", "3.6.0", OTHER)
    assert path == fresh / "hirank" / "tuning" / "nvidia-h200-3.6.0.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    _tuning._KNOWN.clear()
    found = tiles(GPU)
    assert found.gain_forward == replace(table.gain_forward, block_m=4, block_n=1024)
    assert found.compose_forward == replace(
        table.compose_forward, block_m=2, block_n=512, num_warps=4
    )
    assert found.min_inference == 4096
    assert "tuned on this GPU" in tier(2**24, GPU, False)[1]


def test_the_file_leaves_alone_what_could_change_a_bit(pretend):
    pretend(H200)
    table = tiles(GPU)
    _tuning_store.save("NVIDIA H200", "3.6.0", OTHER)
    _tuning._KNOWN.clear()
    found = tiles(GPU)
    assert found.gain_backward == table.gain_backward
    assert found.compose_backward == table.compose_backward
    assert found.min_training == table.min_training


def test_without_agreement_the_crossover_is_the_tables(pretend):
    pretend(H200)
    table = tiles(GPU)
    _tuning_store.save("NVIDIA H200", "3.6.0", OTHER._replace(min_inference=None))
    _tuning._KNOWN.clear()
    assert tiles(GPU).min_inference == table.min_inference
    assert tiles(GPU).gain_forward != table.gain_forward


def test_files_of_other_gpus_and_versions_are_not_read(pretend):
    pretend(H200)
    _tuning_store.save("NVIDIA H100", "3.6.0", OTHER)
    _tuning_store.save("NVIDIA H200", "3.7.0", OTHER)
    assert tiles(GPU).source == "tiles measured on NVIDIA H200"


def good() -> dict:
    block = {"block_m": 8, "block_n": 256, "num_warps": 4}
    return {
        "schema": 1,
        "gpu": "NVIDIA H200",
        "triton": "3.6.0",
        "gain_forward": block,
        "compose_forward": block,
        "min_inference": 1024,
    }


BROKEN = {
    "empty": b"",
    "cut off": json.dumps(good()).encode()[:-9],
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "infinity": json.dumps(good() | {"min_inference": float("inf")}).encode(),
    **{
        name: json.dumps(good() | change).encode()
        for name, change in {
            "newer": {"schema": 2},
            "schema true": {"schema": True},
            "other GPU": {"gpu": "NVIDIA A100"},
            "unknown key": {"gain_backward": good()["gain_forward"]},
            "no block": {"gain_forward": None},
            "half a block": {"gain_forward": {"block_m": 8}},
            "odd": {"gain_forward": {"block_m": 7, "block_n": 256, "num_warps": 4}},
            "text": {"gain_forward": {"block_m": "8", "block_n": 256, "num_warps": 4}},
            "huge": {"gain_forward": {"block_m": 2**20, "block_n": 2, "num_warps": 4}},
            "warps": {"gain_forward": {"block_m": 8, "block_n": 256, "num_warps": 64}},
            "negative": {"min_inference": -1},
            "fraction": {"min_inference": 0.5},
            "boolean": {"min_inference": True},
        }.items()
    },
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_one_warning(pretend, content):
    pretend(H200)
    path = _tuning_store.place("NVIDIA H200", "3.6.0")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning) as said:
        assert tiles(GPU).source == "tiles measured on NVIDIA H200"
        tiles(GPU)
    (one,) = said
    assert str(path) in str(one.message) and "hirank bench tune" in str(one.message)
    assert "\n" not in str(one.message)


def test_the_same_content_unbroken_is_read(pretend):
    pretend(H200)
    path = _tuning_store.place("NVIDIA H200", "3.6.0")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(good()))
    assert tiles(GPU).min_inference == 1024


def test_a_folder_in_place_of_the_file_is_ignored_with_a_warning(pretend):
    pretend(H200)
    _tuning_store.place("NVIDIA H200", "3.6.0").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="not used"):
        assert tiles(GPU).source == "tiles measured on NVIDIA H200"


def test_a_save_that_fails_leaves_the_old_file_whole(monkeypatch):
    path = _tuning_store.save("NVIDIA H200", "3.6.0", OTHER)
    before = path.read_text()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        _tuning_store.save("NVIDIA H200", "3.6.0", OTHER._replace(min_inference=1))
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_illegal_is_saved(fresh):
    with pytest.raises(ValueError, match="block_m is 3"):
        _tuning_store.save("NVIDIA H200", "3.6.0", OTHER._replace(gain_forward=Block(3, 64, 4)))
    assert list(fresh.iterdir()) == []


@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_without_a_cache_folder_it_is_in_home(monkeypatch, tmp_path, named):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = _tuning_store.place("A", "3.6.0")
    assert path == tmp_path / "home" / ".cache" / "hirank" / "tuning" / "a-3.6.0.json"


def test_without_a_home_there_is_no_file(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with warnings.catch_warnings(action="error"):
        assert _tuning_store.load("A", "3.6.0") is None
    with pytest.raises(OSError, match="no home folder"):
        _tuning_store.save("A", "3.6.0", OTHER)


def test_a_name_cannot_leave_the_folder(fresh):
    path = _tuning_store.place("../../etc/GPU \x00", "../3.6")
    assert path.parent == fresh / "hirank" / "tuning"
    assert path.name == "etc-gpu-..-3.6.json"

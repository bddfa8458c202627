"""The suite `tune`: what it chooses from given times, what it keeps, what it leaves alone."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hirank.bench import tune
from hirank.bench.options import BAD_INPUT, main
from hirank.bench.session import Session
from hirank.bench.settings import Tune
from hirank.bench.tune import Point, best, blocks, crossover
from hirank.kernels import _tuning, _tuning_store
from hirank.kernels._tuning import UNKNOWN, tiles
from hirank.kernels._tuning_store import Block, Saved, fault

CPU = torch.device("cpu")
PASSES = [name for name in tune.ARMS if name != "crossover"]
A, B, C = Block(8, 128, 4), Block(16, 256, 4), Block(16, 512, 8)
TABLE = _tuning._plain(UNKNOWN, 4)
BEFORE = tune.unmeasured(TABLE)
SMALL = Tune(shape="48x32", tokens=8)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def session(said: list[str]) -> Session:
    return Session(CPU, None, 1, 0, float("inf"), said.append)


def clock_that_likes(name: str, liked: Block):
    """Runs once, and says that one block is twice as fast as all others."""

    def clock(go) -> list[float]:
        go()
        now = tune._block(name, tiles(CPU))
        return [1e-3 if now == liked else 2e-3]

    return clock


# Choosing.


@pytest.mark.parametrize("name", PASSES)
def test_candidates_are_legal_and_each_once(name):
    found = blocks(name)
    assert 20 <= len(found) <= 60 and len(set(found)) == len(found)
    assert [fault(block) for block in found] == [None] * len(found)


def test_the_best_is_the_best_over_all_shapes():
    times = {A: [1.0, 1.0], B: [0.5, 1.9], C: [0.8, 0.9]}
    assert best(times, A) == C


def test_the_table_stays_unless_another_is_clearly_faster():
    assert best({A: [1.0], B: [0.99]}, A) == A
    assert best({A: [1.0], B: [0.97]}, A) == B


def test_a_tile_that_does_not_run_everywhere_is_out():
    assert best({A: [1.0, 1.0], B: [0.1], C: []}, A) == A


@pytest.mark.parametrize(
    ("eager", "fused", "expected"),
    [
        ([1, 2, 4, 8], [3, 3, 3, 3], 400),
        ([5, 5, 5, 5], [3, 3, 3, 3], 0),
        ([1, 1, 1, 1], [3, 3, 3, 3], 1600),
        ([5, 1, 5, 5], [3, 3, 3, 3], 400),
        ([1.0, 1.0, 1.0, 1.0], [1.01, 1.01, 1.01, 1.01], 0),
    ],
)
def test_crossover(eager, fused, expected):
    points = [Point(100 * 2**i, e, f) for i, (e, f) in enumerate(zip(eager, fused, strict=True))]
    assert crossover(reversed(points)) == expected


# The whole, with a clock that needs no GPU.


@pytest.mark.parametrize("name", PASSES)
def test_a_faster_tile_is_found_and_only_forward_tiles_are_kept(name, session, said):
    liked = next(block for block in blocks(name) if block != tune._block(name, TABLE))
    one = replace(session, arms=(name,))
    kept, results = tune.tuned(TABLE, BEFORE, SMALL, one, clock_that_likes(name, liked))
    expected = {
        "gain-forward": Saved(liked, UNKNOWN.compose_forward, None),
        "compose-forward": Saved(UNKNOWN.gain_forward, liked, None),
    }
    assert kept == expected.get(name, Saved(UNKNOWN.gain_forward, UNKNOWN.compose_forward, None))
    assert any("is 2.00 x as fast as the table's" in line for line in said)
    assert f"{name.replace('-', '_')}=Block{tuple(liked)}" in said[-1]
    assert [result.metrics["block"] for result in results] == [
        list(tune._block(name, TABLE)),
        list(liked),
    ]


def test_what_is_not_tuned_again_stays_as_it_was(session):
    before = Saved(A, B, 512)
    one = replace(session, arms=("compose-forward",))
    clock = clock_that_likes("compose-forward", C)
    assert tune.tuned(TABLE, before, SMALL, one, clock)[0] == Saved(A, C, 512)


def test_without_a_faster_tile_the_table_stays(session, said):
    one = replace(session, arms=("gain-forward",))
    kept, results = tune.tuned(TABLE, BEFORE, SMALL, one, clock_that_likes("gain-forward", None))
    assert kept.gain_forward == UNKNOWN.gain_forward
    assert any("stays" in line for line in said) and len(results) == 1


def test_a_tile_that_changes_a_bit_is_not_kept(session, said, monkeypatch):
    liked = blocks("gain-forward")[0]
    monkeypatch.setattr(tune, "_same_bits", lambda *arguments: False)
    one = replace(session, arms=("gain-forward",))
    kept, _ = tune.tuned(TABLE, BEFORE, SMALL, one, clock_that_likes("gain-forward", liked))
    assert kept.gain_forward == UNKNOWN.gain_forward
    assert any("differ in a bit" in line for line in said)


def crossovers(session, monkeypatch) -> Saved:
    monkeypatch.setattr(tune, "_HEIGHTS", (1, 2))
    monkeypatch.setattr(tune, "_WIDTH", 16)
    monkeypatch.setattr(tune, "calls", lambda go, count, device: 1e-3)
    one = replace(session, arms=("crossover",))
    return tune.tuned(TABLE, BEFORE, SMALL, one, lambda go: [1.0])[0]


def test_the_crossover_for_inference_is_kept_where_all_bits_agree(session, said, monkeypatch):
    monkeypatch.setattr(tune, "_equal", lambda *arguments: True)
    assert crossovers(session, monkeypatch).min_inference == 0
    assert said[-1].endswith("min_training=0, min_inference=0")


def test_and_not_kept_where_they_do_not(session, said, monkeypatch):
    monkeypatch.setattr(tune, "_equal", lambda *arguments: False)
    assert crossovers(session, monkeypatch).min_inference is None
    assert any("not kept" in line for line in said)


def test_both_ways_of_the_small_layer_agree():
    eager, fused = tune._both(3, False, CPU, _tuning._plain(UNKNOWN, 4))
    torch.testing.assert_close(eager(), fused())
    eager, fused = tune._both(3, True, CPU, _tuning._plain(UNKNOWN, 4))
    for one, other in zip(eager(), fused(), strict=True):
        torch.testing.assert_close(one, other)


# The command.


def test_on_a_cpu_there_is_nothing_to_tune(tmp_path):
    said: list[str] = []
    assert main(["tune", "--cpu", "--out", str(tmp_path)], said.append) == 0
    assert said[-1] == "There is nothing to tune: a CPU runs the plain formula, without tiles."
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU by name alone: what it would be asked to measure is answered at once."""
    gpu = torch.device("cuda", 0)
    seen = SimpleNamespace(
        name="Acme One", major=9, minor=0, multi_processor_count=4, total_memory=1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Acme One")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(_tuning, "_KNOWN", {gpu: _tuning._plain(UNKNOWN, 4)})
    monkeypatch.setattr(tune, "triton", SimpleNamespace(__version__="3.6.0"))
    found = Saved(A, B, 512), []
    monkeypatch.setattr(tune, "tuned", lambda *arguments: found)


def test_what_was_found_is_written_and_used_at_once(pretended_gpu):
    said: list[str] = []
    assert main(["tune", "--out", "none"], said.append) == 0, said
    path = _tuning_store.place("Acme One", "3.6.0")
    assert said[-1] == f"kept in {path}"
    assert json.loads(path.read_text())["min_inference"] == 512
    assert _tuning._KNOWN == {}


def test_nothing_is_written_if_not_wanted(pretended_gpu, tmp_path):
    assert main(["tune", "--keep", "off", "--out", "none"], lambda line: None) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(pretended_gpu, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    said: list[str] = []
    assert main(["tune", "--out", "none"], said.append) == BAD_INPUT
    assert "XDG_CACHE_HOME" in said[-1] and "\n" not in said[-1]


def test_an_old_gpu_is_told_why(pretended_gpu, monkeypatch):
    obstacle = "Acme One has compute capability 7.5, and Triton needs 8.0"
    old = replace(_tuning._plain(UNKNOWN, 4), obstacle=obstacle)
    monkeypatch.setitem(_tuning._KNOWN, torch.device("cuda", 0), old)
    said: list[str] = []
    assert main(["tune", "--out", "none"], said.append) == 0
    assert said[-1] == f"There is nothing to tune: {obstacle}."


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    said: list[str] = []
    words = "tune --shape 512x256 --tokens 64 --repeats 1 --arms gain-forward,crossover".split()
    assert main([*words, "--out", str(tmp_path / "out")], said.append) == 0, said
    device = torch.device("cuda", torch.cuda.current_device())
    assert "tuned on this GPU" in tiles(device).source
    _tuning.forget(device)

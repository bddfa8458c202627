"""Full-parameter steps side by side: bytes that add up, and no ratio for an arm that is wrong."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hirank.bench import optim_gate, optim_loss, optim_step
from hirank.bench.optim_memory import LivePeak, peak_of, state_bytes, weight_bytes
from hirank.bench.optim_rivals import PerLayer, galore_torch_8bit
from hirank.bench.options import BAD_INPUT, DISAGREES, main
from hirank.bench.record import read
from hirank.bench.settings import Optim
from hirank.errors import HirankError
from hirank.optim.presets import GaLoreAdamW
from hirank.optim.weights import cost, quantize_weights

OURS = ["adamw", "hirank-galore", "hirank-qgalore"]
WORDS = (
    "optim --cpu --model tiny --layers 1 --seq 16 --rank 8 --repeats 2 --warmup 0 --arms "
    + ",".join(OURS)
).split()


def measured(tmp_path: Path, *words: str, code: int = 0) -> dict[str, dict]:
    said: list[str] = []
    assert main([*WORDS, *words, "--out", str(tmp_path)], said.append) == code, said
    (file,) = tmp_path.rglob("optim.jsonl")
    return {row["arm"]: row["metrics"] for row in read(file)}


def test_every_arm_is_judged_measured_and_recorded(tmp_path: Path):
    rows = measured(tmp_path)
    assert list(rows) == OURS
    for name, row in rows.items():
        assert row["agreement"]["agrees"] and set(row["ratio"]) == set(OURS) - {name}
        assert row["peak_bytes"] >= row["plain_peak_bytes"]
        assert row["plain_peak_bytes"] > row["weight_bytes"] + row["state_bytes"]
    assert rows["hirank-galore"]["state_bytes"] == rows["hirank-galore"]["formula_bytes"]
    assert rows["hirank-galore"]["refresh_s"]["n"] == 1 and "refresh_s" not in rows["adamw"]
    assert rows["hirank-qgalore"]["weight_bytes"] < 0.5 * rows["adamw"]["weight_bytes"]
    assert rows["hirank-qgalore"]["peak_bytes"] < rows["adamw"]["peak_bytes"]


def test_staggered_refreshes_come_as_they_come(tmp_path: Path):
    rows = measured(tmp_path, "--stagger", "on", "--gap", "2", "--arms", "hirank-galore")
    assert rows["hirank-galore"]["wall_s"]["n"] == 2


def test_a_wrong_optimiser_has_times_but_no_ratio(tmp_path: Path, monkeypatch):
    def halved(model: nn.Module, **options):
        made = GaLoreAdamW(model, **options | {"scale": options["scale"] / 2})
        made.step_in_backward()
        return made

    monkeypatch.setitem(optim_step._MAKERS, "hirank-galore", halved)
    rows = measured(tmp_path, code=DISAGREES)
    assert rows["hirank-galore"]["agreement"]["off"] == pytest.approx(0.5, abs=0.01)
    assert rows["hirank-galore"]["ratio"] == {} and rows["hirank-galore"]["wall_s"]["n"] == 2
    assert set(rows["adamw"]["ratio"]) == {"hirank-qgalore"}


def test_a_basis_that_sees_too_little_is_no_galore():
    def random(model: nn.Module):
        return GaLoreAdamW(model, rank=64, lr=0.02, scale=0.5, basis="random")

    found = optim_gate.judged("hirank-galore", random, torch.device("cpu"), torch.float32)
    assert found.off < 1e-4 and found.energy < 0.5 and not found.agrees
    assert "DISAGREES" in str(found)


def test_state_of_the_wrong_size_has_no_ratio():
    right = optim_gate.Verdict(0.0, 0.1, 1.0, True)
    facts = {"wall_s": {"p50": 1.0}, "state_bytes": 10, "formula_bytes": 9}
    results = optim_step._results(
        {"adamw": {"wall_s": {"p50": 2.0}}, "hirank-galore": facts},
        {"adamw": right, "hirank-galore": right},
    )
    assert [one.metrics["ratio"] for one in results] == [{}, {}]
    assert [one.agrees for one in results] == [True, False]


@pytest.mark.parametrize(("word", "said"), [("--model=nobody", "choose from"), ("--seq=x", "give")])
def test_bad_settings_are_one_sentence(word: str, said: str):
    lines: list[str] = []
    assert main([*WORDS, word, "--out", "none"], lines.append) == BAD_INPUT
    assert said in lines[-1]


def test_a_rival_that_needs_a_gpu_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HirankError, match="needs a GPU"):
        galore_torch_8bit(nn.Linear(8, 8), rank=2, gap=3, scale=1.0, lr=0.1)


# Bytes.


def test_bytes_of_weights_and_state():
    model = nn.Linear(40, 24, bias=False)
    assert weight_bytes(model) == 40 * 24 * 4
    quantize_weights(model, ["weight"])
    assert weight_bytes(model) == cost(40 * 24)
    p = nn.Parameter(torch.zeros(3, 5))
    assert state_bytes({p: {"exp_avg": torch.zeros(3, 5), "step": torch.tensor(1.0)}}) == 60


def test_the_peak_is_of_what_lives_at_once():
    with LivePeak() as live:
        for _ in range(3):
            a = torch.zeros(1000)
            b = a + 1
            b.view(10, 100).add_(1)
            del a, b
    assert live.peak == 8000 and live.now == 0
    with peak_of(torch.device("cpu"), 100) as found:
        torch.ones(25)
    assert found.bytes == 200


def test_the_peak_sees_inside_int8_weights():
    model = nn.Linear(64, 64, bias=False)
    quantize_weights(model, ["weight"])
    x = torch.ones(1, 64)
    with LivePeak() as live:
        model(x)
    assert live.peak >= 64 * 64 * 4  # the widened weight


def test_optimisers_of_single_parameters_step_in_backward():
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    layers = PerLayer({p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()})
    model(torch.ones(2, 4)).sum().backward()
    layers.step()
    layers.zero_grad()
    assert not torch.equal(before, model.weight) and model.weight.grad is None


def test_the_loss_by_chunks_is_the_models_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optim_loss, "CHUNK", 8)
    settings = Optim(model="tiny", layers=1, checkpointing=False)
    model = optim_step._model(settings, torch.device("cpu")).double()
    ids = torch.randint(0, 200, (2, 17))
    found = []
    for loss in (model(input_ids=ids, labels=ids).loss, optim_loss.next_token_loss(model, ids)):
        model.zero_grad()
        (2 * loss).backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    assert found[0][0] == pytest.approx(float(found[1][0]), rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()

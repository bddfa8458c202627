"""Pretraining side by side: same start, same batches, same schedule, and honest numbers."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hirank.bench import optim_pretrain as suite
from hirank.bench import tables
from hirank.bench.options import BAD_INPUT, main
from hirank.bench.record import read
from hirank.bench.settings import Pretrain
from hirank.errors import HirankError
from hirank.optim.optimizer import LowRankAdamW

ROOT = Path(__file__).resolve().parents[2]
TEXT = str(ROOT / "README.md")
SMALL = Pretrain(text=TEXT, hidden=32, layers=1, heads=2, seq=16, batch=2, steps=4, rank=4, gap=2)
OURS = [name for name in suite.ARMS if name.startswith("hirank")]
WORDS = (
    f"pretrain --cpu --text {TEXT} --hidden 32 --layers 1 --heads 2 --seq 16 --batch 2 --steps 4 "
    "--rank 4 --gap 2"
).split()


def test_every_arm_learns_and_is_recorded(tmp_path: Path):
    said: list[str] = []
    arms = ",".join(["adamw", *OURS])
    code = main([*WORDS, "--arms", arms, "--out", str(tmp_path)], said.append)
    assert code == 0, said
    (file,) = tmp_path.rglob("pretrain.jsonl")
    rows = {row["arm"]: row["metrics"] for row in read(file)}
    assert list(rows) == ["adamw", *OURS]
    assert len({row["first_loss"] for name, row in rows.items() if "qgalore" not in name}) == 1
    assert all(row["eval_loss"] < row["first_loss"] for row in rows.values())
    assert "| adamw |" in said[-2] and "state MB" in said[-2]


@pytest.mark.parametrize("store", ["fp32", "int4"])
def test_two_sides_have_no_more_state_and_no_larger_rank_would_do(store: str):
    model, end = suite._model(SMALL, torch.device("cpu")), "" if store == "fp32" else "-int4"
    one = suite._MAKERS[f"hirank-galore{end}"](model, SMALL)
    two = suite._MAKERS[f"hirank-galore-two{end}"](model, SMALL)
    rank = two.param_groups[0]["rank"]
    assert two.param_groups[0]["sides"] == "two" and rank > SMALL.rank
    assert {one.param_groups[0]["basis_store"], two.param_groups[0]["basis_store"]} == {store}
    more = suite._two(model, SMALL, rank + 1, basis_store=store)
    assert two.cost() <= one.cost() < more.cost()


def test_all_arms_see_the_same_batches():
    tokens = suite._tokens(SMALL)
    first, second = (torch.stack(list(suite._batches(SMALL, tokens))) for _ in range(2))
    assert torch.equal(first, second) and first.shape == (4, 2, 16)
    other = list(suite._batches(Pretrain(**vars(SMALL) | {"seed": 1}), tokens))
    assert not torch.equal(first, torch.stack(other))


def test_the_schedule_warms_up_and_ends_at_a_tenth():
    settings = Pretrain(steps=100)
    factors = [suite._factor(step, settings) for step in range(101)]
    assert factors[0] == 0.1 and max(factors) == factors[9] == 1.0
    assert factors[100] == pytest.approx(0.1)


def test_the_held_out_end_is_never_learnt():
    tokens = suite._tokens(SMALL)
    wanted = suite._held_out_tokens(SMALL, len(tokens))
    assert SMALL.seq <= wanted <= len(tokens) // 10
    highest = max(int(ids.max()) for ids in suite._batches(SMALL, torch.arange(100)))
    assert highest < 100


def test_byte_pairs_give_the_text_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite.tempfile, "gettempdir", lambda: str(tmp_path))
    pairs = suite._tokens(Pretrain(text=TEXT, vocab=300))
    plain = suite._tokens(Pretrain(text=TEXT))
    assert len(pairs) < len(plain) and int(pairs.max()) < 300
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(suite, "_learnt_tokens", None)  # the second time they are there
    assert torch.equal(suite._tokens(Pretrain(text=TEXT, vocab=300)), pairs)


def test_state_of_a_foreign_optimiser_is_counted():
    p = nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.AdamW([p])
    p.sum().backward()
    optimizer.step()
    assert suite._facts(optimizer)["state_bytes"] == 2 * 15 * 4
    ours = suite._MAKERS["hirank-galore"](nn.Linear(8, 8), SMALL)
    assert isinstance(ours, LowRankAdamW) and suite._facts(ours)["rank"] == 4


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--text=nowhere.txt", "give a text file"),
        ("--heads=3", "does not divide into 3 heads"),
        ("--vocab=100", "at least 256"),
        ("--seq=100000", "smaller --seq"),
    ],
)
def test_bad_settings_are_one_sentence(word: str, said: str):
    lines: list[str] = []
    assert main([*WORDS, word, "--out", "none"], lines.append) == BAD_INPUT
    assert said in lines[-1]


def test_a_rival_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "galore_torch", None)
    with pytest.raises(HirankError, match="pip install galore-torch"):
        suite._MAKERS["galore-torch"](nn.Linear(8, 8), SMALL)


def test_arms_run_one_a_command_are_all_in_a_table_each_by_its_last_row():
    def row(arm: str, date: str, loss: float) -> dict:
        metrics = {"eval_loss": loss}
        return {"suite": "pretrain", "arm": arm, "settings": {}, "metrics": metrics, "date": date}

    found = [row("adamw", "1", 3.0), row("adamw", "2", 2.0), row("hirank-galore", "3", 1.0)]
    assert tables.newest(found) == found[1:]

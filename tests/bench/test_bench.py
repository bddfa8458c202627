"""The command line: every suite runs, says a table and leaves records; bad input is a sentence."""

import json
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hirank.bench import arms as arms_
from hirank.bench import gate, inference, model, session, tables
from hirank.bench.options import BAD_INPUT, DISAGREES, main
from hirank.bench.settings import Decode

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--cpu", "--repeats", "1", "--warmup", "1"]
SUITES = {
    "model": ["--seq", "16", "--rank", "4", "--accumulation", "2"],
    "layer": ["--shape", "tiny", "--rank", "4", "--tokens", "8", "--calls", "1"],
    "norm": ["--shape", "48x32", "--rank", "4", "--calls", "1"],
    "compose": ["--features", "32", "--tokens", "8", "--calls", "1"],
    "prefill": ["--seq", "16", "--rank", "4"],
    "decode": ["--prompt", "4", "--new", "2", "--cache", "dynamic,static", "--rank", "4"],
    "init": ["--rank", "4"],
    "convergence": [
        *("--text", str(ROOT / "README.md"), "--seq", "16", "--steps", "3", "--pretrain", "2")
    ],
}


class Lines(list):
    """What was said, as a whole."""

    def __str__(self) -> str:
        return "\n".join(self)


def bench(*arguments: str) -> tuple[int, str]:
    said = Lines()
    return main(arguments, said.append), str(said)


def rows(said: str) -> list[list[str]]:
    lines = [line for line in said.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def recorded(folder: Path) -> list[dict]:
    (file,) = folder.rglob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_d20_a_tiny_benchmark_in_a_process_of_its_own():
    command = [sys.executable, "-m", "hirank.bench", "--tiny", "--cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={"PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stderr
    head, _, *body = rows(done.stdout)
    found = {row[head.index("arm")]: dict(zip(head, row, strict=True)) for row in body}
    assert {"peft-lora", "peft-dora", "hirank-dora"} <= set(found)
    for row in found.values():
        numbers = [row[name] for name in ("step ms", "saved MB", "× PEFT LoRA")]
        assert all(re.match(r"[\d.,]+( ×)?$", number) for number in numbers)
    assert found["hirank-dora"]["norms per layer"] == "1"


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str, tmp_path: Path, tiny_model_dir: Path):
    settings = [*SUITES[suite], "--out", str(tmp_path)]
    if suite not in ("layer", "norm", "compose"):
        settings += ["--model", str(tiny_model_dir)]
    code, said = bench(suite, *SMALL, *settings)
    assert code == 0, said
    found = recorded(tmp_path)
    arms = {row[rows(said)[0].index("arm")] for row in rows(said)} - {"arm", "---"}
    assert {one["arm"] for one in found} == arms
    for one in found:
        assert one["suite"] == suite
        assert {"settings", "metrics", "device", "versions", "commit", "dirty", "date"} <= set(one)
        assert str(ROOT) not in json.dumps(one) and str(tmp_path) not in json.dumps(one)


def test_norms_once_a_step_with_accumulation_and_checkpointing(
    tmp_path: Path, tiny_model_dir: Path
):
    settings = ["--seq", "8", "--rank", "4", "--accumulation", "4", "--checkpointing", "on"]
    settings += ["--optimizer", "on,off", "--dropout", "0,0.1", "--arms", "peft-dora,hirank-dora"]
    settings += ["--model", str(tiny_model_dir)]
    code, said = bench("model", *SMALL, *settings, "--out", str(tmp_path))
    assert code == 0, said
    ours = [one for one in recorded(tmp_path) if one["arm"] == "hirank-dora"]
    assert len(ours) == 4
    assert [one["metrics"]["norms_per_layer"] for one in ours] == [1, 1, 1, 1]
    assert {one["metrics"]["wall_s"]["n"] for one in ours} == {1}


def test_a_judge_that_was_not_asked_for_judges_and_is_no_row(tmp_path: Path, tiny_model_dir: Path):
    settings = [*SUITES["model"], "--model", str(tiny_model_dir), "--out", str(tmp_path)]
    code, said = bench("model", *SMALL, *settings, "--arms", "base,hirank-dora")
    assert code == 0, said
    base, ours = recorded(tmp_path)
    assert (base["arm"], ours["arm"]) == ("base", "hirank-dora")
    assert ours["metrics"]["agreement"]["against"] == "peft-dora"
    assert ours["metrics"]["off_fp32"] == ours["metrics"]["agreement"]["off"]
    assert set(ours["metrics"]["ratio"]) == {"base"}


def test_combinations_share_the_base_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path
):
    built: list[weakref.ref] = []
    loaded: list[str] = []
    build, load = arms_.build, session.load_base

    def watched_build(*args, **kwargs):
        assert not any(one() for one in built), "arms of an earlier combination are still alive"
        models = build(*args, **kwargs)
        built.extend(weakref.ref(model) for model in models.values())
        return models

    monkeypatch.setattr(arms_, "build", watched_build)
    monkeypatch.setattr(session, "load_base", lambda *a: loaded.append(a[0]) or load(*a))
    settings = ["--seq", "8", "--rank", "2,4", "--checkpointing", "on,off", "--out", "none"]
    code, said = bench("model", *SMALL, *settings, "--model", str(tiny_model_dir))
    assert code == 0, said
    assert len(loaded) == 1 and len(built) == 4 * len(arms_.ARMS)


def test_an_arm_that_does_not_fit_is_a_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: Path
):
    timed = model._Arm._timed

    def too_large(arm):
        if arm.name == "peft-dora":
            raise torch.OutOfMemoryError("no room")
        return timed(arm)

    monkeypatch.setattr(model._Arm, "_timed", too_large)
    settings = [*SUITES["model"], "--model", str(tiny_model_dir), "--out", str(tmp_path)]
    code, said = bench("model", *SMALL, *settings, "--arms", "peft-lora,peft-dora,hirank-dora")
    assert code == 0 and "peft-dora: out of memory" in said
    found = {one["arm"]: one["metrics"] for one in recorded(tmp_path)}
    assert found["peft-dora"] == {"out_of_memory": True}
    assert set(found["hirank-dora"]["ratio"]) == {"peft-lora"}
    (row,) = (row for row in rows(said) if row[0] == "peft-dora")
    assert row.count("out of memory") == 1 and row.count("") == len(row) - 2


def test_no_ratio_without_agreement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: Path
):
    monkeypatch.setattr(gate, "relative_rms", lambda actual, truth: 0.5)
    settings = [*SUITES["model"], "--model", str(tiny_model_dir), "--out", str(tmp_path)]
    code, said = bench("model", *SMALL, *settings)
    assert code == DISAGREES and "no speed-up is claimed" in said
    (ours,) = (one for one in recorded(tmp_path) if one["arm"] == "hirank-dora")
    assert ours["metrics"]["ratio"] == {} and ours["metrics"]["agreement"]["agrees"] is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model", "--model", "nowhere"], "--model got 'nowhere'"),
        (["model", "--rank", "x"], "--rank got 'x'"),
        (["model", "--rank", "-4"], "--rank got -4"),
        (["model", "--optimizer", "yes"], "give on or off"),
        (["model", "--arms", "mine"], "choose from base"),
        (["model", "--loss-tokens", "1"], "no next token"),
        (["model", "--repeats", "0"], "--repeats got 0"),
        (["layer", "--shape", "4096"], "IN x OUT"),
        (["convergence"], "give a text file"),
        (["decode", "--cache", "big"], "--cache got 'big'"),
        (["compose", "--features", "8", "--tokens", "4", "--out", "/dev/null/x"], "--out"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str):
    code, said = bench(arguments[0], *SMALL, *arguments[1:])
    assert code == BAD_INPUT
    assert sentence in said.splitlines()[-1] and "Traceback" not in said


def test_help_lists_settings(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["model", "--help"], print)
    assert "--loss-tokens" in capsys.readouterr().out


def test_texts_show_what_the_results_say():
    command = [sys.executable, "scripts/tables.py", "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": "src"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def record(arm: str, date: str, rank: int, seconds: float) -> dict:
    times = {"p20": seconds, "p50": seconds, "p80": seconds, "n": 1}
    return {
        "suite": "model",
        "arm": arm,
        "settings": {"rank": rank, "optimizer": True},
        "metrics": {"wall_s": times, "ratio": {"peft-lora": 2.0} if arm != "peft-lora" else {}},
        "device": {"kind": "gpu", "name": "GPU"},
        "versions": {"torch": "2", "triton": None},
        "commit": "0123456789abcdef",
        "date": date,
    }


def test_a_text_is_filled_from_the_newest_run(tmp_path: Path):
    lines = [
        record("peft-lora", "2026-01-01", 4, 1.0),
        record("base", "2026-01-01", 4, 0.5),
        record("peft-lora", "2026-01-02", 4, 3.0),
        record("hirank-dora", "2026-01-02", 4, 6.0),
        record("peft-lora", "2026-01-02", 8, 9.0),
    ]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/model.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = "before\n<!-- results: gpu/model rank=4 -->\nold\n<!-- /results -->\nafter\n"
    new = tables.filled(text, tmp_path)
    assert rows(new)[2:] == [["peft-lora", "3,000", "1"], ["hirank-dora", "6,000", "2.00 ×"]]
    assert "old" not in new and new.startswith("before\n") and new.endswith("\nafter\n")
    assert "GPU; torch 2 at commit 0123456789, 2026-01-02. Rank 4, optimizer on." in new
    assert tables.filled(new, tmp_path) == new


def test_settings_that_vary_are_columns(tmp_path: Path):
    found = [record("base", "2026-01-01", rank, 1.0) for rank in (4, 8)]
    assert rows(tables.table(found))[0][:2] == ["rank", "arm"]


def test_a_graph_writes_the_tokens_that_a_static_cache_does(monkeypatch, tiny_model_dir: Path):
    monkeypatch.setattr(inference, "_captured", lambda call: [call(), call()] and call)  # no GPU
    base = arms_.load_base(str(tiny_model_dir), torch.device("cpu"))
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    written = {}
    for cache in ("dynamic", "static", "graph"):
        with torch.inference_mode():
            write, token = inference._writer(base, ids, Decode(prompt=3, new=4, cache=cache))
            written[cache] = [(write().clone(), token.clone()) for _ in range(4)]
    for other in ("static", "graph"):
        for (a, one), (b, two) in zip(written["dynamic"], written[other], strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(a, b)


def test_a_graph_wants_a_gpu(tiny_model_dir: Path):
    code, said = bench("decode", *SMALL, "--cache", "graph", "--model", str(tiny_model_dir))
    assert (code, said.count("needs a GPU")) == (BAD_INPUT, 1)

"""`hirank plan` as it is typed."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hirank.cli import app
from hirank.plan.catalogue import CATALOGUE
from plan.models import config

GIB = 2**30
ENVIRONMENT = {"COLUMNS": "140", "XDG_CACHE_HOME": "/dev/null"}
"""Nothing was measured on this machine."""


def run(*words: Any) -> Any:
    return CliRunner().invoke(
        app, ["plan", *map(str, words)], env={"COLUMNS": "140", "XDG_CACHE_HOME": "/dev/null"}
    )


def told(*words: Any) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.output)


def test_a_plan_says_peak_moment_and_advice():
    done = run("qwen2.5-7b", "--gpu", "24GiB")
    assert done.exit_code == 0
    for text in (
        "Fits into 24.00 GiB",
        "loss backward",
        "activations kept",
        "checkpointing = true",
    ):
        assert text in done.output


def test_what_does_not_fit_has_exit_code_1():
    done = run("qwen2.5-7b", "--gpu", "16GiB")
    assert done.exit_code == 1
    assert "Does not fit into 16.00 GiB" in done.output


def test_json_holds_the_whole_ledger():
    found = told("qwen2.5-7b", "--method", "full")
    assert found["parameters"] == 7_615_616_512
    assert found["allocated"] == sum(found["phases"][found["moment"]].values())
    assert found["setting"]["base_dtype"] == "fp32"  # as hirank train loads it
    assert {"reserved", "process", "terms", "notes", "advice", "fits"} <= set(found)


def test_explain_prints_formulas_with_their_numbers():
    done = run("qwen2.5-7b", "--explain")
    assert "7,615,616,512 weights x 2 bytes" in done.output
    assert "r (in + out) = 40,370,176 numbers x 4 bytes" in done.output


def test_fit_names_changes_and_their_price():
    done = run("qwen2.5-7b", "--batch", 8, "--seq", 2048, "--fit", "40GiB")
    assert done.exit_code == 0
    assert "checkpointing = true" in done.output
    assert "about a third more time" in done.output


def test_fit_may_find_nothing():
    done = run("llama-3.3-70b", "--fit", "8GiB")
    assert done.exit_code == 1
    assert "smaller model" in done.output


def test_the_largest_batch():
    done = run("qwen2.5-7b", "--max", "batch", "--gpu", "h100", "--checkpointing")
    assert re.search(r"The largest batch that fits into 79.65 GiB is \d+\.", done.output)
    assert told("qwen2.5-7b", "--max", "seq", "--gpu", "8GiB")["value"] == 0


def test_compare_lists_the_methods():
    done = run("llama-3.1-8b", "--compare", "--gpu", "24GiB")
    assert done.exit_code == 0
    for name in ("qdora", "dora-peft", "galore", "full, fp32 weights"):
        assert name in done.output
    assert re.search(r"\d of 12 fit", done.output)


def test_models_are_listed_with_their_source():
    done = run("--models")
    assert all(entry.repository in done.output for entry in CATALOGUE.values())


def test_a_page_is_written(tmp_path: Path):
    page = tmp_path / "plan.html"
    done = run("qwen2.5-0.5b", "--html", page, "--gpu", "24GiB")
    assert done.exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "One step" in text and "qwen2.5-0.5b" in text and "Where each byte comes from" in text
    assert "http://" not in text.split("<script>")[0]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_the_other_engine(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("llama", num_hidden_layers=1)))
    words = (file, "--seq", 64, "--rank", 4)
    closed, traced = told(*words), told(*words, "--engine", "trace")
    assert traced["allocated"] == pytest.approx(closed["allocated"], rel=0.1)


# Where a model may come from.


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"])
def test_names_of_repositories_are_known(name: str):
    assert told(name)["parameters"] == 7_615_616_512


def test_a_folder_and_its_config(tmp_path: Path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("llama")))
    assert told(folder) | {"setting": 0} == told(folder / "config.json") | {"setting": 0}
    assert told(folder)["model"] == "my-model"


def test_a_model_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub

    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("qwen3")))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(file))
    assert told("some/model")["parameters"] > 0


def test_the_configuration_of_a_run(tmp_path: Path, tiny_model_dir: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {tiny_model_dir}\ndata: rows.jsonl\nmethod: lora\n")
    found = told(file, "--set", "optim.batch_size=3", "--set", "data.max_length=99")
    assert found["setting"]["batch"] == 3 and found["setting"]["sequence"] == 99
    assert found["setting"]["method"] == "lora" and found["setting"]["eval_batch"] == 8


def test_options_win_over_the_configuration(tmp_path: Path, tiny_model_dir: Path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {tiny_model_dir}\ndata: rows.jsonl\n")
    assert told(file, "--rank", 3)["setting"]["rank"] == 3


def test_another_method_than_the_configurations_has_its_own_rank_and_weights(
    tmp_path: Path, tiny_model_dir: Path
):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {tiny_model_dir}\nmethod: {{name: lora, r: 4}}\ndata: rows.jsonl\n")
    assert told(file, "--method", "dora")["setting"]["rank"] == 4
    assert told(file, "--method", "galore")["setting"]["rank"] == 128
    assert told(file, "--method", "full")["setting"]["base_dtype"] == "fp32"


def test_no_number_is_cut_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENVIRONMENT, "COLUMNS", "80")
    done = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--compare"], env=ENVIRONMENT)
    assert re.search(r"qlora +16 +41.9 M +[0-9.]+ GiB +[0-9.]+ GiB ", done.output)


def test_what_eager_alone_can_do_is_planned_with_eager():
    assert told("gemma-2-2b")["setting"]["attention"] == "eager"


# What is refused.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Give a model"),
        (["qwen2.5-8b"], "nearest known one is qwen2.5-7b"),
        (["/no/such/folder"], "There is no model /no/such/folder"),
        (["qwen2.5-7b", "--method", "lara"], "nearest known one is lora"),
        (["qwen2.5-7b", "--gpu", "24"], "is 24GiB meant"),
        (["qwen2.5-7b", "--gpu", "24GiB", "--fit", "24GiB"], "give one of them"),
        (["qwen2.5-7b", "--max", "seq"], "add --gpu"),
        (["qwen2.5-7b", "--max", "tokens", "--gpu", "24GiB"], "seq, batch or rank"),
        (["qwen2.5-7b", "--rank", "0"], "at least 1"),
        (["qwen2.5-7b", "--targets", "q_porj,v_proj"], "nearest known one is q_proj"),
        (["qwen2.5-7b", "--sharding", "fsdp2"], "set world"),
        (["qwen2.5-7b", "--step-in-backward"], "belongs to galore"),
        (["qwen2.5-7b", "--set", "a.b=1"], "changes the YAML file"),
        (["gemma-2-2b", "--attention", "sdpa"], "softcap"),
        (["qwen2.5-7b", "--engine", "tarce"], "closed or trace"),
        (["no.yaml"], "Cannot read the configuration"),
        (["qwen2.5-7b", "--rank", "9" * 400], "rank is more than any run has"),
        (["qwen2.5-7b", "--gpu", "9" * 400 + "GiB"], "more than 1 PiB"),
        (["qwen2.5-7b", "--compare", "--html", "plan.html"], "--html belongs to a plan"),
        (["qwen2.5-7b", "--fit", "8GiB", "--explain"], "--explain belongs to a plan"),
        (["qwen2.5-7b", "--max", "seq", "--gpu", "8GiB", "--engine", "trace"], "not to --max"),
        (["qwen2.5-7b", "--compare", "--fit", "8GiB"], "two questions"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(words: list[str], said: str):
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[1]", "settings by name"),
        ("config.json", '{"model_type": "bert"}', "nothing"),
        ("model.gguf", "GGUF", "GGUF file"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, name: str, text: str, said: str):
    file = tmp_path / name
    file.write_text(text)
    done = run(file)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_folder_without_a_config(tmp_path: Path):
    assert "has no config.json" in run(tmp_path).stderr


def test_a_plan_needs_no_torch():
    code = (
        "import sys; from hirank.plan.find import find_shape;"
        "from hirank.plan.closed import closed_form; from hirank.plan.setting import Setting;"
        "closed_form(Setting('x'), find_shape('qwen2.5-7b')); print('torch' in sys.modules)"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(source), "PATH": ""},
    )
    assert done.stdout.strip() == "False", done.stderr


# What the page for newcomers shows.

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```\n\$ hirank plan ([^\n]*)\n(.*?)```", PAGE, re.S)


def test_there_is_something_shown():
    assert len(SHOWN) >= 4


@pytest.mark.parametrize(("words", "output"), SHOWN, ids=[words for words, _ in SHOWN])
def test_what_the_page_shows_is_printed(words: str, output: str):
    done = CliRunner().invoke(
        app, ["plan", *words.split()], env={"COLUMNS": "100", "XDG_CACHE_HOME": "/dev/null"}
    )
    assert stripped(done.output) == stripped(output)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

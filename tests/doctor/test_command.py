"""`hirank doctor`: exit codes, text and JSON, configurations and adapter folders."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from doctor.cases import edit, trained, wrap
from helpers import chat_rows, save_tiny_model, tiny_llama, write_jsonl
from hirank.cli import app

ROOT = Path(__file__).resolve().parents[2]


def doctor(*words: object):
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def names(*words: object) -> list[str]:
    result = doctor(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return [finding["name"] for finding in json.loads(result.stdout)["findings"]]


@pytest.fixture
def config(tmp_path, tiny_model_dir):
    """A sound configuration, with changes laid over its sections."""

    def make(**changes) -> Path:
        tree = {
            "model": {"name": str(tiny_model_dir), "device": "cpu"},
            "data": {"train": str(write_jsonl(tmp_path / "rows.jsonl", chat_rows()))},
            "method": {"name": "dora", "r": 4},
        }
        tree["data"]["max_length"] = 128
        for part, values in changes.items():
            tree[part] = tree.get(part, {}) | values
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(tree))
        return tmp_path / "train.yaml"

    return make


@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "full"])
@pytest.mark.parametrize("accelerate", [True, False])
def test_a_sound_training(config, method, accelerate):
    result = doctor(config(method={"name": method, "accelerate": accelerate}))
    assert result.exit_code == 0, result.output
    adapted = "14 adapted layers, " * (method != "full")
    assert result.stdout == f"Nothing found; looked at model, {adapted}configuration, batch.\n"


def test_the_demo(config, tiny_model_dir):
    demo = ROOT / "examples/demo/config.yaml"
    told = ["--set", f"model.name={tiny_model_dir}", "--set", "method.r=4"]
    assert doctor(demo, *told, "--set", "method.alpha=4").exit_code == 0


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"dropout": 0.1}, ["dropout-second-gemm"]),
        ({"r": 20, "target_modules": ["k_proj"], "alpha": 40}, ["rank-above-layer"]),
        ({"r": 15, "target_modules": ["k_proj"]}, ["adapter-larger-than-layer"]),
        ({"alpha": 100}, ["scale-far-off"]),
        ({"target_modules": ["q_proj", "vproj"]}, ["target-matches-nothing"]),
        ({"rank_pattern": {"qproj": 2}}, ["pattern-matches-nothing"]),
        (
            {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
            ["saved-and-targeted"],
        ),
    ],
)
def test_what_settings_give_away(config, method, expected):
    path = config(method=method)
    assert names(path) == expected
    assert doctor(path).exit_code == 1


def test_shared_embeddings_of_the_base_model(config, tmp_path):
    tied = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    path = config(model={"name": str(tied)}, method={"modules_to_save": ["lm_head"]})
    assert names(path) == ["tied-embeddings"]


def test_full_training_in_half_precision_is_judged_by_the_weights_on_disk(config):
    half = config(method={"name": "full"}, model={"dtype": "bfloat16"})
    assert names(half) == ["updates-round-away"]
    assert "the other trained weights" in doctor(half).stdout
    assert names(half, "--set", "optim.lr=0.1") == []


def test_overrides_and_rows_that_are_too_long(config):
    path = config()
    assert names(path, "--set", "data.max_length=4096") == ["longer-than-positions"]


def test_several_processes(config):
    assert names(config(), "--world-size", 4) == []


def test_an_adapter_folder(tmp_path):
    trained().save_pretrained(tmp_path)
    assert doctor(tmp_path).stdout == "Nothing found; looked at adapter folder.\n"
    edit(tmp_path, lambda settings: settings.pop("lora_alpha"))
    assert names(tmp_path) == ["alpha-missing"]


def test_an_adapter_in_the_folder_of_a_run(tmp_path):
    wrap().save_pretrained(tmp_path / "adapter")
    assert names(tmp_path) == ["file-weights-untrained"]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # saving names them as well
def test_an_adapter_and_its_base(tmp_path, tiny_model_dir):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    for kind in ({}, {"use_dora": True}):
        trained(target_modules=["q_proj", "lm_head"], **kind).save_pretrained(tmp_path / "a")
        assert doctor(tmp_path / "a", "--base", tiny_model_dir).exit_code == 0
        assert names(tmp_path / "a", "--base", tmp_path / "tied") == ["tied-embeddings"]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # saving names them as well
def test_the_base_that_the_adapter_names(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    trained(target_modules=["q_proj", "lm_head"]).save_pretrained(tmp_path / "a")
    named = {"base_model_name_or_path": str(tmp_path / "tied")}
    edit(tmp_path / "a", lambda settings: settings.update(named))
    assert names(tmp_path / "a") == ["tied-embeddings"]
    edit(tmp_path / "a", lambda settings: settings.update(base_model_name_or_path="far/away"))
    assert names(tmp_path / "a") == []


def test_json_says_all(config):
    told = json.loads(doctor(config(method={"alpha": 100}), "--json").stdout)
    assert told["looked_at"] == ["model", "14 adapted layers", "configuration", "batch"]
    (finding,) = told["findings"]
    assert sorted(finding) == ["evidence", "fix", "level", "name", "source", "title"]


def test_bad_input_is_one_sentence_and_code_2(config, tmp_path, tiny_model_dir):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/adapter_config.json").write_text("{")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    trained(target_modules=["q_proj"]).save_pretrained(tmp_path / "other")
    edit(tmp_path / "other", lambda settings: settings.update(target_modules=["nowhere"]))
    for words, says in (
        ([tmp_path / "gone.yaml"], "Cannot read the configuration"),
        ([tmp_path / "empty"], "holds no adapter_config.json"),
        ([tmp_path / "bad"], "cannot be read as JSON"),
        ([tmp_path / "bare"], "cannot be read as safetensors"),
        ([tmp_path / "other", "--base", tiny_model_dir], "does not fit"),
        ([config(), "--set", "method.target_modules=[nowhere]"], "matches no layer"),
        ([config(), "--base", tiny_model_dir], "--base goes with an adapter folder"),
        ([config(), "--set", "model.name=/no/where"], "no model folder"),
    ):
        result = doctor(*words)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert says in result.stderr and result.stderr.count("\n") == 1, result.stderr

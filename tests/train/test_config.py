"""Settings from a file and from --set: what wins, what is refused, and in which words."""

import json
import re
from pathlib import Path

import pytest
import yaml

from hirank.errors import HirankError
from hirank.train.config import (
    ALIASES,
    TrainConfig,
    build_config,
    dump_config,
    load_config,
    resolved,
)

MINIMAL = {"model": "some/model", "data": "rows.jsonl"}
MINIMAL_TREE = {"model": {"name": "some/model"}, "data": {"train": "rows.jsonl"}}


def config_file(folder: Path, tree: object) -> Path:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def refusal(folder: Path, tree: dict, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(HirankError) as caught:
        load_config(config_file(folder, MINIMAL | tree), overrides)
    return str(caught.value)


# What is read.


def test_a_model_and_data_are_enough(tmp_path):
    config = load_config(config_file(tmp_path, MINIMAL))
    assert config.model.name == "some/model"
    assert config.data.train == [Path("rows.jsonl")]
    assert config.method.name == "dora"


def test_set_wins_over_the_file(tmp_path):
    path = config_file(tmp_path, MINIMAL | {"method": {"r": 8, "dropout": 0.1}})
    config = load_config(path, ["method.r=32", "optim.lr=1e-4", "method.target_modules=[a, b]"])
    assert (config.method.r, config.method.dropout, config.optim.lr) == (32, 0.1, 1e-4)
    assert config.method.target_modules == ["a", "b"]


def test_settings_may_come_from_set_alone():
    config = load_config(None, ["model=some/model", "data.train=[a.jsonl, b.jsonl]", "method=lora"])
    assert (config.method.name, len(config.data.train)) == ("lora", 2)


def test_lr_without_a_dot_is_a_number(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: a/b\ndata: d.jsonl\noptim: {lr: 2e-4}\n")
    assert load_config(path).optim.lr == 2e-4


@pytest.mark.parametrize("place", ["", "method."])
def test_other_trainers_names_are_understood(tmp_path, place):
    config = load_config(config_file(tmp_path, MINIMAL), [f"{place}lora_rank=4"])
    assert config.method.r == 4


def test_every_alias_leads_to_a_setting():
    known = {
        f"{part}.{key}"
        for part, info in TrainConfig.model_fields.items()
        for key in info.annotation.model_fields
    }
    assert set(ALIASES.values()) <= known
    assert not set(ALIASES) & {"model", "data", "method", "optim", "eval", "run"}


def test_paths_are_looked_up_here_then_beside_the_file(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "rows.jsonl").touch()
    (tmp_path / "here.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    tree = MINIMAL | {"data": {"train": ["rows.jsonl", "here.jsonl"], "eval": "nowhere.jsonl"}}
    config = load_config(config_file(tmp_path / "conf", tree))
    assert config.data.train == [tmp_path / "conf" / "rows.jsonl", tmp_path / "here.jsonl"]
    assert config.data.eval == [Path("nowhere.jsonl")]


def test_a_written_configuration_reads_back_the_same(tmp_path):
    config = load_config(config_file(tmp_path, MINIMAL), ["run.dir=out", "data.eval=e.jsonl"])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(("method", "lr", "alpha"), [("dora", 2e-4, 32), ("full", 1e-5, None)])
def test_defaults_that_follow_from_others_are_filled_in(method, lr, alpha):
    config = resolved(build_config({"model": {"name": "m"}, "data": {"train": "d"}} | {
        "method": {"name": method}
    }))  # fmt: skip
    assert (config.optim.lr, config.method.alpha) == (lr, alpha)


def test_every_setting_says_what_it_is():
    for part in TrainConfig.model_fields.values():
        for name, setting in part.annotation.model_fields.items():
            assert setting.description, name


# What is refused.


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"methdo": {"r": 4}}, "methdo; the nearest known one is method."),
        ({"method": {"rnk": 4}}, "method.rnk"),
        ({"optim": {"epoch": 4}}, "optim.epoch; the nearest known one is optim.epochs."),
        ({"max_lenght": 4}, "max_lenght; the nearest known one is data.max_length."),
        ({"eval": {"zzz": 4}}, "eval.zzz; known here: eval.every"),
    ],
)
def test_unknown_keys_name_the_nearest_known_one(tmp_path, tree, named):
    assert f"Unknown setting {named}" in refusal(tmp_path, tree)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.r=many", "method.r is 'many'"),
        ("method.r=0", "method.r is 0"),
        ("optim.lr=[1]", "optim.lr is [1]"),
        ("method.name=qlora", "method.name is 'qlora': the methods are lora, rslora, dora, full"),
        ("optim.scheduler=sine", "optim.scheduler is 'sine'"),
        ("run.name=a/b", "run.name is 'a/b'"),
        ("data.train=[]", "data.train"),
        ("optim=fast", "optim: fast names an optimiser that is not here; use one of galore_adamw"),
    ],
)
def test_wrong_values_are_one_sentence_with_the_dotted_path(tmp_path, override, said):
    sentence = refusal(tmp_path, {}, (override,))
    assert said in sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize("override", ["method.r", "=4", "method..r=4", "method.r=[4"])
def test_malformed_overrides_are_refused(tmp_path, override):
    assert override in refusal(tmp_path, {}, (override,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", "not valid YAML: line 1"),
        ("- a\n- b\n", "must hold settings by name"),
        ("", "The setting model is missing"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(HirankError, match=said):
        load_config(tmp_path / "c.yaml")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(HirankError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_the_same_setting_under_two_names_is_refused(tmp_path):
    sentence = refusal(tmp_path, {"method": {"r": 8}, "lora_r": 16})
    assert "lora_r" in sentence and "method.r" in sentence


# Files that YAML itself trips over.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim: {lr: 1e-4}\noptim: {lr: 0.5}\n", "optim is given twice"),
        ("optim: {lr: 1e-4, lr: 0.5}\n", "line 1, lr is given twice"),
        ("run: {name: 2020-13-45}\n", "month must be in 1..12"),
        ("run: {keep: !!int abc}\n", "invalid literal"),
        ("run: {keep: " + "9" * 5000 + "}\n", "Exceeds the limit"),
        ("model: " + "[" * 3000, "nested too deeply"),
        ("model: a/b\ndata: {train: &a [*a]}\n", "data.train"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path, text, said):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(HirankError, match=re.escape(said)) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_merge_key_may_override_what_it_merges(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: &m {name: a/b, dtype: auto}\n"
        "data: {train: d.jsonl}\n"
        "optim: {<<: &o {lr: 1e-4, epochs: 2}, lr: 3e-4}\n"
    )
    assert (load_config(path).optim.lr, load_config(path).optim.epochs) == (3e-4, 2)


@pytest.mark.parametrize("override", ["run.name=2020-99-99", "optim.lr=" + "[" * 3000])
def test_set_takes_no_impossible_yaml(override):
    with pytest.raises(HirankError, match="is not valid YAML"):
        load_config(None, [override])


@pytest.mark.parametrize(
    "override",
    ["optim.lr=.inf", "optim.epochs=.inf", "optim.warmup=.inf", "eval.every=.inf"]
    + ["run.save_every=.inf", "method.alpha=.inf", "method.alpha_pattern={q_proj: .inf}"]
    + ["method.alpha_pattern={q_proj: -1}", "optim.seed=4294967296", "method.target_modules=("]
    + ["method.rank_pattern={'[': 4}"],
)
def test_numbers_and_patterns_that_nothing_can_be_done_with(tmp_path, override):
    assert override.partition("=")[0] in refusal(tmp_path, {}, (override,))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"])
def test_impossible_names_of_files_are_left_to_those_who_open_them(name):
    config = load_config(None, [f"model={json.dumps(name)}", f"data.train={json.dumps(name)}"])
    assert str(config.data.train[0]) == str(Path(name))


def test_a_run_folder_may_be_in_the_home_folder_but_must_have_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_config(MINIMAL_TREE | {"run": {"dir": "~/x"}}).run.dir == tmp_path / "x"
    with pytest.raises(HirankError, match="null character"):
        build_config(MINIMAL_TREE | {"run": {"dir": "a\0b"}})

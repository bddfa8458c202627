"""Finding a model, and refusing one that is not there or cannot be read."""

import json
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import save_tiny_model, tiny_llama, tiny_tokenizer
from hirank.errors import HirankError
from hirank.train.model import (
    ModelConfig,
    learned_positions,
    load_architecture,
    load_model,
    load_tokenizer,
    locate,
    meta_model,
    pick_dtype,
)


def test_a_folder_is_found_wherever_we_are(tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tiny_model_dir.parent)
    found = locate(tiny_model_dir.name)
    assert (found.path, found.local) == (str(tiny_model_dir), True)


@pytest.mark.parametrize("name", ["gpt2", "org/model-1.5b", "Org_2/m.v1"])
def test_a_hub_name_is_left_to_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate(name).local is False


@pytest.mark.parametrize("name", ["./model", "/no/such/model", "a/b/c", "~/nothing/at/all", "../m"])
def test_a_path_that_does_not_exist_never_goes_to_the_hub(name):
    with pytest.raises(HirankError, match="There is no model folder"):
        locate(name)


def test_a_name_inside_an_existing_folder_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "models" / "llama-tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HirankError, match="similar names there: models/llama-tiny"):
        locate("models/lama-tiny")


def test_gguf_files(tmp_path):
    (tmp_path / "a.gguf").touch()
    for name in (tmp_path, tmp_path / "a.gguf"):
        assert locate(str(name)).path == str(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(HirankError, match="a.gguf, b.gguf"):
        locate(str(tmp_path))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(HirankError, match="is a file"):
        locate(str(tmp_path / "model.bin"))


def test_the_shapes_are_known_without_the_weights(tiny_model_dir):
    config = ModelConfig(name=str(tiny_model_dir), device="cpu")
    shape, real = meta_model(config, load_architecture(config)), load_model(config)
    assert {p.device.type for p in shape.parameters()} == {"meta"}
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (shape, real)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("dtype", "device", "full", "expected"),
    [
        ("auto", "cpu", False, torch.float32),
        ("auto", "cuda", False, torch.bfloat16),
        ("auto", "cuda", True, torch.float32),
        ("bfloat16", "cpu", False, torch.bfloat16),
        ("float32", "cuda", False, torch.float32),
    ],
)
def test_precision(dtype, device, full, expected):
    config = ModelConfig(name="m", dtype=dtype)
    assert pick_dtype(config, torch.device(device), full=full) == expected


def test_a_gpu_that_is_not_there_is_refused(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HirankError, match="sees no GPU"):
        load_model(ModelConfig(name=str(tiny_model_dir), device="cuda"))


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    save_tiny_model(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert loaded.pad_token == loaded.eos_token


def test_a_tokenizer_from_elsewhere(tmp_path, tiny_model_dir):
    tiny_tokenizer(chat_template="{{ 'other' }}").save_pretrained(tmp_path / "other")
    config = ModelConfig(name=str(tiny_model_dir), tokenizer=str(tmp_path / "other"))
    assert load_tokenizer(config).chat_template == "{{ 'other' }}"


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-architecture"}', "{}"])
def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HirankError, match="Cannot read the configuration") as caught:
        load_architecture(ModelConfig(name=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, "are missing"),
        ({"intermediate_size": 96}, "have another shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused_instead_of_made_up(
    tiny_model_dir, tmp_path, change, said
):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(HirankError, match=said):
        load_model(ModelConfig(name=str(folder)))


@pytest.mark.parametrize("change", [{"hidden_size": "abc"}, {"num_attention_heads": 5}, None])
def test_a_config_that_makes_no_sense_is_refused(tiny_model_dir, tmp_path, change):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change if change else []))
    with pytest.raises(HirankError, match="Cannot read the configuration") as caught:
        load_architecture(ModelConfig(name=str(folder)))
    assert "\n" not in str(caught.value)


def test_a_file_that_only_begins_like_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUFxxxx")
    with pytest.raises(HirankError, match="Cannot read the"):
        load_tokenizer(ModelConfig(name=str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_name_too_long_for_a_file_is_no_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        assert locate(name).local is False
    except HirankError as error:
        assert "There is no model folder" in str(error)


def test_learned_positions_are_told_from_computed_ones():
    small = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=16)
    assert learned_positions(GPT2LMHeadModel(small)) == 16
    assert learned_positions(tiny_llama(vocab=512)) is None

"""Finding a model, and refusing one that is not there or cannot be read."""

import pytest
import torch

from helpers import save_tiny_model, tiny_tokenizer
from hirank.errors import HirankError
from hirank.train.model import (
    ModelConfig,
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

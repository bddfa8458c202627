"""Model folders read and written tensor by tensor are those that safetensors reads and writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hirank.adapters.base_files import DTYPES, BaseFolder, Entry, ShardWriter
from hirank.errors import HirankError


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"a.{name}": torch.rand(3, 5).mul(9).to(dtype) for name, dtype in DTYPES.items()}
    return made | {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "odd": torch.rand(7)}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and (
        left.reshape(-1).view(torch.uint8).tolist() == right.reshape(-1).view(torch.uint8).tolist()
    )


def test_every_dtype_is_read_to_the_bit(tmp_path: Path):
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    folder = BaseFolder(tmp_path)
    assert set(folder.entries) == set(tensors())
    assert folder.nbytes == sum(tensor.nbytes for tensor in tensors().values())
    for key, tensor in tensors().items():
        assert same(folder.tensor(key), tensor), key


def test_every_dtype_is_written_to_the_bit(tmp_path: Path):
    file, held = tmp_path / "model.safetensors", tensors()
    entries = [Entry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in held.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    with ShardWriter(file, entries) as writer:
        for entry in entries:
            writer.write(held[entry.key])
    found = load_file(file)
    assert all(same(found[key], tensor) for key, tensor in held.items())


def test_a_writer_that_is_left_early_or_fed_wrongly_says_so(tmp_path: Path):
    entry = Entry("a", torch.float32, (2,))
    with pytest.raises(ValueError, match="lacks a"), ShardWriter(tmp_path / "x", [entry]):
        pass
    with (
        pytest.raises(ValueError, match="a was announced as torch.float32"),
        ShardWriter(tmp_path / "x", [entry]) as writer,
    ):
        writer.write(torch.zeros(3))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.a.weight", "model.a.weight"),
        ("a.weight", "model.a.weight"),
        ("transformer.h.b", "h.b"),
        ("b", None),  # two that may be meant
        ("model.none", None),
    ],
)
def test_names_with_a_prefix_more_or_less(tmp_path: Path, name: str, key: str | None):
    one = torch.zeros(1)
    save_file(
        {"model.a.weight": one, "h.b": one.clone(), "g.b": one.clone()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    folder = BaseFolder(tmp_path)
    assert folder.key_of(name) == key
    if key is None:
        with pytest.raises(HirankError, match=f"has no {name}: is it the base"):
            folder.weight(name)


def test_a_stale_index_is_not_believed(tmp_path: Path):
    """Transformers, too, looks for the single file first."""
    for file, value in (("model.safetensors", 1.0), ("model-00001-of-00001.safetensors", 2.0)):
        save_file({"a": torch.tensor([value])}, tmp_path / file)
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    assert BaseFolder(tmp_path).weight("a").item() == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "cannot be read as JSON: give the folder of a Transformers model"),
        ({"config.json": "[]"}, "holds no settings"),
        ({"config.json": "{}"}, "has no model.safetensors: save the model as safetensors"),
        ({"config.json": "{}", "model.gguf": ""}, "has model.gguf, but no model.safetensors"),
        ({"config.json": "{}", "model.safetensors": "torn"}, "cannot be read .*; fetch it again"),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "has no weight_map"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": json.dumps({"weight_map": {"a": "b"}}),
            },
            "lacks b, which its index names",
        ),
    ],
)
def test_folders_that_hold_no_model(tmp_path: Path, files: dict[str, str], said: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(HirankError, match=said):
        BaseFolder(tmp_path)
    with pytest.raises(HirankError, match="is no folder"):
        BaseFolder(tmp_path / "none")

"""Adapter folders read without a model hold what PEFT's layers hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from hirank.adapters.files import AdapterFolder
from hirank.errors import HirankError

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])
        self.turned = Conv1D(10, 6)
        self.image = nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(6, 3)


def saved(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 6, "use_dora": True} | changes
    targets = ["words", "layers.0", "layers.1", "turned", "image"]
    model = get_peft_model(Kinds(), LoraConfig(target_modules=targets, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": False, "use_rslora": True},
        {"rank_pattern": {"layers.1": 2, "words": 3}, "alpha_pattern": {"image": 5}},
        {"modules_to_save": ["head"]},
    ],
    ids=str,
)
def test_every_layer_is_what_peft_has(tmp_path: Path, changes: dict[str, Any]):
    model = saved(tmp_path, **changes)
    folder = AdapterFolder(tmp_path)
    assert folder.names == ["image", "layers.0", "layers.1", "turned", "words"]
    for layer in folder:
        theirs = model.base_model.model.get_submodule(layer.name)
        assert (layer.rank, layer.scale) == (theirs.r["default"], theirs.scaling["default"])
        delta = theirs.get_delta_weight("default")
        if layer.kind == "embedding" or layer.name == "turned":
            delta = delta.T
        torch.testing.assert_close(layer.scale * layer.B @ layer.A, delta.flatten(1))
        if folder.dora:
            weight = theirs.lora_magnitude_vector["default"].weight
            assert torch.equal(layer.magnitude, weight.flatten())
        else:
            assert layer.magnitude is None


def test_weights_that_were_trained_whole_are_listed_apart(tmp_path: Path):
    model = saved(tmp_path, modules_to_save=["head"], bias="lora_only")
    folder = AdapterFolder(tmp_path)
    assert set(folder.others) == {
        "head.weight", "head.bias", "layers.0.bias", "layers.1.bias", "turned.bias", "image.bias",
    }  # fmt: skip
    head = model.base_model.model.head.modules_to_save["default"].weight
    assert torch.equal(folder.tensor(folder.others["head.weight"]), head)


@pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape")  # so says PEFT of its own
def test_a_trained_lora_bias_is_read(tmp_path: Path):
    torch.manual_seed(0)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["layers.0"], lora_bias=True)
    model = get_peft_model(Kinds(), config)
    bias = model.base_model.model.layers[0].lora_B["default"].bias
    bias.data.normal_()
    model.save_pretrained(tmp_path)
    assert torch.equal(AdapterFolder(tmp_path).layer("layers.0").bias, bias)


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


KEY = "base_model.model.layers.0."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(KEY + "lora_B.weight"), "has no lora_B for layers.0"),
        (lambda t: t.pop(KEY + "lora_magnitude_vector"), "has no lora_magnitude_vector for"),
        (lambda t: t[KEY + "lora_A.weight"].fill_(torch.nan), "that are not finite"),
        (lambda t: t.clear(), "no lora_magnitude_vector"),
        (
            lambda t: [t.pop(KEY + part) for part in ("lora_A.weight", "lora_B.weight")],
            "has no lora_A for layers.0",
        ),
        (
            lambda t: t.update({KEY + "lora_B.weight": torch.zeros(8, 3)}),
            r"layers.0 A \[4, 6\] and B \[8, 3\], which have no rank in common",
        ),
        (
            lambda t: t.update({KEY + "lora_B.weight": torch.zeros(8)}),
            r"and B \[8\], which have no",
        ),
        (lambda t: t.update({KEY + "lora_A.weight": torch.zeros(0, 6)}), r"A \[0, 6\]"),
        (
            lambda t: t.update({KEY + "lora_A.weight": torch.ones(4, 6).int()}),
            "A that are no float",
        ),
        (lambda t: t.update({KEY + "lora_magnitude_vector": torch.ones(7)}), "8 rows and 7 magn"),
    ],
    ids=["B", "m", "nan", "empty", "only m", "rank", "one side", "no rank", "whole", "few m"],
)
def test_what_is_wrong_with_the_weights_is_said(tmp_path: Path, change: Any, said: str):
    saved(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(HirankError, match=said):
        list(AdapterFolder(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 8}, "has rank 4 in image, for which the settings say 8"),
        ({"peft_type": "LOHA"}, "holds a LOHA adapter: give one of LoRA or DoRA"),
        ({"lora_alpha": None}, "has no lora_alpha"),
        ({"use_dora": False}, "holds lora_magnitude_vector weights but use_dora"),
        ({"lora_alpha": float("nan")}, "has alpha nan for image, which is no strength"),
        ({"lora_alpha": 1e300}, r"has alpha 1e\+300 for image"),
        ({"alpha_pattern": {"image": "8"}}, "has alpha '8' for image"),
        ({"rank_pattern": {"image(": 4}}, "rank_pattern or alpha_pattern that cannot be read"),
        ({"rank_pattern": ["image"]}, "rank_pattern or alpha_pattern that cannot be read"),
    ],
)
def test_what_is_wrong_with_the_settings_is_said(tmp_path: Path, changes: Any, said: str):
    saved(tmp_path)
    change_settings(tmp_path, **changes)
    with pytest.raises(HirankError, match=said):
        list(AdapterFolder(tmp_path))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "gaussian"}, None),
    ],
)
def test_an_adapter_that_says_less_than_all_is_told(tmp_path: Path, changes: Any, why: str | None):
    saved(tmp_path)
    change_settings(tmp_path, **changes)
    found = AdapterFolder(tmp_path).obstacle()
    assert found is None if why is None else why in found

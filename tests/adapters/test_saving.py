"""Files of a converted model: nothing is lost, and they are whole or not there."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import hirank
from adapters.setups import Lin, layer_of, perturb, wrap
from adapters.several import several


def spoiled(part, value):
    def change(model):
        getattr(layer_of(model), part)["default"].weight.data.view(-1)[1] = value

    return change


def settings(**fields):
    def change(model):
        for field, value in fields.items():
            setattr(model.peft_config["default"], field, value)

    return change


LOSSES = {
    "NaN in A": (spoiled("lora_A", torch.nan), "holds NaN or infinity"),
    "infinite m": (spoiled("lora_magnitude_vector", torch.inf), "holds NaN or infinity"),
    "no alpha": (settings(lora_alpha=None), "whose settings say None"),
    "another alpha": (settings(lora_alpha=5), "whose settings say 5"),
    "another rank": (settings(r=5), "whose settings say 5"),
    "rslora": (settings(use_rslora=True), "another strength"),
    "use_dora": (settings(use_dora=False), "the magnitude would be lost"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_d58_d60_saving_refuses_to_lose(loss, tmp_path):
    change, told = loss
    model = perturb(wrap(Lin(16, 8)))
    change(model)
    with pytest.raises(hirank.HirankError, match=told) as caught:
        model.save_pretrained(tmp_path / "new")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_d60_a_state_dict_without_all_weights_is_refused(lost, tmp_path):
    model = perturb(wrap(Lin(16, 8)))
    state = {k: v for k, v in model.state_dict().items() if lost not in k}
    with pytest.raises(hirank.HirankError, match=f"without .*{lost}"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert {f.name for f in tmp_path.iterdir()} == {
        "README.md", "adapter_config.json", "adapter_model.safetensors"}  # fmt: skip


def test_what_was_there_survives_a_save_that_fails(tmp_path, monkeypatch):
    model = perturb(wrap(Lin(16, 8)))
    model.save_pretrained(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    perturb(model)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(type(model.peft_config["default"]), "save_pretrained", fail)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_several_adapters_and_a_card_that_exists(tmp_path):
    model = several(Lin(16, 8))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMy own words.\n")
    model.save_pretrained(tmp_path)
    assert "license: mit" in (tmp_path / "README.md").read_text()
    for folder, rank in ((tmp_path, 4), (tmp_path / "b", 8), (tmp_path / "c", 4)):
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
    loaded = PeftModel.from_pretrained(Lin(16, 8), str(tmp_path / "b"))
    key = "base_model.model.lin.lora_magnitude_vector"
    saved_m = load_file(tmp_path / "b" / "adapter_model.safetensors")[key]
    assert torch.equal(layer_of(loaded).lora_magnitude_vector["default"].weight, saved_m)


@pytest.mark.filterwarnings("ignore:.*Setting `save_embedding_layers`")
def test_half_magnitudes_are_saved_with_a_warning(tmp_path):
    model = perturb(wrap(Lin(16, 8)))
    state = {k: v.bfloat16() for k, v in model.state_dict().items()}
    with pytest.warns(UserWarning, match="keep it in float32"):
        model.save_pretrained(tmp_path, state_dict=state)

"""Gains against the dense formula in fp64."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from audit.on_disk import KINDS, OnDisk, delta, saved, weight
from hirank.adapters.base_files import BaseFolder
from hirank.adapters.files import AdapterFolder
from hirank.audit.base_weights import BaseWeights
from hirank.audit.gains import LayerGains, all_gains, collapsed, need_magnitudes
from hirank.errors import HirankError


def gains(disk: OnDisk) -> dict[str, LayerGains]:
    folder = AdapterFolder(disk.adapter)
    return {g.name: g for g in all_gains(folder, BaseWeights(BaseFolder(disk.base), folder))}


def edit(folder: Path, change: object, file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)  # type: ignore[operator]
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gains_of_all_kinds_of_layers(tmp_path: Path, dtype: torch.dtype):
    disk = saved(tmp_path, dtype=dtype)
    found = gains(disk)
    assert sorted(found) == sorted(KINDS)
    for name in KINDS:
        m = disk.peft.base_model.model.get_submodule(name).lora_magnitude_vector["default"].weight
        W, m = weight(disk.model, name), m.detach().double().flatten()
        V = W + delta(disk.peft, name)
        g = m / V.norm(dim=1)
        torch.testing.assert_close(found[name].gain.double(), g, rtol=2e-6, atol=0)
        step = float((g[:, None] * V - W).norm())
        assert found[name].step_norm == pytest.approx(step, rel=1e-5)
        assert found[name].base_norm == pytest.approx(float(W.norm()), rel=1e-5)
        assert found[name].deviation == pytest.approx(
            float((g - 1).square().mean().sqrt()), rel=1e-4
        )
        median = torch.quantile(g, 0.5)
        assert found[name].quantiles()["0.5"] == pytest.approx(float(median), rel=1e-5)


def test_a_square_conv1d_beside_a_square_linear(tmp_path: Path):
    """Neither shapes nor the one fan_in_fan_out of the settings tell which of them is turned."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["c_proj", "lm_head"], use_dora=True)
    with warnings.catch_warnings(action="ignore"):
        peft = get_peft_model(model, lora)
        peft.save_pretrained(tmp_path / "adapter")
    folder = AdapterFolder(tmp_path / "adapter")
    found = all_gains(folder, BaseWeights(BaseFolder(tmp_path / "base"), folder))
    assert len(found) == 3
    for layer in found:  # B is zero and m the norm of W: nothing was trained
        torch.testing.assert_close(layer.gain, torch.ones_like(layer.gain))
        assert layer.unmoved == layer.rows


@pytest.mark.parametrize(
    ("dtype", "below", "above"),
    [(torch.bfloat16, 2.0**-9, 2.0**-8), (torch.float16, 2.0**-12, 2.0**-11)],
    ids=str,
)
def test_the_zone_in_which_a_gain_becomes_one(dtype: torch.dtype, below: float, above: float):
    assert (below, above) == (torch.finfo(dtype).eps / 4, torch.finfo(dtype).eps / 2)
    steps = torch.linspace(-0.01, 0.01, 40001, dtype=torch.float64)
    gain = torch.cat([steps + 1, torch.tensor([1 - below, 1 + above], dtype=torch.float64)]).float()
    inside = (gain.double() - 1 >= -below) & (gain.double() - 1 <= above)
    assert torch.equal(collapsed(gain, dtype), inside)
    assert not collapsed(
        torch.tensor([1 - below, 1 + above]).add(torch.tensor([-1e-6, 1e-6])), dtype
    ).any()


def test_magnitudes_that_never_moved(tmp_path: Path):
    disk = saved(tmp_path, target_modules=["layers.0", "turned"])
    W = weight(disk.model, "layers.0")

    def put(tensors: dict[str, torch.Tensor]) -> None:
        m = W.norm(dim=1).float()
        m[3] += 1e-4
        tensors["base_model.model.layers.0.lora_magnitude_vector"] = m

    edit(disk.adapter, put, "adapter_model.safetensors")
    found = gains(disk)
    assert found["layers.0"].unmoved == W.shape[0] - 1 and found["turned"].unmoved == 0


def test_a_magnitude_that_peft_rounded_has_not_moved(tmp_path: Path):
    """PEFT takes m of a bf16 base in bf16, so that it is up to 0.4 % off the norm."""
    disk = saved(tmp_path, dtype=torch.bfloat16, target_modules=["layers.0"])
    W = weight(disk.model, "layers.0")

    def put(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.layers.0.lora_magnitude_vector"] = (
            W.norm(dim=1).bfloat16().float()
        )

    edit(disk.adapter, put, "adapter_model.safetensors")
    assert gains(disk)["layers.0"].unmoved == W.shape[0]


def test_dead_rows(tmp_path: Path):
    disk = saved(tmp_path, target_modules=["layers.0"])

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.layers.0.lora_magnitude_vector"][2] = 0
        tensors["base_model.model.layers.0.lora_B.weight"][4] = 0

    edit(disk.adapter, silence, "adapter_model.safetensors")
    edit(disk.base, lambda tensors: tensors["layers.0.weight"][4:6].zero_())
    found = gains(disk)["layers.0"]
    assert (found.dead, found.zero_base) == (2, 2)
    assert torch.isfinite(found.gain).all() and found.gain[4] == 1 and found.gain[2] == 0


def test_lora_has_gains_of_one_and_says_so(tmp_path: Path):
    disk = saved(tmp_path, use_dora=False)
    assert all((g.gain == 1).all() and g.unmoved == g.dead == 0 for g in gains(disk).values())
    with pytest.raises(HirankError, match="is a LoRA adapter and has no magnitudes"):
        need_magnitudes(AdapterFolder(disk.adapter))


@pytest.mark.parametrize("prefix", ["model.", "transformer."])
def test_names_with_a_prefix_more_are_found(tmp_path: Path, prefix: str):
    disk = saved(tmp_path)
    expected = gains(disk)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[prefix + key] = tensors.pop(key)

    edit(disk.base, rename)
    found = gains(disk)
    assert all(torch.equal(found[name].gain, expected[name].gain) for name in KINDS)


def test_a_head_that_shares_the_embedding(tmp_path: Path):
    disk = saved(tmp_path, target_modules=["layers.1"])

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = tensors.pop("layers.1.weight")

    edit(disk.base, tie)

    def head(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("layers.1", "lm_head")] = tensors.pop(key)

    expected = saved(tmp_path / "again", target_modules=["layers.1"])
    edit(disk.adapter, head, "adapter_model.safetensors")
    assert torch.equal(gains(disk)["lm_head"].gain, gains(expected)["layers.1"].gain)


def test_a_base_in_few_bits_or_with_nan(tmp_path: Path):
    disk = saved(tmp_path, target_modules=["layers.0"])
    edit(disk.base, lambda tensors: tensors["layers.0.weight"].fill_(math.inf))
    with pytest.raises(HirankError, match="not finite"):
        gains(disk)
    edit(disk.base, lambda t: t.update({"layers.0.weight": t["layers.0.weight"].to(torch.int8)}))
    with pytest.raises(HirankError, match="int8, a quantised weight"):
        gains(disk)

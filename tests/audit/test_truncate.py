"""Truncated adapters load in stock PEFT and are the best of their rank."""

import copy
import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from audit.on_disk import KINDS, OnDisk, delta, inputs, saved, weight
from hirank.adapters.files import AdapterFolder
from hirank.audit.truncate import truncate
from hirank.errors import HirankError

SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_dora": False},
    {"use_rslora": True},
    {"use_dora": False, "rank_pattern": {"layers.1": 2}, "alpha_pattern": {"image": 5}},
]


def loaded(disk: OnDisk, folder: Path) -> PeftModel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="LoRA adapter added to ConvNd layer with groups")
        return PeftModel.from_pretrained(copy.deepcopy(disk.model), str(folder)).eval()


def best(matrix: Tensor, rank: int, groups: int = 1) -> Tensor:
    """The best approximation, of each group of rows where there are several."""
    made = []
    for part in matrix.chunk(groups):
        U, S, V = torch.linalg.svd(part, full_matrices=False)
        made.append(U[:, : rank // groups] * S[: rank // groups] @ V[: rank // groups])
    return torch.cat(made)


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_stock_peft_has_the_best_product_of_that_rank(tmp_path: Path, changes: dict[str, Any]):
    disk = saved(tmp_path, **changes)
    done = truncate(disk.adapter, tmp_path / "small", rank=4)
    model = loaded(disk, tmp_path / "small")
    told, squares = {cut.name: cut for cut in done.cuts}, []
    for name in KINDS:
        old = delta(disk.peft, name)
        rank = min(4, disk.peft.base_model.model.get_submodule(name).r["default"])
        truth = best(old, rank, groups=2 if name == "grouped" else 1)
        torch.testing.assert_close(delta(model, name), truth, rtol=0, atol=2e-7)
        error = float((old - truth).norm())
        assert told[name].error == pytest.approx(error, rel=1e-5, abs=1e-6)
        assert told[name].norm == pytest.approx(float(old.norm()), rel=1e-9)
        squares.append((error**2, float(old.norm()) ** 2))
    total = math.sqrt(sum(e for e, _ in squares) / sum(n for _, n in squares))
    assert done.error == pytest.approx(total, rel=1e-5)
    assert AdapterFolder(tmp_path / "small").dora == bool(disk.peft.peft_config["default"].use_dora)


@pytest.mark.parametrize("changes", SETTINGS[:3], ids=str)
def test_outputs_are_those_of_the_best_product(tmp_path: Path, changes: dict[str, Any]):
    """PEFT's own layers, with the truncated product written into them at the old rank.

    Without DoRA on a grouped convolution: PEFT's norm there is not that of the weight.
    """
    names = KINDS if changes.get("use_dora") is False else KINDS[:-1]
    disk = saved(tmp_path, target_modules=names, **changes)
    truncate(disk.adapter, tmp_path / "small", rank=4)
    for name in names:
        layer = disk.peft.base_model.model.get_submodule(name)
        product = best(delta(disk.peft, name), 4, groups=2 if name == "grouped" else 1)
        with torch.no_grad():
            put(layer, product / layer.scaling["default"])
    expected = disk.peft(*inputs())
    torch.testing.assert_close(loaded(disk, tmp_path / "small")(*inputs()), expected)


def put(layer: Any, product: Tensor) -> None:
    """Write a product into a PEFT layer of rank 8."""
    embeds = "default" in layer.lora_embedding_A
    kinds = (
        (layer.lora_embedding_A, layer.lora_embedding_B) if embeds else (layer.lora_A, layer.lora_B)
    )
    A, B = (kind["default"] if embeds else kind["default"].weight for kind in kinds)
    groups = A.shape[0] // B.shape[1]
    for number, part in enumerate(product.chunk(groups)):
        U, S, V = torch.linalg.svd(part, full_matrices=False)
        count = A.shape[0] // groups
        rows = slice(number * count, number * count + count)
        A[rows] = (S[:count, None] * V[:count]).reshape(A[rows].shape).to(A.dtype)
        height = part.shape[0]
        tall = slice(number * height, number * height + height)
        B[tall] = U[:, :count].reshape(B[tall].shape).to(B.dtype)


def test_magnitudes_and_whole_weights_are_kept_to_the_bit(tmp_path: Path):
    disk = saved(tmp_path, target_modules=["layers.0", "turned"], modules_to_save=["layers.1"])
    truncate(disk.adapter, tmp_path / "small", rank=3)
    old, new = (
        load_file(f / "adapter_model.safetensors") for f in (disk.adapter, tmp_path / "small")
    )
    assert old.keys() == new.keys()
    kept = [key for key in old if "lora_A" not in key and "lora_B" not in key]
    assert len(kept) == 4 and all(torch.equal(old[key], new[key]) for key in kept)


def test_an_energy_gives_each_layer_its_least_rank(tmp_path: Path):
    disk = saved(tmp_path)
    done = truncate(disk.adapter, tmp_path / "small", energy=0.9)
    for cut in done.cuts:
        if cut.name == "grouped":
            continue
        values = torch.linalg.svdvals(delta(disk.peft, cut.name)).square()
        assert cut.rank[1] == int((values.cumsum(0) / values.sum() < 0.9).sum()) + 1
        assert cut.error / cut.norm <= math.sqrt(0.1) + 1e-6
    model, names = loaded(disk, tmp_path / "small"), {cut.name: cut.rank[1] for cut in done.cuts}
    for name in KINDS:
        assert model.base_model.model.get_submodule(name).r["default"] == names[name]


def test_with_the_base_the_error_of_the_weight_is_told(tmp_path: Path):
    disk = saved(tmp_path)
    done = truncate(disk.adapter, tmp_path / "small", rank=4, base=disk.base)
    squares = []
    for cut in done.cuts:
        W, old = weight(disk.model, cut.name), delta(disk.peft, cut.name)
        new = best(old, 4, groups=2 if cut.name == "grouped" else 1)
        m = disk.peft.base_model.model.get_submodule(cut.name).lora_magnitude_vector["default"]
        m = m.weight.detach().double().reshape(-1, 1)
        before, after = (m * (W + d) / (W + d).norm(dim=1, keepdim=True) for d in (old, new))
        assert cut.step_norm == pytest.approx(float((before - W).norm()), rel=1e-5)
        assert cut.step_error == pytest.approx(float((after - before).norm()), rel=1e-4)
        squares.append((cut.step_error**2, cut.step_norm**2))
    total = math.sqrt(sum(e for e, _ in squares) / sum(n for _, n in squares))
    assert done.step_error == pytest.approx(total)


def test_half_precision_is_kept_and_its_rounding_counted(tmp_path: Path):
    disk = saved(tmp_path, use_dora=False)
    path = disk.adapter / "adapter_model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(path).items()}, path)
    truncate(disk.adapter, tmp_path / "a", rank=4)
    layers = zip(AdapterFolder(disk.adapter), AdapterFolder(tmp_path / "a"), strict=True)
    done = {cut.name: cut for cut in truncate(disk.adapter, tmp_path / "b", rank=4).cuts}
    for old, new in layers:
        assert new.lora_A.dtype == new.lora_B.dtype == torch.bfloat16
        if old.name == "grouped":
            continue
        products = [one.scale * one.B.double() @ one.A.double() for one in (old, new)]
        error = float((products[0] - products[1]).norm())
        assert done[old.name].error == pytest.approx(error, rel=1e-9)
    assert (tmp_path / "a/adapter_model.safetensors").read_bytes() == (
        tmp_path / "b/adapter_model.safetensors"
    ).read_bytes()


def test_an_untrained_layer_can_still_learn(tmp_path: Path):
    disk = saved(tmp_path, use_dora=False)
    path = disk.adapter / "adapter_model.safetensors"
    save_file({k: v * ("lora_B" not in k) for k, v in load_file(path).items()}, path)
    truncate(disk.adapter, tmp_path / "small", rank=4)
    for layer in AdapterFolder(tmp_path / "small"):
        assert layer.rank in (4, 8) and layer.A.any()


@pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape")
def test_a_trained_bias_keeps_its_strength(tmp_path: Path):
    disk = saved(
        tmp_path, use_dora=False, target_modules=["layers.0"], lora_bias=True, lora_alpha=3
    )
    truncate(disk.adapter, tmp_path / "small", rank=5)
    old, new = (AdapterFolder(f).layer("layers.0") for f in (disk.adapter, tmp_path / "small"))
    assert old.bias is not None and old.bias.any()
    torch.testing.assert_close(new.scale * new.bias, old.scale * old.bias)


# Bad input.


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"rank": 8}, "has rank 8 at most, so there is nothing to truncate to rank 8"),
        ({"rank": 9}, "nothing to truncate to rank 9"),
        ({"rank": 0}, "Rank 0 is none"),
        ({"energy": 1.5}, "The energy to keep is 1.5"),
        ({}, "Give a rank or an energy"),
        ({"rank": 4, "energy": 0.9}, "and not both"),
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_met(tmp_path: Path, wish: dict[str, Any], said: str):
    disk = saved(tmp_path)
    with pytest.raises(HirankError, match=said):
        truncate(disk.adapter, tmp_path / "small", **wish)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def spoil(disk: OnDisk, key: str, value: float) -> None:
    path = disk.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    next(v for k, v in tensors.items() if key in k).view(-1)[0] = value
    save_file(tensors, path)


def test_nothing_is_written_over_what_is_there(tmp_path: Path):
    disk = saved(tmp_path)
    with pytest.raises(HirankError, match="is there already"):
        truncate(disk.adapter, disk.base, rank=4)


@pytest.mark.parametrize("key", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_an_adapter_with_nan(tmp_path: Path, key: str):
    disk = saved(tmp_path)
    spoil(disk, key, math.nan)
    with pytest.raises(HirankError, match="not finite"):
        truncate(disk.adapter, tmp_path / "small", rank=4)
    assert not (tmp_path / "small").exists()


def test_another_base(tmp_path: Path):
    disk, other = saved(tmp_path), tmp_path / "other"
    shutil.copytree(disk.base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["layers.0.weight"] = torch.zeros(18, 15)
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(HirankError, match=r"18x15, on which the adapter's 18x14 does not fit"):
        truncate(disk.adapter, tmp_path / "small", rank=4, base=other)
    del tensors["layers.0.weight"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(HirankError, match="no weight for the adapted layer layers.0"):
        truncate(disk.adapter, tmp_path / "small", rank=4, base=other)
    assert not (tmp_path / "small").exists()


def test_a_full_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = saved(tmp_path)
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(HirankError, match="GB free"):
        truncate(disk.adapter, tmp_path / "small", rank=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_an_adapter_beside_a_changed_base_is_refused(tmp_path: Path):
    disk = saved(tmp_path)
    path = disk.adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "pissa"}))
    with pytest.raises(HirankError, match="cannot be truncated: init_lora_weights 'pissa'"):
        truncate(disk.adapter, tmp_path / "small", rank=4)

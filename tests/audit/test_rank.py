"""Spectra of adapters against dense SVD, and suggested settings that PEFT takes."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from audit.on_disk import KINDS, Kinds, delta, saved
from hirank.adapters.files import AdapterFolder
from hirank.audit.rank import LayerRank, Spectrum, all_ranks, suggest


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_dora": False, "use_rslora": True}, {"rank_pattern": {"layers.1": 2, "words": 3}}],
    ids=str,
)
def test_spectra_of_all_kinds_of_layers(tmp_path: Path, changes: dict[str, Any]):
    disk = saved(tmp_path, **changes)
    found = {layer.name: layer for layer in all_ranks(AdapterFolder(disk.adapter))}
    assert sorted(found) == sorted(KINDS)
    for name, layer in found.items():
        dense = delta(disk.peft, name)
        assert layer.shape == tuple(dense.shape)
        count = len(layer.spectrum.values)
        truth = torch.linalg.svdvals(dense)
        values = torch.tensor(layer.spectrum.values, dtype=torch.float64)
        torch.testing.assert_close(values, truth[:count], rtol=1e-10, atol=1e-12)
        assert truth[count:].sum() < 1e-12


def layer(name: str, values: list[float], shape: tuple[int, int] = (64, 64)) -> LayerRank:
    return LayerRank(name, "linear", shape, len(values), 2.0, 2.0 * len(values),
                     Spectrum(tuple(values)), "float32", (1.0, 1.0))  # fmt: skip


FLAT, STEEP = [1.0] * 16, [2.0 ** -(2 * i) for i in range(16)]
MIDDLE = [1 / (1 + i) for i in range(16)]


def test_verdicts():
    assert layer("a", FLAT).use == "starved"
    assert layer("a", STEEP).use == "idle"
    assert layer("a", MIDDLE).use == "used"
    assert layer("a", [0.0] * 16).use == "untrained"
    noise = torch.linalg.svdvals(torch.randn(512, 16) @ torch.randn(16, 512))[:16]
    assert layer("a", noise.tolist()).use == "starved"


def test_a_suggestion_is_what_peft_makes(tmp_path: Path):
    names = {"layers.0": FLAT, "layers.1": STEEP, "words": MIDDLE, "turned": [0.0] * 16}
    shapes = {"layers.0": (18, 14), "layers.1": (11, 14), "words": (14, 23), "turned": (20, 14)}
    layers = [layer(name, values, shapes[name]) for name, values in names.items()]
    found = suggest(layers, {})
    wanted = {"layers.0": 16, "layers.1": 2, "words": 16, "turned": 16}
    config = LoraConfig(
        target_modules=list(names), r=found.r, lora_alpha=found.lora_alpha,
        rank_pattern=found.rank_pattern, alpha_pattern=found.alpha_pattern,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        model = get_peft_model(Kinds(), config)
    for one in layers:
        made = model.base_model.model.get_submodule(one.name)
        assert made.r["default"] == (2 if one.name == "layers.1" else wanted[one.name])
        assert made.scaling["default"] == pytest.approx(one.scale)
    trained = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert trained == found.parameters[1]
    assert found.parameters[0] == sum(16 * sum(shapes[name]) for name in names)


def test_names_that_end_alike_keep_their_ranks():
    """PEFT takes `a.q` for `x.a.q` as well, unless the key says where the name begins."""

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64)})
            self.x = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64)})})
            self.h = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))

    spectra = {"a.q": STEEP, "x.a.q": MIDDLE} | {
        f"h.{i}": FLAT if i > 9 else MIDDLE for i in range(12)
    }
    layers = [layer(name, values) for name, values in spectra.items()]
    found = suggest(layers, {})
    config = LoraConfig(
        target_modules=r".*\.q|q|h\.\d+", r=found.r, lora_alpha=found.lora_alpha,
        rank_pattern=found.rank_pattern, alpha_pattern=found.alpha_pattern,
    )  # fmt: skip
    model = get_peft_model(Tower(), config).base_model.model
    ranks = {one.name: model.get_submodule(one.name).r["default"] for one in layers}
    assert ranks["a.q"] == 2 and ranks["x.a.q"] == 16
    assert [ranks[f"h.{i}"] for i in (0, 1, 9, 10, 11)] == [16, 16, 16, 32, 32]
    assert len(found.rank_pattern) < len(layers) / 2
    every = suggest(
        [layer(f"h.{i}", FLAT) for i in range(3)] + [layer(f"x{i}", STEEP) for i in range(4)], {}
    )
    assert every.rank_pattern == {r"^h\.\d+": 32}

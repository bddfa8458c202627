"""What a full fine-tune changed, against dense SVD."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import save_tiny_model
from hirank.audit.finetune import compare_models
from hirank.errors import HirankError

TARGET = "model.layers.0.mlp.up_proj"


def edit(folder: Path, change: object) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    base, tuned = (save_tiny_model(tmp_path / name, hidden=64) for name in ("base", "tuned"))

    def tune(tensors: dict[str, torch.Tensor]) -> None:
        shape = tensors[f"{TARGET}.weight"].shape
        tensors[f"{TARGET}.weight"] += torch.randn(shape[0], 3) @ torch.randn(3, shape[1])
        tensors["model.embed_tokens.weight"] += 0.1 * torch.randn(320, 64)
        tensors["model.norm.weight"] += 0.5

    edit(tuned, tune)
    return base, tuned


def test_what_changed_and_its_floors(pair: tuple[Path, Path]):
    found = compare_models(*pair, rank=16)
    before, after = (load_file(folder / "model.safetensors") for folder in pair)
    assert [c.name for c in found.changes] == ["model.embed_tokens", TARGET]
    assert found.others == ["model.norm"]
    assert len(found.unchanged) == len(before) - 3
    spectra = {}
    for change in found.changes:
        D = after[f"{change.name}.weight"].double() - before[f"{change.name}.weight"].double()
        truth = spectra[change.name] = torch.linalg.svdvals(D)
        values = torch.tensor(change.spectrum.known.values, dtype=torch.float64)
        torch.testing.assert_close(values, truth[: len(values)], rtol=1e-5, atol=1e-5)
    for rank in (1, 3, 16):
        left = math.sqrt(sum(float(s[rank:].square().sum()) for s in spectra.values()))
        total = math.sqrt(sum(float(s.square().sum()) for s in spectra.values()))
        assert found.floor(rank) == pytest.approx(left / total, rel=1e-4)
    assert found.changes[1].spectrum.rank_for(0.999999) == 3


def test_blocks_do_not_change_the_result(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    whole = compare_models(*pair)
    monkeypatch.setattr("hirank.audit.finetune.BLOCK", 64 * 7)
    for one, other in zip(whole.changes, compare_models(*pair).changes, strict=True):
        assert one.spectrum.known.values == pytest.approx(other.spectrum.known.values, rel=1e-9)


def test_a_head_that_parted_from_the_embedding_is_held_against_it(tmp_path: Path):
    base, tuned = (
        save_tiny_model(tmp_path / name, tie_word_embeddings=name == "base")
        for name in ("base", "tuned")
    )
    shared = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    edit(tuned, lambda t: t.update({"lm_head.weight": shared + 1}))
    found = compare_models(base, tuned)
    assert [change.name for change in found.changes] == ["lm_head"]
    assert found.changes[0].spectrum.norm == pytest.approx(math.sqrt(shared.numel()), rel=1e-6)


def test_buffers_that_nothing_trains_are_passed_over(pair: tuple[Path, Path]):
    for folder in pair:
        edit(folder, lambda t: t.update({"position_ids": torch.arange(4)}))
    assert "position_ids" not in compare_models(*pair).unchanged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{TARGET}.weight"), "has no model.layers.0.mlp.up_proj.weight"),
        (lambda t: t.update({f"{TARGET}.weight": torch.zeros(3, 4)}), r"and \[3, 4\] in"),
        (lambda t: t[f"{TARGET}.weight"].fill_(math.nan), "not finite in one of the two models"),
        (lambda t: t.update({f"{TARGET}.weight": t[f"{TARGET}.weight"].char()}), "as torch.int8"),
        (lambda t: t.update({"more": torch.ones(3)}), "tuned has more, which .*base has not"),
    ],
    ids=["missing", "shape", "nan", "bits", "more"],
)
def test_models_that_do_not_match(pair: tuple[Path, Path], change: object, said: str):
    edit(pair[1], change)
    with pytest.raises(HirankError, match=said):
        compare_models(*pair)

"""Folders are whole or not there; damaged checkpoints are found out."""

import pytest
import torch
from safetensors.torch import save_file

from hirank.errors import HirankError
from hirank.files import atomic_folder
from hirank.train.checkpoint import (
    MANIFEST,
    fault,
    open_checkpoint,
    rotate,
    seal,
    step_dir,
    steps,
)


def write_checkpoint(run_dir, step, text="weights"):
    with atomic_folder(step_dir(run_dir, step)) as draft:
        (draft / "model.bin").write_text(text)
        (draft / "inner").mkdir()
        (draft / "inner" / "state.bin").write_text("state")
        seal(draft, step, {"config": {}})
    return step_dir(run_dir, step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Checkpoints.


def test_the_newest_checkpoint_is_opened(tmp_path):
    for step in (3, 12, 9):
        write_checkpoint(tmp_path, step)
    found = open_checkpoint(tmp_path)
    assert (found.step, found.path.name, found.facts["config"]) == (12, "step-12", {})
    assert open_checkpoint(step_dir(tmp_path, 9)).step == 9


DAMAGE = {
    "changed": (lambda c: (c / "model.bin").write_text("wrights"), "model.bin is damaged"),
    "cut": (lambda c: (c / "inner" / "state.bin").write_text("st"), "inner/state.bin is damaged"),
    "lost": (lambda c: (c / "model.bin").unlink(), "model.bin is missing"),
    "unsealed": (lambda c: (c / MANIFEST).unlink(), "manifest.json is missing"),
    "torn seal": (lambda c: (c / MANIFEST).write_text('{"step": 6, "fi'), "manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_naming_the_newest_good_one(tmp_path, kind):
    damage, said = DAMAGE[kind]
    good = write_checkpoint(tmp_path, 3)
    damage(write_checkpoint(tmp_path, 6))
    with pytest.raises(HirankError) as caught:
        open_checkpoint(tmp_path)
    sentence = str(caught.value)
    assert said in sentence and f"resume with --resume {good}" in sentence
    assert "\n" not in sentence
    assert open_checkpoint(good).step == 3


def test_when_none_is_good_it_says_so(tmp_path):
    (write_checkpoint(tmp_path, 3) / "model.bin").unlink()
    with pytest.raises(HirankError, match="no other one is good"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["", "nowhere"])
def test_a_folder_without_checkpoints_is_refused(tmp_path, where):
    with pytest.raises(HirankError):
        open_checkpoint(tmp_path / where)


def test_a_draft_is_not_a_checkpoint(tmp_path):
    good = write_checkpoint(tmp_path, 3)
    (good.parent / ".step-6.tmp").mkdir()
    assert open_checkpoint(tmp_path).step == 3


def test_the_oldest_checkpoints_go_first(tmp_path):
    for step in (2, 10, 9):
        write_checkpoint(tmp_path, step)
    rotate(tmp_path, 2)
    assert [path.name for path in steps(tmp_path)] == ["step-10", "step-9"]
    assert all(fault(path) is None for path in steps(tmp_path))


def test_files_may_be_read_by_others_as_those_of_other_programs(tmp_path):
    with atomic_folder(tmp_path / "a") as draft:
        save_file({"w": torch.zeros(1)}, draft / "w.safetensors")
    assert (tmp_path / "a" / "w.safetensors").stat().st_mode & 0o777 == 0o644

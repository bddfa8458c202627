"""Folders are whole or not there; damaged checkpoints are found out."""

import errno
import resource

import pytest
import torch
from safetensors.torch import save_file

from hirank.errors import HirankError
from hirank.train.checkpoint import (
    MANIFEST,
    atomic_folder,
    fault,
    open_checkpoint,
    recover,
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


# Whole or not there.


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "b"
    with atomic_folder(target) as draft:
        (draft / "file").write_text("x")
        assert not target.exists()
    assert names(target) == ["file"] and names(target.parent) == ["b"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "a") as draft:
        (draft / "file").write_text("x")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_failed_replacement_keeps_the_old_folder(tmp_path):
    with atomic_folder(tmp_path / "a") as draft:
        (draft / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a", replace=True) as draft:
        (draft / "file").write_text("new")
        raise ZeroDivisionError
    assert (tmp_path / "a" / "file").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_replacement_replaces(tmp_path):
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "a", replace=True) as draft:
            (draft / text).touch()
    assert names(tmp_path / "a") == ["new"] and names(tmp_path) == ["a"]


def test_a_crash_between_the_two_renames_is_undone(tmp_path):
    (tmp_path / ".a.old").mkdir()
    (tmp_path / ".a.tmp").mkdir()
    recover(tmp_path / "a")
    assert names(tmp_path) == ["a"]


# A full disk.


@pytest.fixture
def small_disk():
    """No file may grow beyond 64 KB: the system fails writes as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {
    "torch": lambda path: torch.save({"w": torch.zeros(1 << 16)}, path),
    "safetensors": lambda path: save_file({"w": torch.zeros(1 << 16)}, path),
    "plain": lambda path: path.write_text("x" * (1 << 18)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_one_sentence_and_the_old_folder_stays(tmp_path, small_disk, writer):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(
        HirankError, match=f"Could not write {tmp_path}/a: .*disk is full"
    ) as caught:
        with atomic_folder(tmp_path / "a", replace=True) as draft:
            WRITERS[writer](draft / "file")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["old"]


def test_no_space_left_is_named(tmp_path):
    with pytest.raises(HirankError, match="the disk is full"), atomic_folder(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("said", ["[enforce fail at inline_container.cc:672]", "iostream error"])
def test_what_torch_says_when_a_write_fails(tmp_path, said):
    with pytest.raises(HirankError, match="the disk is full or"), atomic_folder(tmp_path / "a"):
        raise RuntimeError(said)


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="mat1"), atomic_folder(tmp_path / "a"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


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

"""Files and folders are whole or not there."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hirank.errors import HirankError
from hirank.files import (
    atomic_folder,
    need_new,
    need_space,
    recover,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_text(tmp_path / "a.txt", "old ✓")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HirankError, match="No space left on device"):
        write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old ✓"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HirankError, match="cannot be written"):
        write_text(tmp_path / "none" / "a.txt", "x")


# Folders.


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


def test_two_that_make_one_folder_do_not_meet(tmp_path):
    """The first to end has it, whole; the other is told and leaves nothing."""
    with pytest.raises(HirankError, match="was made by somebody else meanwhile"):
        with atomic_folder(tmp_path / "a") as one:
            with atomic_folder(tmp_path / "a") as other:
                (one / "first").touch()
                (other / "second").touch()
    assert names(tmp_path / "a") == ["second"] and names(tmp_path) == ["a"]


def test_drafts_of_processes_that_died_are_dropped(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, alive = (tmp_path / f".a.{pid}-0123abcd.tmp" for pid in (gone.pid, os.getppid()))
    dead.mkdir()
    alive.mkdir()
    (tmp_path / f".a.b.{gone.pid}-0123abcd.tmp").mkdir()  # of another target
    with atomic_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == [alive.name, f".a.b.{gone.pid}-0123abcd.tmp", "a"]


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


# What is refused beforehand.


def test_a_folder_that_holds_something_is_refused(tmp_path):
    need_new(tmp_path / "new" / "deep")
    need_new(tmp_path)
    (tmp_path / "a").write_text("")
    for taken in (tmp_path, tmp_path / "a"):
        with pytest.raises(HirankError, match="is there already: choose a folder"):
            need_new(taken)


def test_a_disk_without_room_is_refused(tmp_path):
    need_space(tmp_path / "new", 1)
    with pytest.raises(HirankError, match=r"needs 1000000000.00 GB and its disk has"):
        need_space(tmp_path / "new", 10**18)

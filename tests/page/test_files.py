"""A file is whole or not there."""

import os
from pathlib import Path

import pytest

from hirank.errors import HirankError
from hirank.page.files import write_text


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

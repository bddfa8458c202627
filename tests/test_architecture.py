"""docs/architecture.md names the files that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "hirank"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def named() -> set[str]:
    """Every PART/file.py in the text; a bare file.py belongs to the part named before it."""
    files, part = set(), ""
    for folder, name in re.findall(
        r"(?:\b(kernels|adapters/peft|adapters|optim|page|train|plan|audit|cli|launch|bench|doctor|scripts|tests)/)?"
        r"(\w+\.py)\b",
        TEXT,
    ):
        part = folder or part
        files.add(f"{part}/{name}" if (SRC / part / name).exists() or folder else name)
    return {file for file in files if not file.startswith(("scripts/", "tests/"))}


def test_every_named_file_exists():
    assert sorted(file for file in named() if not (SRC / file).exists()) == []


def test_every_module_with_content_is_named():
    modules = {
        file.relative_to(SRC).as_posix()
        for file in SRC.rglob("*.py")
        if not file.name.startswith("__")
    }
    assert sorted(modules - named()) == []

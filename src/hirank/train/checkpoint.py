"""Checkpoints: folders that are whole or not there (see `hirank.files`), and can prove it.

A checkpoint carries a manifest with the SHA-256 of each of its files, so that a damaged one
is refused at resume instead of being trained from.

    checkpoints/step-12/   adapter or model, optimizer.pt, scheduler.pt, rng_state.pth,
                           trainer_state.json, manifest.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hirank.errors import HirankError

__all__ = [
    "Checkpoint",
    "MANIFEST",
    "checkpoints_dir",
    "fault",
    "open_checkpoint",
    "rotate",
    "run_of",
    "seal",
    "step_dir",
    "steps",
]

MANIFEST = "manifest.json"


# Checkpoints.


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file is as it was written."""

    path: Path
    step: int
    facts: dict[str, Any]


def checkpoints_dir(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def step_dir(run_dir: Path, step: int) -> Path:
    """The place of the checkpoint after `step` optimizer steps."""
    return checkpoints_dir(run_dir) / f"step-{step}"


def seal(folder: Path, step: int, facts: dict[str, Any]) -> None:
    """Write the manifest: call it last, when every other file of the checkpoint is there."""
    files = {str(p.relative_to(folder)): _digest(p) for p in folder.rglob("*") if p.is_file()}
    manifest = {"step": step, "files": dict(sorted(files.items())), **facts}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if nothing is."""
    manifest = _manifest(folder)
    if manifest is None:
        return f"its {MANIFEST} is missing or unreadable"
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"its {name} is missing"
        if not os.access(path, os.R_OK):
            return f"its {name} cannot be read"
        if _digest(path) != digest:
            return f"its {name} is damaged"
    return None


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(manifest, dict) and isinstance(manifest.get("files"), dict)
    return manifest if whole and isinstance(manifest.get("step"), int) else None


def steps(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = [p for p in checkpoints_dir(run_dir).glob("step-*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def open_checkpoint(where: Path) -> Checkpoint:
    """The checkpoint to resume from: `where` itself, or the newest one of the run `where`.

    Raises HirankError if there is none, or if it is damaged; the sentence names the newest one
    that is not.
    """
    run_dir = run_of(where)
    all_steps = steps(run_dir)
    if not all_steps:
        raise HirankError(f"{run_dir} holds no checkpoint to resume from; start the run again.")
    chosen = all_steps[0] if where == run_dir else where
    wrong = fault(chosen)
    if wrong:
        raise HirankError(
            f"The checkpoint {chosen} cannot be used: {wrong}; {_instead(all_steps)}."
        )
    manifest = _manifest(chosen) or {}
    return Checkpoint(chosen, manifest["step"], manifest)


def run_of(where: Path) -> Path:
    """The run folder of a run folder or of one of its checkpoints."""
    if not where.is_dir():
        raise HirankError(f"There is no run folder {where} to resume.")
    inside = where.parent.name == "checkpoints" and where.name.startswith("step-")
    return where.parent.parent if inside else where


def _instead(all_steps: list[Path]) -> str:
    for path in all_steps:
        if fault(path) is None:
            return f"the newest good one is {path}, resume with --resume {path}"
    return "no other one is good, start the run again"


def rotate(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for path in steps(run_dir)[keep:]:
        shutil.rmtree(path, ignore_errors=True)

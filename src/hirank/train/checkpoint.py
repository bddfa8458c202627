"""Folders that are either whole or not there, and the checkpoints made of them.

A folder is written under a temporary name beside its place, flushed to the disk and renamed.
A checkpoint also carries a manifest with the SHA-256 of each of its files, so that a damaged one
is refused at resume instead of being trained from.

    checkpoints/step-12/   adapter or model, optimizer.pt, scheduler.pt, rng_state.pth,
                           trainer_state.json, manifest.json
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hirank.errors import HirankError

__all__ = [
    "Checkpoint",
    "MANIFEST",
    "atomic_folder",
    "checkpoints_dir",
    "fault",
    "open_checkpoint",
    "recover",
    "rotate",
    "run_of",
    "seal",
    "step_dir",
    "steps",
    "writing",
]

MANIFEST = "manifest.json"
TORCH_WRITE_FAILED = ("PytorchStreamWriter", "inline_container", "iostream error")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


# Whole folders.


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` at the end, or disappears if anything fails.

    With `replace`, a `target` that exists is exchanged for the new one. Raises HirankError if the
    disk is full or cannot be written; what was there before is then still there.
    """
    draft = target.with_name(f".{target.name}.tmp")
    with writing(target):
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir(parents=True)
            yield draft
            _flush(draft)
            _put(draft, target, replace=replace)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _put(draft: Path, target: Path, *, replace: bool) -> None:
    """Rename `draft` to `target`; an old `target` steps aside until the new one is in place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if replace and target.exists():
        target.rename(old)
    draft.rename(target)
    _flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(target: Path) -> None:
    """Finish or undo an exchange that a crash cut short, and drop drafts."""
    old = target.with_name(f".{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(target.with_name(f".{target.name}.tmp"), ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            _flush_file(path)
        else:
            _flush_folder(path)
    _flush_folder(folder)


def _flush_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    path.chmod(0o644)  # safetensors keeps what it writes from everybody else


def _flush_folder(folder: Path) -> None:
    """Make renames in `folder` durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# What a failed write means.


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what torch, safetensors and the system raise about a bad disk into one sentence."""
    try:
        yield
    except HirankError:
        raise
    except OSError as error:
        raise HirankError(_refusal(target, _reason(error))) from error
    except SafetensorError as error:
        raise HirankError(_refusal(target, _reason_in(str(error)))) from error
    except RuntimeError as error:
        if not any(word in str(error) for word in TORCH_WRITE_FAILED):
            raise
        raise HirankError(_refusal(target, _reason_in(str(error)))) from error


def _refusal(target: Path, reason: str) -> str:
    advice = "free some space" if "full" in reason else "make it writable"
    return f"Could not write {target}: {reason}; {advice}, what was there before is whole."


def _reason(error: OSError) -> str:
    if error.errno in FULL:
        return "the disk is full"
    return (error.strerror or type(error).__name__).lower()


def _reason_in(said: str) -> str:
    """The reason where the writer hands on the system's error number as text, or not at all."""
    if any(f"os error {number})" in said for number in FULL):
        return "the disk is full"
    return "the disk is full or does not take writes"


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

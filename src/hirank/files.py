"""Files and folders that are whole or not there.

Each is written under a temporary name beside its place, flushed to the disk and renamed.
"""

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hirank.errors import HirankError

__all__ = ["atomic_folder", "need_new", "need_space", "recover", "write_text", "writing"]

TORCH_WRITE_FAILED = ("PytorchStreamWriter", "inline_container", "iostream error")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


# One file.


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 text so that `path` holds either its old content or all of the new one.

    Raises HirankError when the folder cannot be written or the disk is full.
    """
    try:
        _replace(path, text.encode("utf-8"))
    except OSError as error:
        raise HirankError(
            f"{path} cannot be written ({error.strerror}): free the disk or make it writable."
        ) from error
    return path


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# Whole folders.


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` at the end, or disappears if anything fails.

    With `replace`, a `target` that exists is exchanged for the new one. Two processes that make one
    target do not meet: the second to end finds it taken. Raises HirankError if the disk is full or
    cannot be written; what was there before is then still there.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with writing(target):
        _drop_drafts(target)
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
    if target.is_dir() and any(target.iterdir()):
        raise HirankError(f"{target} was made by somebody else meanwhile: choose another folder.")
    draft.rename(target)
    _flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(target: Path) -> None:
    """Finish or undo an exchange that a crash cut short, and drop drafts."""
    old = target.with_name(f".{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    _drop_drafts(target)


def _drop_drafts(target: Path) -> None:
    """Remove what processes that are no more have left of `target`."""
    draft = re.compile(rf"\.{re.escape(target.name)}(\.(?P<process>\d+)-[0-9a-f]+)?\.tmp")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        found = draft.fullmatch(path.name)
        if found and not (found["process"] and _lives(int(found["process"]))):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


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


# What can be refused before a byte is written.


def need_new(target: Path) -> None:
    """Raises HirankError if `target` holds anything, or is a file, or cannot be made."""
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise HirankError(f"{target} is there already: choose a folder that is new or empty.")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK):
        raise HirankError(f"{target} cannot be made in {parent}: choose a folder you may write to.")


def need_space(target: Path, nbytes: int) -> None:
    """Raises HirankError if the disk of `target` has not room for so many bytes."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise HirankError(
            f"{target} needs {nbytes / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free: free "
            "some space or choose another disk."
        )


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

"""Files that are whole or not there."""

import os
import tempfile
from pathlib import Path

from hirank.errors import HirankError

__all__ = ["write_text"]


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

"""What `hirank bench tune` found on a GPU, kept in the user's cache folder.

One JSON file for each GPU and version of Triton. Only the tuner writes it, training never does. It
holds nothing that can change a result (see `_tuning`), so it may be deleted at any time. A file
that cannot be right is not used, and that is said once.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LARGEST", "MOST_WARPS", "SCHEMA", "Block", "Saved", "fault", "load", "place", "save"]

SCHEMA = 1
LARGEST = 2**20  # elements of a block, Triton's own limit
MOST_WARPS = 16  # 1024 threads in warps of 64
_MOST_ELEMENTS = 2**31
_BLOCKS = ("gain_forward", "compose_forward")


class Block(NamedTuple):
    """What one program of an elementwise pass takes."""

    block_m: int
    block_n: int
    num_warps: int


class Saved(NamedTuple):
    """Content of a file."""

    gain_forward: Block
    compose_forward: Block
    min_inference: int | None
    """None: the plain formula and the kernel differed in a bit, or were not compared."""


def fault(block: Block) -> str | None:
    """What makes a block illegal, or None."""
    for name, value in block._asdict().items():
        if type(value) is not int or value < 1 or value & (value - 1):
            return f"{name} is {value!r}, not a power of two"
    if block.block_m * block.block_n > LARGEST:
        return f"{block.block_m} x {block.block_n} elements are more than {LARGEST:,}"
    if block.num_warps > MOST_WARPS:
        return f"num_warps is {block.num_warps}, more than {MOST_WARPS}"
    return None


def place(gpu: str, triton_version: str) -> Path | None:
    """The file of a GPU by its name; None for a user without a home folder.

    ~/.cache/hirank/tuning/nvidia-h200-3.6.0.json, or under XDG_CACHE_HOME where that is set.
    """
    folder = _cache_folder()
    if folder is None:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    version = re.sub(r"[^A-Za-z0-9.]+", "-", triton_version)
    return folder / "hirank" / "tuning" / f"{slug}-{version}.json"


def _cache_folder() -> Path | None:
    # Where the file is, not what is computed: the environment is asked for nothing else here.
    named = Path(os.path.expandvars("$XDG_CACHE_HOME"))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def load(gpu: str, triton_version: str) -> Saved | None:
    """What was found on such a GPU; None without a file, or, with a warning, if it is broken."""
    path = place(gpu, triton_version)
    if path is None:
        return None
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")), gpu, triton_version)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 raise ValueErrors
        _say_ignored(path, error)
    return None


def _say_ignored(path: Path, error: Exception) -> None:
    why = error.strerror if isinstance(error, OSError) else str(error)
    warnings.warn(
        f"The tuned tiles in {path} are not used ({why}): run hirank bench tune again, or delete "
        "the file.",
        RuntimeWarning,
        stacklevel=2,
    )


def _read(data: Any, gpu: str, triton_version: str) -> Saved:
    expected = {"schema", "gpu", "triton", *Saved._fields}
    if not isinstance(data, dict) or set(data) != expected:
        raise ValueError(f"it must hold exactly {', '.join(sorted(expected))}")
    for key, value in (("schema", SCHEMA), ("gpu", gpu), ("triton", triton_version)):
        if type(data[key]) is not type(value) or data[key] != value:
            raise ValueError(f"{key} is {data[key]!r}, not {value!r}")
    gain, compose = (_block(name, data[name]) for name in _BLOCKS)
    return Saved(gain, compose, _elements(data["min_inference"]))


def _block(name: str, data: Any) -> Block:
    if not isinstance(data, dict) or set(data) != set(Block._fields):
        raise ValueError(f"{name} must hold exactly {', '.join(Block._fields)}")
    return _legal(name, Block(**data))


def _legal(name: str, block: Block) -> Block:
    wrong = fault(block)
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    return block


def _elements(data: Any) -> int | None:
    if data is None or (type(data) is int and 0 <= data <= _MOST_ELEMENTS):
        return data
    raise ValueError(f"min_inference is {data!r}, not a number of elements")


def save(gpu: str, triton_version: str, found: Saved) -> Path:
    """Write the file of a GPU whole or not at all, and return it.

    Raises:
        ValueError: a block that no GPU could run.
        OSError: the folder cannot be written.
    """
    blocks = {name: _legal(name, getattr(found, name))._asdict() for name in _BLOCKS}
    path = place(gpu, triton_version)
    if path is None:
        raise OSError(errno.ENOENT, "there is no home folder")
    content: dict[str, Any] = {"schema": SCHEMA, "gpu": gpu, "triton": triton_version}
    content |= found._asdict() | blocks
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(content, indent=2) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise

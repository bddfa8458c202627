"""The folder of a run: one run, one new folder, never another's.

What is in it:

    config.yaml      the settings, every default written out
    versions.json    Python, libraries, device
    log.jsonl        what happened, an event a line
    samples.jsonl    answers before and after
    checkpoints/     to resume from
    adapter/         the last weights in PEFT's format (model/ for full fine-tuning)
    adapter-best/    the best ones (model-best/)
    report.html      the run in pictures; README.md  the model card
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator

from hirank.errors import HirankError
from hirank.train.strict import Strict

__all__ = [
    "RunConfig",
    "alone_in",
    "check_run_dir",
    "claim_run_dir",
    "cleared_on_failure",
    "versions",
]

PACKAGES = ("hirank", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "triton")


class RunConfig(Strict):
    """Where a run is written, and how often."""

    dir: Path | None = None
    """The run's folder, which must not exist yet. Default: the next free runs/NAME-N."""

    name: str = Field(default="run", pattern=r"^[\w.-]+$")
    """The NAME in that default."""

    parent: Path | None = None
    """A run or adapter that this one is a variant of: warns if its first steps had another size."""

    log_every: PositiveInt = 1
    """Steps between two lines of the log."""

    save_every: NonNegativeFloat = 0.25
    """Steps between checkpoints; below 1 a share of the run, 0 only at the end."""

    keep: PositiveInt = 2
    """How many checkpoints are kept; the oldest go first."""

    plan: Literal["check", "say", "none"] = "check"
    """check: say how much memory is planned for, and refuse a run whose tensors alone exceed the
    GPU. say: never refuse. none: no plan."""

    calibration: Path | None = None
    """The file in which a run on a GPU notes what it was planned to need and what it needed, for
    hirank plan. Default: hirank/plan-calibration.jsonl in the user's cache folder."""

    @field_validator("dir", "parent", "calibration")
    @classmethod
    def _is_a_name(cls, folder: Path | None) -> Path | None:
        if folder is None:
            return None
        if "\0" in str(folder):
            raise ValueError("a path cannot hold a null character")
        return folder.expanduser()


def check_run_dir(config: RunConfig) -> None:
    """Raise HirankError if the run's folder is taken or cannot be made. Writes nothing."""
    if config.dir is not None and os.path.lexists(config.dir):
        raise HirankError(_taken(config.dir))
    place = (config.dir or Path("runs") / config.name).absolute()
    parent = next(folder for folder in place.parents if os.path.exists(folder))
    if not parent.is_dir():
        raise HirankError(f"Cannot make the run folder {place}: {parent} is not a folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise HirankError(_unwritable(place, f"{parent} is read-only"))


def _taken(folder: Path) -> str:
    return (
        f"The run folder {folder} exists already; choose another run.dir, "
        f"or continue that run with --resume {folder}."
    )


def _unwritable(folder: Path, reason: str) -> str:
    return f"Cannot make the run folder {folder}: {reason}; choose a writable one with run.dir."


def claim_run_dir(config: RunConfig) -> Path:
    """Make the run's folder, so that no other run can have it. Raises HirankError if it cannot."""
    if config.dir is not None:
        try:
            _make(config.dir)
        except FileExistsError:
            raise HirankError(_taken(config.dir)) from None
        return config.dir
    for number in itertools.count(1):
        folder = Path("runs") / f"{config.name}-{number}"
        try:
            _make(folder)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting does not end")


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        raise
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise HirankError(_unwritable(folder, reason)) from error


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in `run_dir` meanwhile; raise HirankError if one does.

    The system ends this with the process, however that ends. Some network disks cannot do it.
    """
    handle = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise HirankError(
            f"Another process is training in {run_dir}; wait for it, or stop it first."
        ) from None
    except OSError:
        pass  # no locks here: as before there were any
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def cleared_on_failure(run_dir: Path, *, new: bool) -> Iterator[list[bool]]:
    """Remove a new run's folder if it fails before its first step.

    Yields a list; append True to it once there is something worth keeping.
    """
    worth: list[bool] = []
    try:
        yield worth
    except BaseException:
        if new and not worth:
            shutil.rmtree(run_dir, ignore_errors=True)
            if run_dir.parent == Path("runs"):
                with suppress(OSError):  # other runs are in it
                    run_dir.parent.rmdir()
        raise


def versions(device: str) -> dict[str, Any]:
    """What the run ran on."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"device": device}

"""The parent of a run: starts the command, hands on signals, and sums up what was converted."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hirank
from hirank.errors import HirankError
from hirank.launch.interpreter import check_interpreter
from hirank.launch.records import NOTHING, read_records, sentence

__all__ = ["BACKENDS", "DROPOUTS", "child_environment", "run"]

BACKENDS = ("auto", "triton", "torch")
DROPOUTS = ("peft", "single-gemm")
PACKAGE = Path(hirank.__file__).resolve().parent
KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
FORWARDED = (*KEYBOARD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(
    command: Sequence[str],
    *,
    say: Callable[[str], None],
    report: Path | None = None,
    verbose: bool = False,
    backend: str = "auto",
    dropout: str = "peft",
) -> int:
    """Run a command with hirank's layers in every Python process below it.

    Args:
        command: the program and its arguments.
        say: takes the lines that are left to say when the command has ended.
        report: a JSON file to write: what was converted, process by process.
        verbose: whether the processes print every layer, not their number only.
        backend, dropout: as in `hirank.accelerate`.

    Returns:
        The command's exit code; 128 + n where signal n ended it, as a shell has it.

    Raises:
        HirankError: no command, or one that cannot run with hirank; nothing was started.
    """
    if not command:
        raise HirankError("hirank run got no command: write it after --, as in "
                          "'hirank run -- python train.py'.")  # fmt: skip
    if report is not None and not report.parent.is_dir():
        raise HirankError(
            f"--report got {report}, but there is no folder {report.parent}: make it."
        )
    for name, value, values in (("backend", backend, BACKENDS), ("dropout", dropout, DROPOUTS)):
        if value not in values:
            raise HirankError(f"--{name} got {value!r}: choose from {', '.join(values)}.")
    check_interpreter(command)
    settings = {"verbose": verbose, "options": {"backend": backend, "dropout": dropout}}
    with _folder(settings) as folder:
        code = _wait(command, child_environment(os.environ, folder))
        records = read_records(folder)
        imported = any(folder.glob("*.peft"))
    _sum_up(records, imported, say)
    if report is not None:
        _write_report(report, command, code, records)
    return code


@contextlib.contextmanager
def _folder(settings: Mapping[str, Any]) -> Iterator[Path]:
    """The folder for PYTHONPATH: the start-up module, what it needs to know, later the records."""
    with tempfile.TemporaryDirectory(prefix="hirank-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        shutil.copyfile(PACKAGE / "launch" / "startup.py", folder / "sitecustomize.py")
        (folder / "package").write_text(str(PACKAGE), encoding="utf-8")
        (folder / "settings").write_text(json.dumps(settings), encoding="utf-8")
        yield folder


def child_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`environment` with `folder` in front of its PYTHONPATH, and nothing else changed."""
    before = environment.get("PYTHONPATH")  # an empty entry would be the working folder
    return {
        **environment,
        "PYTHONPATH": f"{folder}{os.pathsep}{before}" if before else str(folder),
    }


def _wait(command: Sequence[str], environment: Mapping[str, str]) -> int:
    with _forwarding() as processes:
        process = _start(command, environment)
        processes.append(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, env=environment)
    except OSError as error:
        raise HirankError(f"hirank run cannot start {command[0]!r}: {error.strerror}.") from None


@contextlib.contextmanager
def _forwarding() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Signals to us go to the process, once: those of the keyboard reach it from the terminal."""
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number in KEYBOARD and _in_foreground():
            return
        for process in processes:
            process.send_signal(number)

    # what is ignored, as by nohup, stays so for the command as well
    kept = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in kept}
    try:
        yield processes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether we are in the group of processes that a terminal sends its Ctrl-C to."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _sum_up(
    records: Sequence[Mapping[str, Any]], imported: bool, say: Callable[[str], None]
) -> None:
    """Say what no process has said: nothing was made, or what was made never ran."""
    made = [record for record in records if record["layers"]]
    if not made:
        say(NOTHING if imported else f"{NOTHING}, and PEFT was not imported")
    elif all(record["stage"] == "created" for record in made):
        say(sentence(made[0]["layers"]))


def _write_report(
    file: Path, command: Sequence[str], code: int, records: Sequence[Mapping[str, Any]]
) -> None:
    report = {
        "command": list(command),
        "exit_code": code,
        "summary": [
            sentence(record["layers"]) for record in records if record["rank"] == 0
        ] or [NOTHING],
        "models": list(records),
    }  # fmt: skip
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

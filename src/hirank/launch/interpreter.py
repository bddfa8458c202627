"""Which Python a command runs under, and whether hirank works there."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hirank.errors import HirankError

__all__ = ["OLDEST", "check_interpreter", "check_versions", "find_program", "interpreter_of"]

# PEFT may be older here than where hirank is installed, as trainers pin old versions: these are the
# oldest that the four trainers of docs/run.md were seen to work with.
OLDEST = {"torch": (2, 11), "peft": (0, 18)}
PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
def ask(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({name: ask(name) for name in ("torch", "peft")}))
"""
PROBE_SECONDS = 60
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?(\.exe)?")
_SHELL_LINE = re.compile(rb"'''exec' +(\"[^\"]+\"|\S+)")  # pip's, where the path is long


def find_program(name: str) -> Path:
    """The file that a command's first word stands for.

    Raises:
        HirankError: there is none, or it cannot be executed.
    """
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    if Path(name).is_file():
        raise HirankError(
            f"hirank run got {name!r}, which is not executable: write 'python {name}' for a "
            "Python script, or chmod +x."
        )
    raise HirankError(
        f"hirank run found no command {name!r}: check its spelling, and that its virtual "
        "environment is active."
    )


def interpreter_of(program: Path) -> list[str] | None:
    """The Python that runs `program`: itself, or the one its first line names. None if unknown."""
    if _PYTHON.fullmatch(program.name):
        return [str(program)]
    with program.open("rb") as file:
        first, second, third = (file.readline(1024) for _ in range(3))
    if not first.startswith(b"#!"):
        return None
    words = shlex.split(first[2:].decode(errors="replace"))
    if words[:1] == ["/bin/sh"] and (
        shell := _SHELL_LINE.match(second) or _SHELL_LINE.match(third)
    ):
        words = [shell[1].decode(errors="replace").strip('"')]
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words if words and _PYTHON.fullmatch(Path(words[0]).name) else None


def check_interpreter(command: Sequence[str]) -> None:
    """Look at the environment of a command before it starts, as far as that can be known.

    Raises:
        HirankError: no such command; its Python has PyTorch or PEFT too old or not at all, or is
            told to ignore PYTHONPATH.
    """
    program = find_program(command[0])
    python = interpreter_of(program)
    if python is None:
        return
    own = command[1:] if _PYTHON.fullmatch(program.name) else ()
    _check_flags([*python[1:], *own])
    check_versions(_versions(python[0]), python[0])


def _check_flags(words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word[:2] in ("-c", "-m"):
            return
        if word[:2] not in ("-W", "-X") and (found := set(word) & set("IES")):
            raise HirankError(
                f"hirank run reaches a process through PYTHONPATH and its site module, which "
                f"python -{min(found)} ignores: leave that option out."
            )


def _versions(python: str) -> Mapping[str, str | None]:
    done = subprocess.run(
        [python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HirankError(f"{python} does not run ({last}): mend that environment first.")
    versions: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return versions


def check_versions(versions: Mapping[str, str | None], python: str) -> None:
    """Raises HirankError: PyTorch or PEFT is absent or too old for hirank."""
    for name, oldest in OLDEST.items():
        wanted, version = ".".join(map(str, oldest)), versions[name]
        if version is None:
            raise HirankError(
                f"The command runs under {python}, which has no {name}: install {name}>={wanted} "
                "there, or name the command of another environment."
            )
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            raise HirankError(
                f"The command runs under {python} with {name} {version}, and hirank needs "
                f"{name}>={wanted}: upgrade it there."
            )

"""The scripts that stand beside the package: the installer's choices and the house rules."""

import importlib.util
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install() -> ModuleType:
    return load("install")


@pytest.mark.parametrize(
    ("gpu", "seen", "answers", "expected"),
    [
        (True, True, True, ["torch=={v}"]),
        (False, True, False, ["torch=={v}+cpu"]),
        (False, False, True, ["torch=={v}+cpu", "--extra-index-url", "{index}"]),
        (False, False, False, ["torch=={v}"]),
    ],
    ids=["gpu", "own-configuration", "public-index", "index-does-not-answer"],
)
def test_which_pytorch(install, monkeypatch, gpu, seen, answers, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(install, "pip_can_see", lambda python, version: seen)
    monkeypatch.setattr(install, "reachable", lambda url: answers)
    version, index = install.pinned_version("torch"), install.CPU_INDEX
    arguments = install.torch_arguments(Path("python"))
    assert arguments == [part.format(v=version, index=index) for part in expected]


def test_elsewhere_than_linux_the_plain_version_is_right(install, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert install.torch_arguments(Path("python")) == [f"torch=={install.pinned_version('torch')}"]


def test_an_index_that_never_answers_is_given_up(install, monkeypatch):
    monkeypatch.setattr(install, "PROBE_SECONDS", 0.2)
    with listening_but_silent() as port:
        assert not install.reachable(f"http://127.0.0.1:{port}/")


def test_constraints_carry_no_local_label(install):
    assert "+" not in install.CONSTRAINTS.read_text(encoding="utf-8")


@contextmanager
def listening_but_silent() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("print(1)", 1),
        ("console.print(1)", 0),
        ("import os\nos.environ['A']", 1),
        ("from os import getenv", 1),
        ("import os\nos.replace('a', 'b')", 0),
        ("try:\n    a()\nexcept Exception:\n    b()", 1),
        ("try:\n    a()\nexcept (OSError, Exception):\n    b()", 1),
        ("try:\n    a()\nexcept:\n    b()", 1),
        ("try:\n    a()\nexcept BaseException:\n    b()\n    raise", 0),
        ("try:\n    a()\nexcept OSError:\n    b()", 0),
    ],
)
def test_house_rules(tmp_path: Path, code: str, count: int):
    file = tmp_path / "module.py"
    file.write_text(code)
    assert len(list(load("house_rules").breaches(file))) == count


def test_the_command_line_may_print(tmp_path: Path):
    (tmp_path / "cli").mkdir()
    for name in ("cli.py", "cli/train.py"):
        file = tmp_path / name
        file.write_text("print(1)")
        assert list(load("house_rules").breaches(file)) == []


def test_only_the_launcher_hands_the_environment_on(tmp_path: Path):
    for name, count in (("launch/process.py", 0), ("launch/child.py", 1), ("train/process.py", 1)):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("import os\nx = os.environ")
        assert len(list(load("house_rules").breaches(file))) == count, name

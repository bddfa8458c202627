"""What the README and CONTRIBUTING show is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hirank.train.config import load_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEXTS = {"README": README, "CONTRIBUTING": CONTRIBUTING}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, tiny_model_dir: Path):
    exec(compile(code.replace("path/to/model", str(tiny_model_dir)), "README.md", "exec"), {})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configuration_is_accepted(text: str, tmp_path: Path):
    config = tmp_path / "config.yaml"
    config.write_text(text, encoding="utf-8")
    method = load_config(config).method
    assert (method.name, method.r) == ("dora", 64)


@pytest.mark.parametrize("line", re.findall(r"^hirank .*?(?=\s*#|$)", "".join(blocks("sh")), re.M))
def test_command_has_the_options_shown(line: str):
    _, command, *rest = line.split()
    shown = {word for word in rest if word.startswith("--")}
    process = [sys.executable, "-m", "hirank", command, "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    done = subprocess.run(process, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert shown <= set(re.findall(r"--[a-z-]+", done.stdout))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_make_targets_exist(text: str):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", "\n".join(commands(text)))) <= targets


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_linked_files_exist(text: str):
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_tree_names_every_folder_and_no_other():
    (tree,) = (block for block in blocks("") if block.startswith("src/hirank/"))
    top = re.findall(r"^(\w+)/", tree, re.M)
    packages = re.findall(r"^  (\w+)/", tree, re.M)
    assert sorted(top) == sorted(visible_folders(ROOT))
    assert sorted(packages) == sorted(visible_folders(ROOT / "src/hirank"))


def commands(text: str) -> list[str]:
    """Code: what stands in backticks, and lines that start with make."""
    return re.findall(r"`(make [a-z-]+)", text) + re.findall(r"^make [a-z-]+", text, re.M)


def visible_folders(folder: Path) -> set[str]:
    """Folders under version control, or all but the ignored where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    names = {Path(line).parts[0] for line in listing if "/" in line}
    return {name for name in names if not name.startswith(".")}

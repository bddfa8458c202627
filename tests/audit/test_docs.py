"""What docs/audit.md shows of scaling and compare is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hirank.cli import app
from hirank.train.config import load_config, resolved
from hirank.train.parent import step_notice

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^```console\n\$ (hirank audit (?:scaling|compare) .*)\n((?s:.*?))^```$", PAGE, re.M
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)


def test_every_way_is_shown():
    assert len(SHOWN) == 7


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_a_command_prints_what_the_page_shows(command: str, output: str):
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0 and done.stdout == output


def test_the_warning_is_what_that_configuration_gets(tmp_path: Path):
    blocks = re.findall(r"^```yaml\n((?s:.*?))^```$", PAGE, re.M)
    (settings,) = (block for block in blocks if "parent:" in block)
    (warning,) = re.findall(r"^```text\nWarning: (.*)\n```$", PAGE, re.M)
    (tmp_path / "config.yaml").write_text(settings)
    config = resolved(load_config(tmp_path / "config.yaml"))
    said = step_notice(config)
    assert said is not None and said.replace(f"{ROOT}/", "") == warning


def test_the_configuration_of_the_runs_is_theirs():
    ours = resolved(load_config(ROOT / "examples" / "audit" / "orders.yaml"))
    for rank in (2, 32):
        theirs = load_config(ROOT / "examples" / "audit" / f"orders-r{rank}" / "config.yaml")
        assert theirs.optim == ours.optim and theirs.eval == ours.eval
        assert theirs.method.r == rank

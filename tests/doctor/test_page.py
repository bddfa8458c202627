"""docs/doctor.md is what the registry says, and its examples are real."""

import importlib.util
import re
from pathlib import Path

from typer.testing import CliRunner

from doctor.cases import adamw, rows, wrap
from helpers import tiny_tokenizer
from hirank.cli import app
from hirank.doctor.registry import TRAPS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")


def load_script():
    spec = importlib.util.spec_from_file_location("doctor_table", ROOT / "scripts/doctor_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current():
    script = load_script()
    assert script.filled(PAGE) == PAGE, "run: python scripts/doctor_table.py"
    assert script.main(["--check"]) == 0


def test_every_trap_has_one_row():
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.M) == [trap.name for trap in TRAPS]


def test_python_shown_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    model = wrap()
    given = {"model": model, "optimizer": adamw(model), "batch": rows()}
    exec(f"import hirank\n{code}", given | {"tokenizer": tiny_tokenizer()})
    assert capsys.readouterr().out.startswith("Nothing found")


def test_options_shown_exist():
    shown = set(re.findall(r"--[a-z-]+", "".join(re.findall(r"^hirank doctor.*$", PAGE, re.M))))
    help_text = CliRunner().invoke(app, ["doctor", "--help"], env={"COLUMNS": "200"}).stdout
    assert shown == {"--base", "--json"} and shown <= set(re.findall(r"--[a-z-]+", help_text))

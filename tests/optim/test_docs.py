"""The snippets of docs/optim.md run, one after the other, and its settings are settings."""

import re
from pathlib import Path

from hirank.train.config import load_config, resolved

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "optim.md"


def test_snippets_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3


def test_the_settings_are_read(tmp_path: Path):
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "config.yaml").write_text(blocks[0])
    settings = resolved(load_config(tmp_path / "config.yaml"))
    assert (settings.method.name, settings.method.r, settings.method.gap) == ("galore", 128, 200)
    assert settings.method.step_in_backward and settings.optim.grad_accum == 4


def test_the_demo_that_is_named_is_there():
    assert "`make demo-galore`" in DOCS.read_text(encoding="utf-8")
    assert "\ndemo-galore:" in (DOCS.parent.parent / "Makefile").read_text(encoding="utf-8")

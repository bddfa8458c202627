"""The snippets of docs/optim.md run, one after the other."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "optim.md"


def test_snippets_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2

"""docs/support.md says what the layers do, as far as their libraries are installed here."""

import pytest

from test_scripts import SCRIPTS, load


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load("support_table")


@pytest.mark.filterwarnings("ignore")  # what PEFT and the libraries advise
def test_the_page_is_current(table):
    quick = [name for name in table.OPERATIONS if name != "`torch.compile`"]  # test_compile.py
    assert table.differences(table.PAGE.read_text(encoding="utf-8"), quick) == []


def test_no_cell_is_unknown(table):
    cells = table.cells(table.PAGE.read_text(encoding="utf-8"))
    assert set(cells) == {(name, kind) for name in table.OPERATIONS for kind in table.KINDS}
    assert set(cells.values()) <= {"yes", "PEFT", "no"}


def test_what_is_not_computed_has_a_reason(table):
    text = table.PAGE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 3]
    reasons = {(row[0], kind): row[3] for row in rows for kind in row[1].split(", ")}
    for (name, kind), word in table.cells(text).items():
        assert word == "yes" or reasons[name, kind]

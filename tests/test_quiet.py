"""Other libraries' words that are no errors are not shown; ours and errors are."""

import logging
import sys

import pytest

from hirank.quiet import import_unheard, unheard


def test_of_a_library_only_errors_are_logged(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    before, last = logging.getLogger("transformers").level, logging.lastResort
    with unheard():
        logging.getLogger("some.library").warning("chatter")
        logging.getLogger("some.library").error("broken")
        logging.getLogger("hirank.optim").warning("ours")
        logging.getLogger("hirank.optim").info("a detail")
        assert logging.getLogger("transformers").level == logging.ERROR
    assert capsys.readouterr().err == "broken\nours\n"
    assert (logging.getLogger("transformers").level, logging.lastResort) == (before, last)


def test_what_an_import_prints_is_not_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    (tmp_path / "talkative.py").write_text(
        "import sys, logging\nprint('welcome')\nprint('hint', file=sys.stderr)\n"
        "logging.getLogger('talkative').warning('no kernels')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_unheard("talkative")
    assert "talkative" in sys.modules
    assert capsys.readouterr() == ("", "")


def test_a_library_that_sets_its_own_level_when_imported_is_quiet_all_the_same(
    tmp_path, monkeypatch
):
    """As the Hub's client does, which then tells of each retry."""
    code = "import logging\nlogging.getLogger('huggingface_hub').setLevel(logging.WARNING)\n"
    (tmp_path / "levelled.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with unheard():
        import_unheard("levelled")
        assert logging.getLogger("huggingface_hub").level == logging.ERROR


def test_an_import_that_fails_is_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_unheard("no_such_library")

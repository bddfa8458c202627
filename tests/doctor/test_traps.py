"""Every trap is found when it is there, and not when its fix was applied."""

import pytest

from doctor import cases_setup, cases_training
from doctor.cases import CASES
from hirank import diagnose
from hirank.doctor.registry import TRAPS

assert cases_training and cases_setup  # importing them registers their cases
KNOWN = {trap.name: trap for trap in TRAPS}


def test_every_trap_has_a_case():
    assert sorted(CASES) == sorted(KNOWN)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # PEFT sees some of the traps as well
@pytest.mark.parametrize("name", CASES)
def test_found_then_mended(name: str, tmp_path):
    story, says, along = CASES[name]
    telling = story(tmp_path)
    report = diagnose(**next(telling))
    found = {finding.name: finding for finding in report}
    assert set(found) == {name} | along
    finding, trap = found[name], KNOWN[name]
    assert says in finding.evidence
    assert (finding.level, finding.title, finding.fix) == (trap.level, trap.title, trap.fix)
    mended = diagnose(**next(telling))
    assert not mended, str(mended)
    telling.close()


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_trap_is_told_in_single_lines(trap):
    assert trap.level in ("error", "warning") and trap.look.__doc__
    for text in (trap.title, trap.fix, trap.source):
        assert text and "\n" not in text and "|" not in text
    assert trap.fix.endswith(".") and not trap.title.endswith(".")

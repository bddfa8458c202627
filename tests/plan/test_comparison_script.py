"""The comparison with a GPU runs on a tiny model and a CPU."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hirank.plan.closed import closed_form
from hirank.plan.inventory import read_shape
from hirank.plan.ledger import Overhead
from hirank.plan.setting import METHODS

PLACE = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(PLACE))
    import plan_h200

    yield plan_h200
    del sys.modules["plan_h200"]


def test_it_has_settings_of_several_models_and_every_kind_of_method(script: ModuleType):
    found = script.settings(dry=False)
    assert len(found) >= 80
    assert len({setting.model for setting in found}) == 6
    others = script.chosen(found, "others")
    assert {setting.model for setting in others} == {"moe", "gemma-3-270m", "smollm2-135m"}
    wanted = set(METHODS) - {"rslora", "apollo-mini", "qlora", "qdora"}
    assert wanted <= {setting.method for setting in found}
    assert all(script.predict(setting)["planned"] > 0 for setting in found)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(("method", "checkpointing"), [("dora", True), ("full", False)])
def test_a_real_step_on_a_cpu_needs_what_is_planned(
    script: ModuleType, method: str, checkpointing: bool
):
    pytest.importorskip("trl")
    setting = next(
        s
        for s in script.settings(dry=True)
        if s.method == method and s.checkpointing == checkpointing
    )
    found = script.measure(setting, "cpu")
    assert found["measured"] is not None, found["reason"]
    shape = read_shape(script.config_of(setting), "tiny")
    planned = closed_form(setting, shape, Overhead(workspaces=0)).allocated
    assert planned == pytest.approx(found["measured"], rel=0.02)

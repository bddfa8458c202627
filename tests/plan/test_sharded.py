"""One of two processes needs what a plan says: DDP and FSDP2, by the bytes of its live tensors.

The other one is not there: what FSDP2 sends to it goes nowhere, and takes as much memory as ever.
DDP keeps its buckets for one process as for two.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

PLACE = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(PLACE))
    import plan_sharded

    yield plan_sharded
    for name in ("plan_sharded", "plan_h200"):
        sys.modules.pop(name, None)


@contextmanager
def group_for(sharding: str) -> Iterator[None]:
    """A process group of one, or one that says it is of two."""
    if sharding == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


CASES = [
    (sharding, values)
    for sharding in ("ddp", "fsdp2")
    for values in (
        {"method": "lora"},
        {"method": "dora"},
        {"method": "full", "base_dtype": "fp32", "checkpointing": True},
        {"method": "full", "autocast": False},
    )
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(("sharding", "values"), CASES, ids=str)
def test_a_process_needs_what_is_planned(script: ModuleType, sharding: str, values: dict[str, Any]):
    pytest.importorskip("trl")
    (setting,) = (
        s
        for s in script.settings(2, dry=True)
        if s.sharding == sharding and all(getattr(s, key) == v for key, v in values.items())
    )
    planned = script.single.predict(setting, dry=True)["planned"]
    with group_for(sharding):
        measured = script.measure(setting, "cpu")["measured"]
    assert planned == pytest.approx(measured, rel=0.03)

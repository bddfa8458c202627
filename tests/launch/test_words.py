"""What is said, which Python is meant, and what single trainers do."""

import types
from pathlib import Path

import pytest
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hirank.errors import HirankError
from hirank.launch.interpreter import check_versions, interpreter_of
from hirank.launch.records import read_records, sentence, table, write_record
from hirank.launch.trainers import unwrap


def layer(kind: str, tier: str, reason: str = "") -> dict[str, str]:
    return {"name": f"a.{kind}", "kind": kind, "tier": tier, "reason": reason}


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([layer("dora", "eager")], "1 DoRA layer converted (eager), 0 left to PEFT"),
        (
            [layer("dora", "eager")] * 2 + [layer("lora", "composed")],
            "2 DoRA and 1 LoRA layers converted (2: eager; 1: composed), 0 left to PEFT",
        ),
        (
            [layer("lora", "peft", "it has hooks")] * 3,
            "0 LoRA or DoRA layers converted, 3 left to PEFT (3: it has hooks)",
        ),
    ],
)
def test_sentence(layers, said):
    assert sentence(layers) == f"hirank: {said}"


def test_table():
    assert table([layer("dora", "eager", "why"), layer("lora", "peft", "so")]) == (
        "a.dora  dora  eager  why\na.lora  lora  peft   so"
    )


def test_records_come_back_by_rank_and_a_missing_folder_is_no_error(tmp_path: Path):
    made = [{"pid": pid, "rank": rank, "model": 0, "layers": []} for pid, rank in ((5, 1), (9, 0))]
    for record in made:
        write_record(tmp_path, record)
        write_record(tmp_path / "gone", record)
    assert read_records(tmp_path) == made[::-1]
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".json"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/v/bin/python3.12\nimport x\n", ["/v/bin/python3.12"]),
        ("#!/usr/bin/env python3\n", ["python3"]),
        ("#!/usr/bin/env -S python3 -u\n", ["python3", "-u"]),
        ("#!/bin/sh\n'''exec' \"/a b/bin/python\" \"$0\" \"$@\"\n' '''\n", ["/a b/bin/python"]),
        ("#!/bin/sh\necho hello\n", None),
        ("#!/bin/bash\npython x.py\n", None),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_the_interpreter_of_a_program(tmp_path: Path, text: str, expected: list[str] | None):
    program = tmp_path / "trl"
    program.write_text(text)
    assert interpreter_of(program) == expected


def test_an_interpreter_is_its_own():
    assert interpreter_of(Path("/v/bin/python3.11")) == ["/v/bin/python3.11"]


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.11.0+cu128", "peft": "0.18.1"}, None),
        ({"torch": "3.0.0a1", "peft": "1.0"}, None),
        ({"torch": None, "peft": "0.21.0"}, "which has no torch: install torch>=2.11 there"),
        ({"torch": "2.13.0", "peft": "0.17.2"}, "with peft 0.17.2, and hirank needs peft>=0.18"),
    ],
)
def test_versions(versions, said):
    if said is None:
        return check_versions(versions, "/v/bin/python")
    with pytest.raises(HirankError, match=said):
        check_versions(versions, "/v/bin/python")


def keep_device_forward(self, x):
    return self.forward_origin(x)


@pytest.mark.parametrize("module", ["swift.tuners.peft", "elsewhere"])
def test_only_the_wrapper_of_ms_swift_is_taken_off(module: str, monkeypatch):
    monkeypatch.setattr(keep_device_forward, "__module__", module)
    model = nn.Sequential(nn.Linear(4, 4))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), model)
    part = model[0].lora_A["default"]
    part.forward_origin = part.forward
    part.forward = types.MethodType(keep_device_forward, part)
    unwrap(model[0])
    assert ("forward" in vars(part)) is (module == "elsewhere")

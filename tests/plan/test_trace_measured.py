"""Traces against peaks that an H200 measured, in the committed rows of the suite `model`."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hirank.plan import step
from hirank.plan.setting import Setting
from hirank.plan.trace import trace_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "nvidia-h200"
METHODS = {"hirank-dora": "dora", "peft-dora": "dora-peft"}
OTHER_CODE = ("c2e1e19", "a6c0739")
"""Where hirank's layers kept their adapters' casts: 1.4 to 1.7 GB of the process that also ran the
other arms, whose allocator then cut its blocks in other places."""


def rows():
    """The newest peak of every arm, model and rank, whole steps."""
    found = {}
    for line in (RESULTS / "model.jsonl").read_text().splitlines():
        row = json.loads(line)
        settings, peak = row["settings"], row["metrics"].get("peak_bytes")
        known = row["commit"] not in OTHER_CODE
        if row["arm"] in METHODS and settings["optimizer"] and peak and known:
            found[row["arm"], settings["model"], settings["rank"]] = settings, peak
    return found


@pytest.mark.parametrize("arm", rows(), ids=str)
def test_a_measured_peak_is_foretold(arm, monkeypatch):
    settings, peak = rows()[arm]
    kept = settings["loss_tokens"]

    def last_tokens(_, model, ids):
        logits = model(input_ids=ids, logits_to_keep=kept, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1 - kept :].flatten())

    monkeypatch.setattr(step, "loss_of", last_tokens)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: None)
    found = trace_of(
        Setting(
            model=settings["model"],
            method=METHODS[arm[0]],
            rank=settings["rank"],
            sequence=settings["seq"],
            batch=settings["batch"],
            accumulation=settings["accumulation"],
            checkpointing=settings["checkpointing"],
        )
    )
    assert found.allocated == pytest.approx(peak, rel=0.01)

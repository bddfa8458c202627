"""A merge with its verdict: computed, measured, verified by loading it, kept if it is worth it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hirank.adapters.merge_files import write_merged
from hirank.adapters.merge_plan import MergePlan
from hirank.audit.merge import FidelityMeter
from hirank.audit.served import Prompt, served
from hirank.audit.verify import verified
from hirank.audit.weight_gap import weight_gap

__all__ = ["REPORT", "as_json", "merge_and_measure"]

REPORT = "merge.json"
"""What a merged folder tells of its making."""


def as_json(report: Any) -> str:
    """JSON that any reader takes: what is infinite or no number becomes null."""
    return json.dumps(_plain(report), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Destroyed(Exception):
    """The draft is not to be kept."""


def merge_and_measure(
    plan: MergePlan,
    target: Path | None,
    *,
    prompts: Sequence[Prompt] | None = None,
    verify: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Merge as planned into `target` (None: only measure), and say what that keeps.

    Args:
        plan: of `plan_merge`.
        target: a new folder; it also gets the report, as `merge.json`.
        prompts: scored by base, adapter and merged model, see `hirank.audit.served`.
        verify: load the merged folder with plain Transformers and compare its logits, where the
            memory allows it.
        force: keep a folder whose merge destroys the training.

    Returns:
        The report, for JSON: base, adapter, out (None if nothing was written), fidelity (see
        `hirank.audit.merge.Fidelity`), gap (see `hirank.audit.weight_gap`, of a merge into weights
        that were not trained on), verified and check (see `hirank.audit.served.Served`).

    Raises:
        HirankError: see `plan_merge`, `write_merged` and `served`; nothing is left then.
    """
    meter, folders = FidelityMeter(), (plan.base.folder, plan.adapter.folder)
    report: dict[str, Any] = {
        "base": str(plan.base.folder),
        "adapter": str(plan.adapter.folder),
        "trained_on": plan.trained_on,
        "stochastic_seed": plan.rounding.seed,
        "out": None if target is None else str(target),
    }

    if not plan.dequantised:
        report["gap"] = weight_gap(plan).as_dict()

    def finish(draft: Path) -> None:
        if verify:
            report["verified"] = verified(*folders, draft, trained_on=plan.trained_on)
        report["fidelity"] = meter.result(_distance(report)).as_dict()
        if report["fidelity"]["verdict"] == "destroyed" and not force:
            raise _Destroyed
        if prompts is not None:
            found = served(*folders, draft, prompts, trained_on=plan.trained_on)
            report["check"] = found.as_dict()
        (draft / REPORT).write_text(as_json(report) + "\n", encoding="utf-8")

    try:
        write_merged(plan, target, meter, finish)
    except _Destroyed:
        report["out"] = None
    report["fidelity"] = meter.result(_distance(report)).as_dict()
    return report


def _distance(report: dict[str, Any]) -> float | None:
    found: float | None = report.get("verified", {}).get("distance")
    return found

"""A merge with its verdict: computed, measured, verified by loading it, kept if it is worth it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hirank.adapters.merge_files import write_merged
from hirank.adapters.merge_plan import MergePlan
from hirank.audit.merge import FidelityMeter
from hirank.audit.served import Prompt, probe, served

__all__ = ["REPORT", "merge_and_measure"]

REPORT = "merge.json"
"""What a merged folder tells of its making."""


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
        `hirank.audit.merge.Fidelity`), verified and check (see `hirank.audit.served.Served`).

    Raises:
        HirankError: see `plan_merge`, `write_merged` and `served`; nothing is left then.
    """
    meter = FidelityMeter()
    report: dict[str, Any] = {
        "base": str(plan.base.folder),
        "adapter": str(plan.adapter.folder),
        "trained_on": plan.trained_on,
        "stochastic_seed": plan.rounding.seed,
        "out": None if target is None else str(target),
    }

    def finish(draft: Path) -> None:
        report["fidelity"] = meter.result().as_dict()
        if report["fidelity"]["verdict"] == "destroyed" and not force:
            raise _Destroyed
        if verify:
            report["verified"] = _verified(plan, draft)
        if prompts is not None:
            found = _served(plan, draft, prompts)
            report["check"] = found.as_dict()
        (draft / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    try:
        write_merged(plan, target, meter, finish)
    except _Destroyed:
        report["out"] = None
    report["fidelity"] = meter.result().as_dict()
    return report


def _served(plan: MergePlan, draft: Path, prompts: Sequence[Prompt]) -> Any:
    return served(plan.base.folder, plan.adapter.folder, draft, prompts, trained_on=plan.trained_on)


def _verified(plan: MergePlan, draft: Path) -> dict[str, Any]:
    needed, free = _memory_needed(plan), _memory_free()
    if free is not None and needed > free:
        return {
            "told": f"Not verified: loading it needs {needed / 1e9:.0f} GB of memory and "
            f"{free / 1e9:.0f} GB are free."
        }
    vocabulary = plan.base.config.get("vocab_size") or 256
    found = _served(plan, draft, probe(int(vocabulary)))
    return {
        "distance": found.distance,
        "told": "Verified: plain Transformers loads it, and its logits keep the adapter's effect "
        f"to {100 * found.distance:.2g} %.",
    }


def _memory_needed(plan: MergePlan) -> int:
    """Bytes of one model in fp32, with its adapter and room to compute."""
    numbers = sum(entry.nbytes // entry.dtype.itemsize for entry in plan.base.entries.values())
    return 5 * numbers + plan.adapter.path.stat().st_size


def _memory_free() -> int | None:
    """Bytes, where the system says."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(found.get("MemAvailable", 0)) * 1024

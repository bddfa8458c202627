"""Peak memory from a trace: the real code, run for a step on tensors without numbers.

Two shallow models are traced and what they need is continued to the model's depth, see `depth.py`.
What is counted are tensors and cuBLAS's workspaces; those of kernels are not, nor what a solver
needs on its way.
Flash attention is taken to save what SDPA saves: its output and a number for each row.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from hirank.errors import HirankError
from hirank.plan.depth import peaks, peaks_at
from hirank.plan.faked import faking, give_fakes
from hirank.plan.find import find_config
from hirank.plan.gpu import as_here, as_on_gpu
from hirank.plan.ledger import WORKSPACES, Ledger
from hirank.plan.live import Moment
from hirank.plan.setting import Setting
from hirank.plan.step import TEMPORARY, Run
from hirank.plan.subject import build, check_traceable, depth_of, optimizer_for, with_depth

__all__ = ["moments_of", "trace", "trace_of"]

_PHASES = {
    "load": "load",
    "forward": "forward end",
    "loss": "forward end",
    "loss back": "loss backward",
    "blocks back": "block backward",
    "step": "optimizer step",
    "step: clipping": "optimizer step",
    "step: plain": "optimizer step",
    "refresh": "refresh step",
    "refresh: clipping": "refresh step",
    "refresh: plain": "refresh step",
    "evaluation": "evaluation",
}
"""Phases of a step, and what a ledger calls them; what lies between steps is none."""


def trace(setting: Setting, config: Any, *, gpu: bool = True) -> Ledger:
    """The ledger of a setting.

    Args:
        setting: what is trained, and how; its `model` is not read.
        config: the configuration of the model, as Transformers has it.
        gpu: whether hirank's code is to take the ways it takes on a GPU.

    Raises:
        HirankError: the setting is one that a trace cannot show.
    """
    check_traceable(setting)
    depth = depth_of(config)
    spaces = WORKSPACES if gpu else 0
    if depth <= 2:
        return _ledger(setting, peaks(moments_of(setting, config, gpu)), spaces)
    depths = _depths(config)
    small, large = (moments_of(setting, with_depth(config, d), gpu) for d in depths)
    return _ledger(setting, peaks_at(depth, small, large, depths), spaces)


def trace_of(setting: Setting) -> Ledger:
    """The ledger of a setting, its model looked up by name as the closed form does.

    Raises:
        HirankError: there is no such model, Transformers does not know it, or a trace cannot show
            the setting.
    """
    from transformers import CONFIG_MAPPING

    found, title = find_config(setting.model)
    found = dict(found.get("text_config") or found)
    kind = found.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise HirankError(
            f"{title} is of the architecture {kind}, which this Transformers does not have; "
            "install a newer one, or use the closed form."
        )
    return trace(setting, CONFIG_MAPPING[kind](**found))


def _depths(config: Any) -> tuple[int, int]:
    """Two depths that both have the blocks of the model in their right shares."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or [None]
    period = next(
        (p for p in range(1, 7) if all(kinds[i] == kinds[i % p] for i in range(len(kinds)))), 1
    )
    return (2, 3) if period == 1 else (period, 2 * period)


def moments_of(setting: Setting, config: Any, gpu: bool) -> list[Moment]:
    """What is alive after every operation of one step of this very model, on fake tensors."""
    model = build(setting, config)
    masked, packed = setting.packing and setting.attention != "flash", setting.is_quantised
    ways = as_on_gpu(masked=masked, quantised=packed) if gpu else as_here(masked=masked)
    try:
        with faking(), ways:
            give_fakes(model)
            run = Run(setting, model, optimizer_for)
            _steps(run)
    except _UNKNOWN as error:
        raise HirankError(
            f"A trace of {type(model).__name__} has to know numbers ({error}), which a plan does "
            "not have; use the closed form."
        ) from error
    return list(run.live.moments())


_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    UnsupportedFakeTensorException,
)
"""What fake tensors raise where values decide."""


def _steps(run: Run) -> None:
    """A step after one that made the optimiser's state."""
    if run.setting.step_in_backward:
        run.step("refresh")
    else:
        run.start_states()
    run.step("step")
    if run.setting.eval_batch:
        run.evaluate()


def _ledger(setting: Setting, found: dict[str, Moment], spaces: int) -> Ledger:
    """`spaces`: bytes of libraries, from the first product on."""
    phases: dict[str, Counter[str]] = {}
    for phase, moment in found.items():
        name = _PHASES.get(phase)
        if name is None or (name == "refresh step" and not setting.is_low_rank):
            continue
        if name not in phases or moment.total > phases[name].total():
            phases[name] = moment.kinds
    for name, kinds in phases.items():
        kinds[TEMPORARY] += 0 if name == "load" else spaces
    return Ledger({name: dict(+kinds) for name, kinds in phases.items()})

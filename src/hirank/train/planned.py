"""What a run will need, as `hirank plan` sees it; one line before it, one after it.

On a GPU a run whose tensors alone exceed the memory is refused before its weights are loaded. On a
CPU the numbers are told, as memory there is shared and can be paged. After a run on a GPU, what it
needed is written down for later plans, see plan/calibration.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError
from hirank.plan.calibration import Measured, calibration_file, facts_of, remember
from hirank.plan.closed import closed_form
from hirank.plan.inventory import KNOWN, read_shape
from hirank.plan.ledger import ESTIMATED, Overhead
from hirank.plan.setting import Setting
from hirank.plan.sizes import gib
from hirank.train.run import PACKAGES, versions

if TYPE_CHECKING:
    import torch

    from hirank.train.config import TrainConfig

__all__ = ["Planned", "check_fits", "plan_run", "setting_of", "told_after"]

OBVIOUS = 1.05
"""Times the memory: beyond what the plan may be wrong by."""


@dataclass(frozen=True)
class Planned:
    """The plan of a run, as its log keeps it."""

    allocated: int
    """Bytes in tensors at the peak."""
    moment: str
    dominating: str
    capacity: int | None
    """Bytes of the GPU; None on a CPU."""
    model: dict[str, Any] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    """What memory depends on, without names."""
    calibration: Path | None = None
    """The file of what runs needed; None: it is not written down."""

    @property
    def line(self) -> str:
        """One line before the run."""
        of = f" of {gib(self.capacity)}" if self.capacity else ""
        return f"plan: peak {gib(self.allocated)}{of} at {self.moment}, most of it {self._most}"

    @property
    def _most(self) -> str:
        return "logits" if self.dominating == "logits and loss" else self.dominating

    def as_dict(self) -> dict[str, Any]:
        """For the log."""
        return {
            "allocated": self.allocated,
            "moment": self.moment,
            "dominating": self.dominating,
            "capacity": self.capacity,
        }


def plan_run(
    config: TrainConfig, architecture: Any, longest: int, device: torch.device
) -> Planned | None:
    """The plan; None if none is wanted, or the closed form knows no answer.

    Args:
        config: resolved.
        architecture: the model's configuration, as Transformers has it.
        longest: tokens of the longest row.
        device: where it will be trained.
    """
    settings = architecture.to_dict()
    kind = settings.get("text_config", settings).get("model_type")
    if config.run.plan == "none" or kind not in KNOWN:
        return None
    try:
        shape = read_shape(settings, config.model.name)
        setting = setting_of(config, longest, gpu=device.type == "cuda")
        on_top = ESTIMATED if device.type == "cuda" else Overhead(workspaces=0)
        ledger = closed_form(setting, shape, on_top)
    except HirankError:  # what a plan cannot see is no reason to refuse a run
        return None
    return Planned(
        ledger.allocated,
        ledger.moment,
        ledger.dominating,
        _memory_of(device),
        *facts_of(setting, shape),
        config.run.calibration or calibration_file(),
    )


def _memory_of(device: torch.device) -> int | None:
    import torch

    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def check_fits(planned: Planned | None, config: TrainConfig) -> None:
    """Raise HirankError if the tensors alone are too much for the GPU, by more than a plan errs."""
    if planned is None or planned.capacity is None or config.run.plan != "check":
        return
    if planned.allocated > OBVIOUS * planned.capacity:
        raise HirankError(
            f"This run needs about {gib(planned.allocated)} and the GPU has "
            f"{gib(planned.capacity)}; see hirank plan CONFIG --fit '{gib(planned.capacity)}' for "
            "what to change, or set run.plan to say to try it all the same."
        )


# After the run.


def told_after(planned: Planned | None, measured: int | None) -> str | None:
    """One line after the run, what was planned and what was seen; and that is written down.

    Where it cannot be written, the line says so: the run is over and good.
    """
    if planned is None or measured is None:
        return None
    off = 100 * (planned.allocated / measured - 1)
    said = f"peak memory {gib(measured)}, planned {gib(planned.allocated)} ({off:+.0f} %)"
    try:
        _write_down(planned, measured)
    except HirankError as error:
        return f"{said}; not written down, as {error}"
    return said


def _write_down(planned: Planned, measured: int) -> None:
    if planned.calibration is None or planned.capacity is None or not _alone():
        return
    gpu, reserved, process = _seen()
    new = Measured(
        date=datetime.now(UTC).date().isoformat(),
        gpu=gpu,
        capacity=planned.capacity,
        model=planned.model,
        setting=planned.setting,
        versions={name: found for name, found in versions("").items() if name in PACKAGES},
        planned=planned.allocated,
        allocated=measured,
        reserved=reserved,
        process=process,
    )
    remember(planned.calibration, new)


def _alone() -> bool:
    """Whether this process is the whole run: a plan here is of one GPU."""
    from torch import distributed

    up = distributed.is_available() and distributed.is_initialized()
    return not up or distributed.get_world_size() == 1


def _seen() -> tuple[str, int, int]:
    """The GPU's name, the allocator's peak, and that with what else is taken on the GPU now."""
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    others = total - free - torch.cuda.memory_reserved()
    return torch.cuda.get_device_name(), reserved, reserved + others


# The setting.


def setting_of(config: TrainConfig, longest: int | None = None, *, gpu: bool = True) -> Setting:
    """The run as the plan sees it: on a GPU bf16 autocast, torch's fused AdamW, TRL's loss.

    Args:
        config: resolved or not.
        longest: tokens of the longest row, where the data was read; else data.max_length counts.
        gpu: whether it runs on a GPU.
    """
    method, optim, data = config.method, config.optim, config.data
    low_rank = method.method.optimizer is not None
    name = "dora-peft" if method.name == "dora" and not method.accelerate else method.name
    targets = method.target_modules
    wide = not gpu or not (method.method.adapter or low_rank)
    values: dict[str, Any] = {
        "model": config.model.name,
        "method": name,
        "rank": method.r,
        "targets": targets if isinstance(targets, str) else tuple(targets),
        "base_dtype": _dtype(config.model.dtype, wide=wide),
        "autocast": gpu,
        "step_in_backward": method.step_in_backward,
        "accumulation": optim.grad_accum,
        "checkpointing": optim.checkpointing,
        "attention": _attention(config.model.attention),
        "packing": data.packing,
        "sequence": data.max_length if longest is None or data.packing else longest,
        "batch": optim.batch_size,
        "eval_batch": config.eval.batch_size if config.eval.every else 0,
    }
    if low_rank and method.state is not None:
        values["state_dtype"] = method.state
    return Setting(**values)


def _dtype(name: str, *, wide: bool) -> str:
    if name == "auto":
        return "fp32" if wide else "bf16"
    return {"float32": "fp32", "bfloat16": "bf16"}[name]


def _attention(name: str | None) -> str:
    if name is None or name == "eager":
        return name or "sdpa"
    return "flash" if "flash" in name else "sdpa"

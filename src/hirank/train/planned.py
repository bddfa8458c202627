"""What a run will need, as `hirank plan` sees it: its configuration as a Setting of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hirank.plan.setting import Setting

if TYPE_CHECKING:
    from hirank.train.config import TrainConfig

__all__ = ["setting_of"]


def setting_of(config: TrainConfig, longest: int | None = None) -> Setting:
    """The run on a GPU: bf16 autocast, torch's fused AdamW, TRL's loss, adapters in fp32.

    Args:
        config: resolved or not.
        longest: tokens of the longest row, where the data was read; else data.max_length counts.
    """
    method, optim, data = config.method, config.optim, config.data
    low_rank = method.method.optimizer is not None
    name = "dora-peft" if method.name == "dora" and not method.accelerate else method.name
    targets = method.target_modules
    whole = not (method.method.adapter or low_rank)
    values: dict[str, Any] = {
        "model": config.model.name,
        "method": name,
        "rank": method.r,
        "targets": targets if isinstance(targets, str) else tuple(targets),
        "base_dtype": _dtype(config.model.dtype, whole=whole),
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


def _dtype(name: str, *, whole: bool) -> str:
    if name == "auto":
        return "fp32" if whole else "bf16"
    return {"float32": "fp32", "bfloat16": "bf16"}[name]


def _attention(name: str | None) -> str:
    if name is None or name == "eager":
        return name or "sdpa"
    return "flash" if "flash" in name else "sdpa"

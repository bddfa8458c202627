"""Names that other trainers use for our settings: Transformers, Axolotl, ms-swift, LLaMA-Factory.

Most are another word for the same thing. A few ask for a method by a switch or by an optimiser's
name, and `translated` turns those into the method.
"""

from __future__ import annotations

from typing import Any

from hirank.errors import HirankError
from hirank.optim import hyper

__all__ = ["ALIASES", "OPTIMIZERS", "REFUSED", "translated"]

ALIASES = {
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "attn_implementation": "model.attention",
    "finetuning_type": "method.name",
    "tuner_type": "method.name",
    "lora_r": "method.r",
    "lora_rank": "method.r",
    "rank": "method.r",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_target_modules": "method.target_modules",
    "lora_target": "method.target_modules",
    "dataset": "data.train",
    "val_dataset": "data.eval",
    "val_set_size": "data.eval_fraction",
    "split_dataset_ratio": "data.eval_fraction",
    "cutoff_len": "data.max_length",
    "sequence_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "sample_packing": "data.packing",
    "train_on_inputs": "data.train_on_prompt",
    "learning_rate": "optim.lr",
    "num_epochs": "optim.epochs",
    "num_train_epochs": "optim.epochs",
    "per_device_train_batch_size": "optim.batch_size",
    "micro_batch_size": "optim.batch_size",
    "gradient_accumulation_steps": "optim.grad_accum",
    "gradient_checkpointing": "optim.checkpointing",
    "lr_scheduler": "optim.scheduler",
    "lr_scheduler_type": "optim.scheduler",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "max_grad_norm": "optim.clip",
    "eval_steps": "eval.every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep",
    "logging_steps": "run.log_every",
    "output_dir": "run.dir",
}

_SAME_IN_OPTIM = {
    **hyper.ALIASES,
    "galore_cos_threshold": "lazy",
    "galore_gamma_proj": "lazy_growth",
}
_SAME_IN_OPTIM |= {"galore_queue_size": "lazy_patience", "apollo_scale_type": "scale_by"}
_SAME_IN_OPTIM |= {"apollo_rank": "rank", "apollo_update_interval": "gap", "apollo_scale": "scale"}
ALIASES |= {
    name: "method.r" if ours == "rank" else f"method.{ours}"
    for name, ours in _SAME_IN_OPTIM.items()
}
ALIASES |= dict.fromkeys(
    ("galore_target", "galore_target_modules", "apollo_target", "optim_target_modules"),
    "method.target_modules",
)
ALIASES |= dict.fromkeys(
    ("galore_layerwise", "apollo_layerwise", "galore_optim_per_parameter"),
    "method.step_in_backward",
)

REFUSED = {
    "deepspeed": "hirank train does not run under DeepSpeed: ZeRO flattens the matrices that "
    "adapters and projections need whole; leave it out",
}
"""Settings that are known elsewhere and cannot be had here, with the reason."""

_SWITCHES = {"use_galore": "galore", "use_apollo": "apollo"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "galore_adamw": {"name": "galore"},
    "galore_adamw_8bit": {"name": "galore", "state": "int8"},
    "apollo_adamw": {"name": "apollo"},
}
OPTIMIZERS |= {
    f"{name}_layerwise": {**settings, "step_in_backward": True}
    for name, settings in OPTIMIZERS.items()
}
"""What `optim: NAME` asks for, where Transformers' name is one of these."""

_NAMED_BY = ("finetuning_type", "tuner_type")


def translated(tree: dict[str, Any]) -> dict[str, Any]:
    """Settings with `use_galore: true`, `optim: galore_adamw` and apollo_scale in our words.

    Raises HirankError for two methods at once, or an optimiser that is not here.
    """
    tree = dict(tree)
    asked: dict[str, dict[str, Any]] = {}
    for switch, name in _SWITCHES.items():
        if isinstance(tree.get(switch), bool) and tree.pop(switch):
            asked[switch] = {"name": name}
    optimizer = tree.get("optim")
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise HirankError(
                f"optim: {optimizer} names an optimiser that is not here; use one of "
                f"{', '.join(OPTIMIZERS)}, or leave it out for AdamW."
            )
        del tree["optim"]
        asked[f"optim: {optimizer}"] = OPTIMIZERS[optimizer]
    if isinstance(tree.get("apollo_scale"), int | float) and tree["apollo_scale"] >= 0:
        tree["apollo_scale"] **= 0.5  # apollo_torch multiplies by its root
    return _with_method(tree, asked) if asked else tree


def _with_method(tree: dict[str, Any], asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`finetuning_type: full` beside a switch says the same; any other method contradicts it."""
    method = tree.get("method", {})
    method = method if isinstance(method, dict) else {"name": method}
    named = {key: tree.pop(key) for key in _NAMED_BY if tree.get(key) is not None}
    named |= {"method": method["name"]} if "name" in method else {}
    others = [f"{key}: {value}" for key, value in named.items() if value != "full"]
    claims = [*asked, *others]
    if len(claims) > 1:
        raise HirankError(f"{claims[0]} and {claims[1]} ask for two methods; give one.")
    (wanted,) = asked.values()
    tree["method"] = {**method, **wanted}
    return tree

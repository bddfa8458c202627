"""What is trained: an adapter of some kind, or all weights. A method's settings meet a model.

scale      lora, dora: alpha / r      rslora: alpha / sqrt(r)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from hirank.errors import HirankError
from hirank.train import lowrank
from hirank.train.method import METHODS, Method, MethodConfig

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

__all__ = [
    "Applied",
    "METHODS",
    "Method",
    "MethodConfig",
    "apply",
    "check",
    "lora_config",
    "parameter_counts",
    "unmatched_patterns",
]


@dataclass(frozen=True)
class Applied:
    """A model made trainable, and which code each adapted layer runs."""

    model: nn.Module
    layers: list[dict[str, str]]  # name, kind, tier, reason


def lora_config(config: MethodConfig, **changes: Any) -> LoraConfig:
    """The settings as PEFT wants them."""
    from peft import LoraConfig

    settings: dict[str, Any] = {
        "r": config.r,
        "lora_alpha": _whole(config.effective_alpha),
        "lora_dropout": config.dropout,
        "target_modules": config.target_modules,
        "modules_to_save": config.modules_to_save or None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {name: _whole(a) for name, a in config.alpha_pattern.items()},
        "task_type": "CAUSAL_LM",
        **config.method.lora,
    }
    return LoraConfig(**(settings | changes))


def _whole(number: float) -> float:
    """PEFT writes alpha as it is given: 32 rather than 32.0 where it is a whole number."""
    return int(number) if number == int(number) else number


# Checks, on a model without weights.


def check(model: Any, config: MethodConfig) -> int:
    """Refuse settings that do not fit the model, which may be on the meta device.

    Returns how many parameters will be trained.

    Raises HirankError if no layer matches, a rank is larger than its layer allows, or the output
    head is adapted. Warns about patterns that match nothing. Leaves adapters in `model`.
    """
    if config.method.optimizer:
        lowrank.check(model, config)
    if not config.method.adapter:
        return parameter_counts(model)[0]
    names = [name for name, _ in model.named_modules() if name]
    _check_names("modules_to_save", config.modules_to_save, names, names)
    _check_sizes(model, config)
    wrapped = _wrap(model, config)
    adapted = dict(_adapted_layers(wrapped))
    _check_names("target_modules", config.target_modules, adapted, names)
    head = model.get_output_embeddings()
    for name, layer in adapted.items():
        if layer is head:
            raise HirankError(f"method.target_modules may not include the output head {name}.")
        _check_rank(name, layer)
    for setting, pattern in unmatched_patterns(adapted, config):
        warnings.warn(f"method.{setting}: {pattern!r} matches no adapted layer.", stacklevel=1)
    magnitudes = sum(layer.out_features for layer in adapted.values())
    return parameter_counts(wrapped)[0] + (magnitudes if config.name == "dora" else 0)


def _check_sizes(model: Any, config: MethodConfig) -> None:
    """Refuse ranks that no weight is wide enough for, before there are matrices of that rank."""
    widest = max(max(p.shape, default=0) for p in model.parameters())
    for rank in (config.r, *config.rank_pattern.values()):
        if rank > widest:
            raise HirankError(f"The rank {rank} is larger than any layer's size, {widest}.")


def _check_names(
    setting: str, endings: object, matched: Iterable[str], names: Iterable[str]
) -> None:
    """Refuse a name that nothing matched ends in: it is a slip of the pen, not a wish."""
    for ending in endings if isinstance(endings, list) else []:
        if not any(f".{name}".endswith(f".{ending}") for name in matched):
            raise HirankError(
                f"method.{setting} names {ending!r}, which nothing in the model ends in"
                f"{_nearest(ending, names)}."
            )


def _nearest(ending: str, names: Iterable[str]) -> str:
    near = get_close_matches(ending, {name.rpartition(".")[2] for name in names}, n=1)
    return f"; the nearest known one is {near[0]}" if near else ""


def _wrap(model: Any, config: MethodConfig) -> nn.Module:
    """The model with plain LoRA where the adapter will be: enough to know names and shapes."""
    from peft import get_peft_model

    try:
        with _warned_already():
            return get_peft_model(model, lora_config(config, use_dora=False))
    except ValueError as error:
        raise HirankError(_no_target(model, config, error)) from error


def _no_target(model: Any, config: MethodConfig, error: ValueError) -> str:
    from torch import nn

    if "not found" not in str(error) and "no modules" not in str(error).lower():
        return f"method.target_modules {config.target_modules!r} does not work: {error}"
    linears = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
    endings = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    return (
        f"method.target_modules {config.target_modules!r} matches no layer of the model; "
        f"its linear layers end in {', '.join(endings) or 'nothing: it has none'}."
    )


def _adapted_layers(model: nn.Module) -> Iterable[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix("base_model.model."), module


def _check_rank(name: str, layer: Any) -> None:
    rank, smallest = layer.r["default"], min(layer.in_features, layer.out_features)
    if rank > smallest:
        raise HirankError(
            f"The rank {rank} is larger than layer {name} allows, which maps "
            f"{layer.in_features} to {layer.out_features}; use method.r <= {smallest}."
        )


def unmatched_patterns(names: Iterable[str], config: MethodConfig) -> list[tuple[str, str]]:
    """(setting, pattern) of every rank or alpha pattern that fits none of the layer names."""
    names = list(names)
    patterns = [("rank_pattern", key) for key in config.rank_pattern]
    patterns += [("alpha_pattern", key) for key in config.alpha_pattern]
    return [
        (setting, pattern)
        for setting, pattern in patterns
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
    ]


# The real thing.


def apply(model: Any, config: MethodConfig) -> Applied:
    """Make the model trainable by the chosen method: adapters in float32, the base frozen.

    `check` comes first, and has said which patterns match nothing.
    """
    if not config.method.adapter:
        return Applied(model.train(), [])
    from hirank.adapters.peft import explain

    make = _accelerated if config.accelerate else _with_adapter
    with _warned_already():
        adapted = make(model, config)
    return Applied(adapted, [asdict(row) for row in explain(adapted).rows])


def _accelerated(model: Any, config: MethodConfig) -> nn.Module:
    """PEFT makes hirank's layers at once, which saves it a product B A for each of them."""
    from hirank.adapters.peft import accelerate, patch_peft

    with patch_peft():
        return accelerate(_with_adapter(model, config))


def _with_adapter(model: Any, config: MethodConfig) -> nn.Module:
    from peft import get_peft_model

    try:
        return cast("nn.Module", get_peft_model(model, lora_config(config)))
    except ValueError as error:
        raise HirankError(_no_target(model, config, error)) from error


@contextmanager
def _warned_already() -> Iterator[None]:
    """`check` names patterns that match nothing; PEFT and hirank's layers need not do it again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(rank|alpha)_pattern")
        yield


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)

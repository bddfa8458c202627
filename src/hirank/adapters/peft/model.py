"""The models around converted layers: PEFT's `LoraModel`, and `PeftModel` with its subclasses.

As with the layers, `__class__` becomes a subclass that adds what PEFT lacks for DoRA:

    LoraModel    an adapter for each sample, combining DoRA adapters
    PeftModel    saving that refuses to lose something (`saving.py`)
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import peft.peft_model
from peft import PeftModel
from peft.tuners.lora import layer as peft_lora
from peft.tuners.lora.model import LoraModel
from torch import nn

from hirank.adapters.peft.combine import combine
from hirank.adapters.peft.guard import forget_steps, watch_steps
from hirank.adapters.peft.mixed import MixedBatches, adapter_per_sample
from hirank.adapters.peft.saving import save_checked

__all__ = ["FastLoraModel", "convert_models", "convert_one", "restore_models"]


class FastLoraModel(LoraModel):
    """PEFT's `LoraModel` around converted layers. Made by `accelerate` only."""

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        names = kwargs.get("adapter_names")
        if names is None or kwargs.get("alora_offsets") is not None:
            with super()._enable_peft_forward_hooks(*args, **kwargs):
                yield
            return
        beams = kwargs.get("num_beams")
        with adapter_per_sample(self, names, beams if isinstance(beams, int) else 1):
            yield

    def add_weighted_adapter(
        self,
        adapters: list[str],
        weights: list[float],
        adapter_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As PEFT's, but right for rsLoRA and DoRA: `combine` says what it means."""
        stock = functools.partial(super().add_weighted_adapter, adapters, weights, adapter_name)
        combine(self, adapters, weights, adapter_name, stock, args, kwargs)


class _Checked:
    """Stands before a class of PEFT's models."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As PEFT's, but whole or not at all: `saving.py` says what is refused."""
        save_checked(self, super().save_pretrained, save_directory, args, kwargs)  # type: ignore[misc]


# One subclass for each class of PEFT's, under the same name.


@functools.cache
def _checked(stock: type) -> type:
    name = f"Checked{stock.__qualname__}"
    made = type(stock.__name__, (_Checked, stock), {"__module__": __name__, "__qualname__": name})
    made.__doc__ = stock.__doc__
    return made


def __getattr__(name: str) -> type:  # so that pickle finds them
    stock = getattr(peft.peft_model, name.removeprefix("Checked"), None)
    if not name.startswith("Checked") or not isinstance(stock, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _checked(stock)


def convert_models(model: nn.Module) -> None:
    """Convert whatever in `model` is a `LoraModel` or a `PeftModel` of PEFT's own."""
    for module in model.modules():
        convert_one(module)


def convert_one(module: Any) -> None:
    """Convert `module` if it is such a model; let optimizers know it if it is a converted layer."""
    kind: Any = type(module)
    if isinstance(module, MixedBatches):
        watch_steps(cast(nn.Module, module))
    elif kind is LoraModel:
        module.__class__ = FastLoraModel
    elif isinstance(module, PeftModel) and kind.__module__ == peft.peft_model.__name__:
        module.__class__ = _checked(kind)


def restore_models(model: nn.Module) -> None:
    """Undo `convert_models`."""
    for module in model.modules():
        kind = type(module)
        if isinstance(module, peft_lora.LoraLayer):
            forget_steps(module)
            module.__dict__.pop("_hirank_slots", None)
        elif kind is FastLoraModel:
            module.__class__ = LoraModel
        elif kind.__module__ == __name__ and issubclass(kind, _Checked):
            module.__class__ = kind.__mro__[2]

"""`adapter_names=[...]`: one adapter for each sample, in inference, with LoRA and DoRA.

PEFT refuses it with DoRA. Here a converted layer computes it (`adapters/mixed.py`), and the names
reach the layers by hooks that act in the calling thread alone and go when the call ends, however it
ends. So threads may ask one model for different adapters at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident, local
from typing import Any, cast

from peft.tuners.lora import layer as peft_lora
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from hirank.adapters.mixed import BASE, Run, mixed_forward
from hirank.adapters.peft.guard import watch_steps
from hirank.adapters.peft.operands import embeds
from hirank.errors import HirankError

__all__ = ["MixedBatches", "adapter_per_sample"]


class _Context(local):
    depth = 0


_context = _Context()


class MixedBatches:
    """What a converted layer needs for batches of several adapters; stands before PEFT's class."""

    _hirank_mixed: frozenset[str] = frozenset()
    """Adapters that run in mixed batches though they are not active."""

    def _hirank_run(self, x: Tensor) -> Run:
        raise NotImplementedError

    def _hirank_obstacle(self, names: list[str]) -> str | None:
        raise NotImplementedError

    def _hirank_turn(self) -> None:
        """The kept norms are to be looked at anew."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, super()).__setstate__(state)
        watch_steps(cast(nn.Module, self))

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """As PEFT's; whatever changed while an adapter was not active is seen at its next call."""
        cast(Any, super()).set_adapter(adapter_names, inference_mode=inference_mode)
        self._hirank_mixed = frozenset()
        self._hirank_turn()

    def _check_forward_args(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        names = kwargs.get("adapter_names")
        if names is not None and self._hirank_reason(names, args, kwargs) is None:
            kwargs["adapter_names"] = [BASE] * len(names)  # PEFT's checks, but not that for DoRA
        cast(Any, super())._check_forward_args(x, *args, **kwargs)

    def _hirank_reason(self, names: Sequence[str], args: Any, kwargs: Any) -> str | None:
        """Why PEFT's own code is to compute a batch; refused where it could not."""
        layer: Any = self
        if args or any(value is not None for key, value in kwargs.items() if key != _NAMES):
            reason: str | None = "its base layer was given more arguments"
        else:
            reason = self._hirank_obstacle([n for n in dict.fromkeys(names) if n in _held(layer)])
        if reason is not None and any(layer.use_dora.get(name, False) for name in names):
            raise HirankError(
                "Cannot pass `adapter_names` when DoRA is enabled on "
                f"{layer._hirank_options.name}, because {reason}: run one adapter at a time."
            )
        return reason

    def _mixed_batch_forward(
        self, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any
    ) -> Tensor:
        layer: Any = self
        if self._hirank_reason(adapter_names, args, kwargs) is not None:
            found: Tensor = cast(Any, super())._mixed_batch_forward(
                x, *args, adapter_names=adapter_names, **kwargs
            )
            return found
        if not _context.depth:
            self._hirank_turn()
        return mixed_forward(adapter_names, list(_held(layer)), x.device, self._hirank_run(x))


_NAMES = "adapter_names"


def _held(layer: Any) -> Any:
    return layer.lora_embedding_A if embeds(layer) else layer.lora_A


class _Give:
    """A forward pre-hook that names the adapters, to calls of the thread that made it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._thread = list(names), get_ident()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if get_ident() != self._thread:
            return None
        return args, kwargs | {_NAMES: self._names}


@contextmanager
def adapter_per_sample(model: Any, names: Sequence[str], beams: int) -> Iterator[None]:
    """While it lasts, this thread's calls of PEFT's tuner `model` have an adapter for each sample.

    Args:
        names: one for each sample, `BASE` for none.
        beams: how many times generation repeats each sample, an encoder's input aside.

    Raises:
        ValueError: in training mode, or a name that no layer has.
    """
    layers = [module for module in model.modules() if isinstance(module, peft_lora.LoraLayer)]
    _check(model, names, layers)
    encoder = _encoder(model.model) if beams > 1 else None
    once = set() if encoder is None else set(map(id, encoder.modules()))
    repeated = [name for name in names for _ in range(beams)]
    _expect(layers, frozenset(names) - {BASE})
    handles = []
    _context.depth += 1
    try:
        for module in model.modules():
            if isinstance(module, (peft_lora.LoraLayer, AuxiliaryTrainingWrapper)):
                give = _Give(names if id(module) in once else repeated)
                found = cast(nn.Module, module)
                handles.append(found.register_forward_pre_hook(give, with_kwargs=True))
        yield
    finally:
        _context.depth -= 1
        for handle in handles:
            handle.remove()


def _check(model: Any, names: Sequence[str], layers: list[Any]) -> None:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise HirankError(
            f"adapter_names got {names!r}: give a list with one name for each sample."
        )
    if model.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
    known = {name for layer in layers for name in (*layer.lora_A, *layer.lora_embedding_A)}
    strangers = sorted(set(names) - known - {BASE})
    if strangers:
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(strangers)}")


def _encoder(model: Any) -> nn.Module | None:
    found: nn.Module | None = model.get_encoder() if hasattr(model, "get_encoder") else None
    return None if found is model else found  # Transformers returns a decoder itself


def _expect(layers: list[Any], names: frozenset[str]) -> None:
    """Let the norms of these adapters be watched, and looked at before the first call."""
    for layer in layers:
        if isinstance(layer, MixedBatches):
            if not names <= layer._hirank_mixed:
                layer._hirank_mixed |= names
            layer._hirank_turn()

"""Models without weights that can be trained for a step: shapes, dtypes and nothing else.

A model is made on the meta device, as PEFT cannot be built among fake tensors, and its parameters
are then replaced by fake ones on the CPU, as fake ones of a GPU need a PyTorch that knows GPUs.

Code that asks for a value gets the answer of an ordinary step: gradients are finite and not zero,
what is compared is equal, nothing is out of the ordinary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["answer", "faking", "give_fakes"]

_READS, _EQUAL = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default


def answer(func: Any, args: tuple[Any, ...]) -> Any:
    """What a fake tensor answers to an operation that reads a value; None: it reads none."""
    if func is _EQUAL:
        return args[0].shape == args[1].shape
    if func is not _READS:
        return None
    dtype = args[0].dtype
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


@contextmanager
def faking() -> Iterator[None]:
    """New tensors are fake ones inside, and all have one address."""
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def give_fakes(model: nn.Module) -> None:
    """Replace parameters and buffers on meta by fake ones, in place; tied ones stay tied."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, whose address is then kept
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in list(held.items()):
                if old is not None:
                    found = made.setdefault(id(old), (_like(old), old))
                    held[name] = found[0]  # type: ignore[assignment]


def _like(old: Tensor) -> Tensor:
    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new

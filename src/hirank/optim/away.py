"""What a forward pass keeps waits in the host's memory until the backward pass asks for it.

With checkpointing that is the input of every block, tokens x width x 2 bytes each: of a 7B with
2048 tokens half a gigabyte, which is there at the worst moment of a step. A copy there and one back
take as long as the bytes take on the bus; the host does not wait for either.

    with kept_on_host():
        loss = model(**batch).loss
    loss.backward()

What is computed again under checkpointing stays where it is, as that happens outside the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["kept_on_host"]

_LEAST = 2**20  # bytes: below, a copy is not worth its launch


class _Away(NamedTuple):
    """A tensor's numbers on the host, and where they belong."""

    copy: Tensor
    device: torch.device


@contextmanager
def kept_on_host() -> Iterator[None]:
    """What autograd saves inside waits in pinned memory: tensors of a GPU of 1 MiB or more, except
    parameters, which are there in any case. The gradients are the same, bit by bit."""
    with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
        yield


def _worth(tensor: Tensor) -> bool:
    return tensor.is_cuda and type(tensor) is Tensor and tensor.nbytes >= _LEAST


def _packed(tensor: Tensor) -> Tensor | _Away:
    if not _worth(tensor):
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return _Away(copy.copy_(tensor, non_blocking=True), tensor.device)


def _unpacked(kept: Tensor | _Away) -> Tensor:
    # The allocator of pinned memory gives a block away only when copies from it are done.
    return kept.copy.to(kept.device, non_blocking=True) if isinstance(kept, _Away) else kept

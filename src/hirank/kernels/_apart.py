"""Memory that outlives a call, kept out of the pools of CUDA graphs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["apart", "lasting_bytes"]

T = TypeVar("T")


def apart(device: torch.device, work: Callable[[], T]) -> T:
    """`work()` without gradients, on a GPU in a thread of its own, on the stream of this one.

    What is to outlive a call must not be allocated where PyTorch's compiler keeps the memory of its
    CUDA graphs: all that its thread allocates meanwhile is taken for theirs.
    """
    if device.type != "cuda":
        return work()
    stream = torch.cuda.current_stream(device)

    def there() -> T:
        with torch.no_grad(), torch.cuda.stream(stream):
            return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(there).result()


def lasting_bytes(size: int, device: int) -> Tensor:
    """Uninitialised bytes that stay on the GPU of that number, [size] int8."""
    where = torch.device("cuda", device)
    return apart(where, lambda: torch.empty(size, dtype=torch.int8, device=where))

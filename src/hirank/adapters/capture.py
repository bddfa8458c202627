"""What to know beside CUDA graphs: whether one is being captured, and whose memory is whose."""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

__all__ = ["apart", "capture_id", "capturing", "raw_stream"]

T = TypeVar("T")


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The current stream of a GPU as a number; 0 is the default stream, which nobody captures."""


def capturing() -> bool:
    """Whether launches on the current stream are recorded instead of run."""
    return bool(torch.cuda.is_current_stream_capturing())


def capture_id(stream: int) -> int | None:
    """A number that no other capture of this process has; None where the driver cannot tell."""
    driver = _driver()
    if driver is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = driver.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return None if failed or not status.value else number.value


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


@functools.cache
def _driver() -> Any:
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuStreamGetCaptureInfo_v2") else None

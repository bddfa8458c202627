"""What to know beside CUDA graphs: whether one is being captured, and which."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["capture_id", "capturing", "raw_stream"]

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


@functools.cache
def _driver() -> Any:
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuStreamGetCaptureInfo_v2") else None

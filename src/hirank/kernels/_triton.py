"""Triton where there is one; where not, names that let a kernel file be imported all the same."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._apart import lasting_bytes

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    jit = triton.jit
except ImportError:
    triton = tl = None
    HAS_TRITON = False

    def jit(function: Any = None, **options: Any) -> Any:
        """Leave the kernel as it is: without Triton nothing launches it."""
        return jit if function is None else function


__all__ = [
    "HAS_TRITON",
    "Launcher",
    "direct",
    "dot_type",
    "in_fp32",
    "interpreting",
    "jit",
    "tl",
    "tl_type",
    "triton",
    "use_workspace",
]

INTERPRETING = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def interpreting() -> bool:
    """Whether Triton runs kernels in Python on the CPU, for tests of their logic."""
    return INTERPRETING


def tl_type(dtype: torch.dtype) -> Any:
    """Triton's name of a float dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def dot_type(dtype: torch.dtype) -> Any:
    """What the operands of a `tl.dot` are cast to. The interpreter cannot multiply bf16."""
    return tl.float32 if INTERPRETING and dtype == torch.bfloat16 else tl_type(dtype)


def in_fp32(dtype: torch.dtype) -> bool:
    """As `dot_type`, told as a constant that is recognised at once: whether operands go to fp32."""
    return INTERPRETING and dtype == torch.bfloat16


def direct(tensor: Tensor) -> bool:
    """Whether a kernel may be launched on a tensor at once, past PyTorch's dispatcher.

    That saves some 20 us a call. Not for fake tensors, subclasses, dispatch modes or the compiler.
    """
    return (
        HAS_TRITON
        and tensor.is_cuda
        and (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and not torch.compiler.is_dynamo_compiling()  # first: it cannot trace the next
        and not torch._C._len_torch_dispatch_stack()
    )


_WORKSPACES: dict[tuple[int, int | None], list[Tensor]] = {}


def _workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    """Kept for each stream: its launches follow each other, and each writes what it reads."""
    device = torch.cuda.current_device()
    kept = _WORKSPACES.setdefault((device, stream), [])
    if kept and kept[-1].numel() >= size:
        return kept[-1]
    if torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
        return torch.empty(size, dtype=torch.int8, device="cuda")
    kept.append(lasting_bytes(max(_LEAST, 2 * size), device))  # launches may still read the last
    return kept[-1]


_LEAST = 1 << 16  # bytes


def use_workspace() -> None:
    """Let launches of this thread keep their tensor descriptors in PyTorch's memory.

    Triton knows one allocator a thread, and a backward pass has a thread of its own.
    """
    if not INTERPRETING:
        triton.set_allocator(_workspace)


class Launcher:
    """Launches of one kernel at little host time.

    Triton works out anew at every launch how the arguments specialise a kernel, which takes tens
    of microseconds. Here a launch that looks like an earlier one (device, dtypes, alignment of
    each pointer, every number and constant) goes straight to what was compiled for that one. The
    kernel's parameters must come in the order tensors, numbers, constants.
    """

    _KEPT = 4096  # looks that are remembered; each is a few hundred bytes

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch on the tensors' device; `options` are num_warps and num_stages."""
        first = tensors[0]
        if not first.is_cuda:
            self._kernel[grid](*tensors, *numbers, *constants, **options)
            return
        device = first.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, tensors, numbers, constants, **options)
            return
        pointers = tuple(map(_address_of, tensors))
        skew = tuple(p & 15 for p in pointers) if reduce(or_, pointers) & 15 else None
        look = device, numbers, constants, skew, *options.values(), *map(_dtype_of, tensors)
        compiled = self._compiled.get(look)
        if compiled is None:
            self._keep(look, self._kernel[grid](*tensors, *numbers, *constants, **options))
        elif _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            compiled[grid](*pointers, *numbers, *constants)  # a profiler wants to be told
        else:
            compiled.run(  # what compiled[grid] comes to when nobody listens
                *grid, torch._C._cuda_getCurrentRawStream(device), compiled.function,
                compiled.packed_metadata, None, None, None, *pointers, *numbers, *constants,
            )  # fmt: skip

    def _keep(self, look: Any, compiled: Any) -> None:
        if len(self._compiled) >= self._KEPT:
            self._compiled.clear()
        self._compiled[look] = compiled


_HOOKS: Any = triton.knobs.runtime if HAS_TRITON else None
# by C alone: these two are asked of every tensor of every launch
_address_of = torch._C.TensorBase.data_ptr
_dtype_of = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]

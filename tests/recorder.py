"""Watch what PyTorch really does: which ops ran on which shapes, and how many bytes were alive."""

import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_")
VIEWS = ("aten::view", "aten::t", "aten::transpose", "aten::slice", "aten::detach", "aten::expand",
         "aten::alias", "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::permute",
         "aten::_unsafe_view", "aten::as_strided", "aten::reshape")  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One call: its name, and (dtype, shape) of each tensor in and out."""

    name: str
    inputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    outputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def _signature(tree: Any) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    return tuple((t.dtype, tuple(t.shape)) for t in tree_leaves(tree) if isinstance(t, Tensor))


class OpLog(TorchDispatchMode):
    """Records every op run inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.ops.append(Op(name, _signature((args, kwargs)), _signature(out)))
        return out

    def matmuls(self) -> list[Op]:
        """Matrix products."""
        return [op for op in self.ops if op.name in MATMULS]

    def products(self, *dims: int) -> list[Op]:
        """Matrix products over exactly these three sizes, in any order and transposition."""
        return [op for op in self.matmuls() if sorted(_product_dims(op)) == sorted(dims)]

    def made(self, dtype: torch.dtype | None, shape: tuple[int, ...]) -> list[Op]:
        """Ops other than views that returned such a tensor, or its transpose."""
        shapes = {shape, shape[::-1]}
        return [
            op
            for op in self.ops
            if op.name not in VIEWS
            and any(s in shapes and dtype in (None, d) for d, s in op.outputs)
        ]

    def copies(self, shape: tuple[int, ...]) -> list[Op]:
        """Casts or copies of tensors of this shape."""
        names = ("aten::_to_copy", "aten::copy_", "aten::clone")
        return [op for op in self.ops if op.name in names and any(s == shape for _, s in op.inputs)]


def _product_dims(op: Op) -> tuple[int, ...]:
    (_, left), (_, right) = [i for i in op.inputs if len(i[1]) >= 2][-2:]
    return left[-2], left[-1], right[-1]


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of storages born inside the `with` block; `peak` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                key = tensor.untyped_storage()._cdata
                if key not in self._seen:
                    self._before.add(key)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor)
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in self._before:
            return
        size = storage.nbytes()
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


class SavedBytes:
    """Bytes of distinct storages saved for backward that no parameter owns."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._owned = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
        self._found: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._owned:
            self._found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that saved itself would never be freed

    @property
    def total(self) -> int:
        return sum(self._found.values())

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

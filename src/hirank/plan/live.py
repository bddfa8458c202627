"""Which bytes are alive after every operation, and what they are: for real tensors and fake ones.

A storage is counted from the operation that made it until nothing refers to it. What it is (a
gradient, a kept activation, ...) may be said at any later time, as the log is only read at the end.

Within an operation nothing is seen: the workspace of a kernel is not counted. Where several
gradients of one tensor meet, autograd adds them in place; while anybody watches it makes a new
tensor, which is not counted beside the one that it replaces.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hirank.plan.faked import answer
from hirank.plan.sizes import in_blocks

__all__ = ["Live", "Moment"]

_ADD = torch.ops.aten.add.Tensor
_JOINED = "gradients joined"
_ENGINE = ("graph.py", "_engine_run_backward")

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class _Block:
    """One storage."""

    size: int
    born: str  # the phase
    kind: str | None = None
    usual: str | None = None  # what it is if nobody says so later


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive after one operation."""

    op: str
    phase: str
    kinds: Counter[str]  # bytes by class

    @property
    def total(self) -> int:
        """Bytes of all classes."""
        return sum(self.kinds.values())


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is active; `adopt` those that existed before.

    Attributes:
        phase: the name of what happens now; whoever drives the step sets it.
        usual: the class of what is made now, unless something else is said of it later.
        total: bytes alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.usual, self.total = "load", "", 0
        self._blocks: list[_Block] = []
        self._known: dict[int, tuple[Any, int]] = {}  # by identity: the weak reference, its number
        self._log: list[tuple[str, str, tuple[int, ...]]] = []  # op, phase, blocks born
        self._freed: list[tuple[int, int]] = []  # after how many entries of the log, which block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count what it made."""
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # its own operations, on what it wraps, come by next
        if FakeTensor in types:
            given = answer(func, args)
            if given is not None:
                return given
        out = func(*args, **(kwargs or {}))
        born = tuple(self._new(tensor) for tensor in _tensors(out))
        if any(number >= 0 for number in born):
            name = _JOINED if func is _ADD and _asked_by_autograd() else str(func)
            self._log.append((name, self.phase, tuple(n for n in born if n >= 0)))
        return out

    def adopt(self, tensors: Iterable[Tensor], kind: str, size: int | None = None) -> None:
        """Count tensors that exist already, or say what those are that are counted.

        `size`: what each is to count for, if it stands for something else.
        """
        born = []
        for part in (part for tensor in tensors for part in _parts(tensor)):
            number = self._number(part)
            if number is None:
                number = self._new(part, size)
                born.append(number)
            self._blocks[number].kind = kind
        if born:
            self._log.append(("adopt", self.phase, tuple(born)))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What is adopted inside is there from one moment on."""
        before = len(self._log)
        yield
        born = tuple(number for _, _, numbers in self._log[before:] for number in numbers)
        self._log[before:] = [("adopt", self.phase, born)]

    def claim(self, kind: str, *, born: str | None = None) -> None:
        """Say what everything is that is alive, has no class yet, and was born in phase `born`."""
        for _, number in self._known.values():
            block = self._blocks[number]
            if block.kind is None and born in (None, block.born):
                block.kind = kind

    @contextmanager
    def during(self, phase: str, usual: str) -> Iterator[None]:
        """Name what happens inside."""
        before = self.phase, self.usual
        self.phase, self.usual = phase, usual
        try:
            yield
        finally:
            self.phase, self.usual = before

    def moments(self) -> Iterator[Moment]:
        """What was alive after every operation that made something, in order."""
        now: Counter[str] = Counter()
        freed = iter(self._freed)
        following = next(freed, None)
        for i, (op, phase, born) in enumerate(self._log):
            for number in born:
                now[self._kind(number)] += self._blocks[number].size
            until = i + 1 if op == _JOINED else i
            while following is not None and following[0] <= until:
                now[self._kind(following[1])] -= self._blocks[following[1]].size
                following = next(freed, None)
            yield Moment(op, phase, +now)

    def _kind(self, number: int) -> str:
        block = self._blocks[number]
        return block.kind or block.usual or "method temporaries"

    def _number(self, tensor: Tensor) -> int | None:
        known = self._known.get(id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def _new(self, tensor: Tensor, size: int | None = None) -> int:
        """Count a storage; -1 if it is counted already."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return -1
        number = len(self._blocks)
        size = in_blocks(storage.nbytes()) if size is None else size
        self._blocks.append(_Block(size, self.phase, usual=self.usual))
        self._known[key] = weakref.ref(storage, lambda _: self._free(key, number)), number
        self.total += size
        return number

    def _free(self, key: int, number: int) -> None:
        del self._known[key]
        self.total -= self._blocks[number].size
        self._freed.append((len(self._log), number))


def _asked_by_autograd() -> bool:
    """Whether the engine itself runs this operation, not the backward pass of a function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _names(frame) != _ENGINE and _is_torch(frame):
        frame = frame.f_back
    return _names(frame) == _ENGINE


def _names(frame: FrameType) -> tuple[str, str]:
    return Path(frame.f_code.co_filename).name, frame.f_code.co_name


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _is_wrapper(kind: type) -> bool:
    return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__")


def _tensors(out: Any) -> Iterator[Tensor]:
    for leaf in [out] if isinstance(out, Tensor) else tree_leaves(out):
        if isinstance(leaf, Tensor):
            yield from _parts(leaf)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the bytes of one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))

"""The table of norms with launches that a CUDA graph may record and play again.

A recorded launch takes the same buffers every time. `NormTable` lets its three rows of prints
change places at each refresh, on the host. Here they stop where they are when a refresh is recorded
for the first time: from then on one is always what the norms belong to, the next what is found now.
That costs two small launches a refresh, and leaves no difference between a refresh that Python
launches and one that a graph plays: each sees what the other left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hirank.kernels.norm_table import NormEntry, NormTable

__all__ = ["ReplayableNormTable"]

_BOTH = (False, True)


class ReplayableNormTable(NormTable):
    """As `NormTable`; all its state lies on the device, so a refresh may be recorded.

    Whoever plays a graph keeps the table; the table keeps the norms.
    """

    def __init__(self, entries: Sequence[NormEntry], dot_dtype: torch.dtype) -> None:
        super().__init__(entries, dot_dtype)
        self.norms = [entry.norm for entry in entries]
        self._is_cuda = entries[0].weight.is_cuda
        # made now, as recording must not copy from the host, and kept, as graphs go on using them
        self._kept = {force: super(ReplayableNormTable, self)._forced(force) for force in _BOTH}
        self._recorded = False
        """Whether the rows of prints stay where they are from now on."""

    def accept(self) -> None:
        with self._on_device():
            self._keep(*self._print())

    def refresh(self, *, force: bool | Sequence[int] = False) -> None:
        with self._on_device():
            if not self._recorded and self._is_cuda:
                self._recorded = torch.cuda.is_current_stream_capturing()
            old, new = self._print()
            self._compute(old, new, self._forced(force))
            self._keep(old, new)

    def _print(self) -> tuple[Tensor, Tensor]:
        if self._recorded:
            self._prints[(self._turn + 1) % 3].zero_()
        return super()._print()

    def _keep(self, old: Tensor, new: Tensor) -> None:
        if self._recorded:
            self._turn -= 1
            old.copy_(new)

    def _forced(self, force: bool | Sequence[int]) -> Tensor:
        return self._kept[force] if isinstance(force, bool) else super()._forced(force)

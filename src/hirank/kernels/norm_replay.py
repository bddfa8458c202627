"""The table of norms with launches that a CUDA graph may record and play again.

A recorded launch takes the same buffers every time. `NormTable` lets its three rows of prints
change places at each refresh, on the host; here the first is always what the norms belong to, the
second what is found now. That costs two small launches a refresh, and leaves no difference between
a refresh that Python launches and one that a graph plays: each sees what the other left.
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
        # made now, as recording must not copy from the host, and kept, as graphs go on using them
        self._kept = {force: super(ReplayableNormTable, self)._forced(force) for force in _BOTH}

    def accept(self) -> None:
        super().accept()
        self._prints[0].copy_(self._prints[1])

    def refresh(self, *, force: bool | Sequence[int] = False) -> None:
        super().refresh(force=force)
        self._prints[0].copy_(self._prints[1])

    def _print(self) -> tuple[Tensor, Tensor]:
        self._turn = 0
        self._prints[1].zero_()
        return super()._print()

    def _forced(self, force: bool | Sequence[int]) -> Tensor:
        return self._kept[force] if isinstance(force, bool) else super()._forced(force)

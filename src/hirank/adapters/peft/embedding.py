"""The converted embedding: PEFT's `lora.Embedding` with hirank's forward, merge and unmerge."""

from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora
from torch import Tensor

from hirank.adapters.embedding import Table, embedding_forward
from hirank.adapters.mixed import Run
from hirank.adapters.peft.check import fault_of_call
from hirank.adapters.peft.converted import Converted, one_of, way_of

__all__ = ["FastEmbedding"]


class FastEmbedding(Converted, peft_lora.Embedding):
    """PEFT's `lora.Embedding`, computed by hirank. Made by `accelerate` only."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        way = way_of(self)
        if way is None:
            return super().forward(x)
        base, adapters, backend = way
        try:
            return embedding_forward(x, _table(self, base), adapters, backend)
        except (ValueError, RuntimeError, IndexError) as error:
            fault = None if torch.compiler.is_compiling() else fault_of_call(self, x)
            if fault is None:
                raise
            raise fault from error

    def _hirank_run(self, x: Tensor) -> Run:
        table, backend = _table(self, self.base_layer), self._hirank_options.backend

        def run(rows: Tensor | None, name: str | None) -> Tensor:
            adapters = one_of(self, name)
            return embedding_forward(x if rows is None else x[rows], table, adapters, backend)

        return run


def _table(layer: Any, base: Any) -> Table:
    stretch = layer._get_embed_scale() if hasattr(base, "embed_scale") else None
    return Table(base, base.weight, base.padding_idx, base.scale_grad_by_freq, stretch)

"""The converted linear: PEFT's `lora.Linear` with hirank's forward, merge and unmerge."""

from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora
from torch import Tensor

from hirank.adapters.layers import Adapter, composed_forward, owned_forward
from hirank.adapters.mixed import Run
from hirank.adapters.peft.check import fault_of_call
from hirank.adapters.peft.converted import Converted, adapters_of, one_of, traced_adapter
from hirank.adapters.peft.operands import as_matrix, present
from hirank.adapters.peft.route import Known, route
from hirank.adapters.peft.traced_route import traced_tier
from hirank.adapters.traced import traced_linear, with_live_scale
from hirank.adapters.traced_handles import live_scale, reads_scales
from hirank.kernels.dora_linear import compute_dtype

__all__ = ["FastLinear"]


class FastLinear(Converted, peft_lora.Linear):
    """PEFT's `lora.Linear` over `nn.Linear` or GPT-2's `Conv1D`, computed by hirank.

    Made by `accelerate` only.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or "_is_replica" in self.__dict__:
            # adapter_names, aLoRA offsets, arguments of a base layer; or nn.DataParallel's copy
            return super().forward(x, *args, **kwargs)
        if torch.compiler.is_compiling():
            found = _traced_forward(self, x)
            return super().forward(x) if found is None else found
        known = self._hirank_known
        try:
            if known is None or not known.holds(self):
                known = self._hirank_known = Known(self, adapters_of)
            weight, bias, adapters = known.weight, known.bias, known.adapters
            if known.turned:
                weight = weight.T
            if known.tier == "owned":
                return owned_forward(x, weight, bias, adapters[0], known.backend)
            if known.tier == "peft":
                return super().forward(x)
            return composed_forward(x, known.base, weight, bias, adapters, known.backend)
        except (ValueError, RuntimeError, IndexError) as error:
            fault = fault_of_call(self, x)
            if fault is None:
                raise
            raise fault from error

    def _hirank_run(self, x: Tensor) -> Run:
        base: Any = self.base_layer
        backend = self._hirank_options.backend
        weight, traced = as_matrix(self, base.weight), torch.compiler.is_compiling()
        frozen: list[Tensor] = []  # of the whole batch, once anybody needs it

        def run(rows: Tensor | None, name: str | None) -> Tensor:
            adapters = one_of(self, name)
            if rows is None and adapters and not traced:
                return owned_forward(x, weight, base.bias, adapters[0], backend)
            if not frozen:
                frozen.append(base(x))
            part = frozen[0] if rows is None else frozen[0][rows]
            if not adapters:
                return part
            own = x if rows is None else x[rows]
            flat = part.reshape(-1, part.shape[-1])
            return composed_forward(own, lambda _: flat, weight, base.bias, adapters, backend)

        return run


def _traced_forward(layer: Any, x: Tensor) -> Tensor | None:
    """As `FastLinear.forward`, of what a compiler can trace and guard; None where PEFT is to run.

    What it looks at becomes a guard, so nothing here may differ from step to step or, among layers
    that are alike, from layer to layer.
    """
    reads, names = reads_scales(layer, x.is_cuda), present(layer)
    tier = traced_tier(layer) if reads else route(layer).tier
    if tier == "peft":
        return None
    base, backend = layer.base_layer, layer._hirank_options.backend
    weight = as_matrix(layer, base.weight)
    if tier == "composed":
        half = compute_dtype(x, weight) == torch.float16  # where s B might overflow
        adapters = [_traced_adapter(layer, name, reads and not half) for name in names]
        return composed_forward(x, base, weight, base.bias, adapters, backend)
    A, B, magnitude, scale, *_ = traced_adapter(layer, names[0], not reads)
    now = live_scale(layer, names[0]) if reads else scale
    return traced_linear(x, weight, A, B, magnitude, base.bias, now, backend)


def _traced_adapter(layer: Any, name: str, reads: bool) -> Adapter:
    adapter = traced_adapter(layer, name, not reads)
    return with_live_scale(adapter, live_scale(layer, name)) if reads else adapter

"""The converted convolutions: PEFT's `lora.Conv1d`, `Conv2d` and `Conv3d`, computed by hirank.

Three things differ from PEFT on purpose, each so that a layer is the convolution its merged weight
would make: the adapter's first factor moves over the input as the base does (PEFT forgets dilation
and the mode of padding), the norm of a grouped convolution is that of its effective kernel, and
dropout works whatever the base's dtype.
"""

from typing import Any, cast

import torch
from peft.tuners.lora import layer as peft_lora
from torch import Tensor

from hirank.adapters.conv import Geometry, conv_forward
from hirank.adapters.mixed import Run
from hirank.adapters.peft.check import fault_of_call
from hirank.adapters.peft.converted import Converted, one_of, way_of

__all__ = ["FastConv1d", "FastConv2d", "FastConv3d"]


class _FastConv(Converted):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        way = None if args or kwargs else way_of(layer)
        if way is None:
            found: Tensor = cast(Any, super()).forward(x, *args, **kwargs)
            return found
        base, adapters, backend = way
        try:
            return conv_forward(x, base.weight, base.bias, _geometry(base), adapters, backend)
        except (ValueError, RuntimeError, IndexError) as error:
            fault = None if torch.compiler.is_compiling() else fault_of_call(layer, x)
            if fault is None:
                raise
            raise fault from error

    def _hirank_run(self, x: Tensor) -> Run:
        layer: Any = self
        base, backend = layer.base_layer, self._hirank_options.backend

        def run(rows: Tensor | None, name: str | None) -> Tensor:
            adapters = one_of(layer, name)
            own, geometry = x if rows is None else x[rows], _geometry(base)
            return conv_forward(own, base.weight, base.bias, geometry, adapters, backend)

        return run


def _geometry(base: Any) -> Geometry:
    return Geometry(
        base.stride,
        base.padding,
        base.dilation,
        base.groups,
        base.padding_mode,
        base._reversed_padding_repeated_twice,
    )


class FastConv1d(_FastConv, peft_lora.Conv1d):
    """PEFT's `lora.Conv1d` over `nn.Conv1d`, computed by hirank. Made by `accelerate` only."""


class FastConv2d(_FastConv, peft_lora.Conv2d):
    """PEFT's `lora.Conv2d` over `nn.Conv2d`, computed by hirank. Made by `accelerate` only."""


class FastConv3d(_FastConv, peft_lora.Conv3d):
    """PEFT's `lora.Conv3d` over `nn.Conv3d`, computed by hirank. Made by `accelerate` only."""

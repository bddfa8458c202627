"""The layers of the support table, tiny ones."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hirank

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Holder(nn.Module):
    def __init__(self, lin: nn.Module, **flags: bool) -> None:
        super().__init__()
        self.lin = lin
        vars(self).update(flags)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Packed(nn.Module):
    """A quantised linear that PEFT does not know: one scale, whole numbers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = weight.shape[1], weight.shape[0], None
        self.register_buffer("scale", weight.abs().max() / 127)
        numbers = (weight / self.scale).round().to(torch.int8)
        self.numbers = nn.Parameter(numbers, requires_grad=False)

    def floats(self) -> Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.floats().T.to(x.dtype)


K, N = 64, 64


def _nf4(dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(K, N, bias=False, compute_dtype=dtype, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(
        torch.randn(N, K, dtype=dtype), requires_grad=False, module=made, quant_type="nf4"
    )
    return Holder(made.to("cpu"), is_loaded_in_4bit=True)


def _int8(dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    made = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(torch.randn(N, K, dtype=dtype), requires_grad=False)
    return Holder(made.to("cpu"), is_loaded_in_8bit=True)


def _hqq(dtype: torch.dtype) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    how, plain = BaseQuantizeConfig(nbits=4, group_size=64), nn.Linear(K, N, bias=False)
    return Holder(HQQLinear(plain.to(dtype), how, compute_dtype=dtype, device="cpu"))


def _torchao(dtype: torch.dtype) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = Holder(nn.Linear(K, N, bias=False, dtype=dtype))
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _registered(dtype: torch.dtype) -> nn.Module:
    hirank.register_quantised_linear(Packed, Packed.floats)
    return Holder(Packed(torch.randn(N, K, dtype=dtype)))


class Kind(NamedTuple):
    make: Callable[[torch.dtype], nn.Module]
    input: Callable[[], Tensor]
    library: str = "torch"  # what it needs
    dtypes: tuple[torch.dtype, ...] = DTYPES


def _plain(layer: Callable[[], nn.Module], *shape: int) -> Kind:
    return Kind(lambda dtype: Holder(layer()).to(dtype), lambda: torch.randn(shape))


def _quantised(make: Callable[[torch.dtype], nn.Module], library: str = "torch") -> Kind:
    return Kind(make, lambda: torch.randn(4, K), library, DTYPES[:3])


KINDS = {
    "nn.Linear": _plain(lambda: nn.Linear(6, 8), 4, 6),
    "Conv1D (GPT-2)": _plain(lambda: Conv1D(8, 6), 4, 6),
    "nn.Embedding": Kind(
        lambda dtype: Holder(nn.Embedding(9, 8)).to(dtype), lambda: torch.randint(0, 9, (4, 3))
    ),
    "nn.Conv1d": _plain(lambda: nn.Conv1d(4, 6, 3), 4, 4, 7),
    "nn.Conv2d": _plain(lambda: nn.Conv2d(4, 6, 3), 4, 4, 7, 7),
    "nn.Conv3d": _plain(lambda: nn.Conv3d(4, 6, 2), 4, 4, 5, 5, 5),
    "grouped Conv2d": _plain(lambda: nn.Conv2d(4, 6, 3, groups=2), 4, 4, 7, 7),
    "bnb 4-bit": _quantised(_nf4, "bitsandbytes"),
    "bnb 8-bit": _quantised(_int8, "bitsandbytes"),
    "HQQ": _quantised(_hqq, "hqq"),
    "torchao int8": _quantised(_torchao, "torchao"),
    "registered": _quantised(_registered),
}


def available(kind: str) -> bool:
    return importlib.util.find_spec(KINDS[kind].library) is not None

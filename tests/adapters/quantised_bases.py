"""Small models over one quantised linear of each kind."""

import copy
import importlib
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from adapters.setups import layer_of, perturb

K, N = 128, 64
WARN = pytest.mark.filterwarnings(
    "ignore:.*(get_apply_tensor_subclass|generations due to rounding|will be cast from).*"
)


class Quantised(nn.Module):
    """One quantised linear named `lin`."""

    def __init__(self, lin: nn.Module, **flags: bool) -> None:
        super().__init__()
        self.lin = lin
        vars(self).update(flags)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


class Int4Linear(nn.Module):
    """Two integers a byte, a scale a row; nothing that PEFT knows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        scales = weight.abs().amax(1, keepdim=True) / 7
        integers = (weight / scales).round().clamp(-7, 7).to(torch.int16) + 8
        packed = (integers[:, ::2] * 16 + integers[:, 1::2]).to(torch.uint8)
        self.qweight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.dequantised = 0

    def dequantize(self) -> Tensor:
        self.dequantised += 1
        pairs = torch.stack([self.qweight // 16, self.qweight % 16], dim=2)
        return (pairs.flatten(1).to(self.scales.dtype) - 8) * self.scales

    def forward(self, x: Tensor) -> Tensor:
        high = x[..., ::2] @ ((self.qweight // 16).to(x.dtype) - 8).T
        low = x[..., 1::2] @ ((self.qweight % 16).to(x.dtype) - 8).T
        y = (high + low) * self.scales.T.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def _linear(dtype: torch.dtype, bias: bool) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(K, N, bias=bias).to(dtype)


def _four_bits(dtype: torch.dtype, bias: bool, **how: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    plain = _linear(dtype, bias)
    settings = {"compute_dtype": dtype, "quant_type": "nf4"} | how
    made = bnb.nn.Linear4bit(K, N, bias=bias, **settings)
    stored = {k: v for k, v in settings.items() if k != "compute_dtype"}
    made.weight = bnb.nn.Params4bit(plain.weight.data, requires_grad=False, module=made, **stored)
    if bias:
        made.bias = nn.Parameter(plain.bias.data)
    return Quantised(made.to("cpu"), is_loaded_in_4bit=True)


def _eight_bits(dtype: torch.dtype, bias: bool, **how: Any) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    plain = _linear(dtype, bias)
    made = bnb.nn.Linear8bitLt(K, N, bias=bias, has_fp16_weights=False, **how)
    made.weight = bnb.nn.Int8Params(plain.weight.data, requires_grad=False)
    if bias:
        made.bias = nn.Parameter(plain.bias.data)
    return Quantised(made.to("cpu"), is_loaded_in_8bit=True)


def _hqq(dtype: torch.dtype, bias: bool) -> nn.Module:
    hqq = pytest.importorskip("hqq.core.quantize")
    how = hqq.BaseQuantizeConfig(nbits=4, group_size=64)
    return Quantised(hqq.HQQLinear(_linear(dtype, bias), how, compute_dtype=dtype, device="cpu"))


def _torchao(dtype: torch.dtype, bias: bool) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    model = Quantised(_linear(dtype, bias))
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


MAKERS = {
    "nf4": _four_bits,
    "fp4": lambda dtype, bias: _four_bits(dtype, bias, quant_type="fp4"),
    "nf4-plain": lambda dtype, bias: _four_bits(dtype, bias, compress_statistics=False),
    "int8": _eight_bits,
    "int8-outliers": lambda dtype, bias: _eight_bits(dtype, bias, threshold=6.0),
    "hqq": _hqq,
    "torchao": _torchao,
}


def base(kind: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Module:
    """A model over one quantised linear 128 to 64; skips where its library is not installed."""
    return MAKERS[kind](dtype, bias).requires_grad_(False)


def int4(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Module:
    plain = _linear(dtype, bias)
    return Quantised(Int4Linear(plain.weight.data, plain.bias.data if bias else None))


def adapted(model: nn.Module, **config: Any) -> Any:
    """PEFT's own model over it: DoRA, r = 4, alpha = 8 unless told otherwise; not perturbed."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["lin"], "use_dora": True}
    return get_peft_model(model, LoraConfig(**(settings | config)))


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Drawn from a seed, and wanting a gradient."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype).requires_grad_()


def floats(model: nn.Module) -> Tensor:
    """The dequantised weight by its own library, in fp64."""
    layer = layer_of(model).base_layer
    if hasattr(layer, "dequantize"):  # HQQ, and ours
        return layer.dequantize().double()
    if hasattr(layer.weight, "dequantize") and type(layer) is nn.Linear:
        return layer.weight.dequantize().double()
    functional = importlib.import_module("bitsandbytes.functional")
    if hasattr(layer, "compute_dtype"):
        state = copy.copy(layer.weight.quant_state)
        state.dtype = layer.compute_dtype  # as its forward reads them
        return functional.dequantize_4bit(layer.weight.data, state).double()
    scale = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return layer.weight.data.double() * scale.double()[:, None] / 127


def truth(
    model: nn.Module, weight: Tensor, x: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The plain formula, differentiable in the model's own adapter parameters and in x."""
    layer = layer_of(model)
    bias = layer.base_layer.bias
    bias = 0 if bias is None else bias.to(dtype)
    v = x.to(dtype) @ weight.to(dtype).T
    for name in layer.active_adapters:
        A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
        s = layer.scaling[name]
        v = v + s * (x.to(dtype) @ A.to(dtype).T) @ B.to(dtype).T
        if name in layer.lora_variant:
            norm = (weight + s * B.double() @ A.double()).norm(dim=1).detach()
            v = (layer.lora_magnitude_vector[name].weight.double() / norm).to(dtype) * v
    return v + bias


def gradients(model: nn.Module, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """Of a seeded projection of y: for x and for all that is trained."""
    draw = torch.Generator().manual_seed(5)
    dy = torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad} | {"x": x}
    return dict(zip(named, torch.autograd.grad(y, list(named.values()), dy), strict=True))


__all__ = ["K", "MAKERS", "N", "WARN", "Int4Linear", "adapted", "base", "floats", "gradients"]
__all__ += ["inputs", "int4", "layer_of", "perturb", "truth"]

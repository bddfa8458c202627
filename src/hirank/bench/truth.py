"""What an adapted model computes by definition, in fp32: the truth that all arms are held against.

    y = x Wᵀ + (g - 1) d(x) Wᵀ + g s d(x) Aᵀ Bᵀ + b      g = m / ‖W + s B A‖_row, a constant
    d is the adapter's dropout; LoRA is g = 1.

Neither PEFT's nor hirank's layers take part. Weights of 16 bits are widened where they are used and
let go of afterwards, and blocks are checkpointed: a model in fp32 beside itself would not fit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hirank.bench import arms as arms_
from hirank.bench.compat import checkpoint_blocks
from hirank.bench.kinds import other_definition

__all__ = ["exact", "same_masks", "truth_of"]

_PREFIX = "base_model.model."  # PEFT's, before the name of a module
_NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def exact() -> Iterator[None]:
    """Products and attention in full fp32: no TF32, no kernel that rounds in between.

    These are settings of the process, so that they hold in the backward pass, too.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def truth_of(
    base: nn.Module, weights: Mapping[str, nn.Parameter], *, scale: float, dropout: float = 0.0
) -> nn.Module:
    """The frozen `base` with an adapter, in fp32 by the formula above; to be run inside `exact`.

    `weights` are the adapter's by PEFT's names (fp32). Gradients land in them.

    Raises:
        HirankError: an adapted layer is of a kind that has no definition here.
    """
    model = arms_.copy_sharing_weights(base)
    for name in dict.fromkeys(n.partition(".lora_")[0] for n in weights):
        place = name.removeprefix(_PREFIX)
        layer = model.get_submodule(place)
        parts = _parts(name, weights)
        masked = _SameMask(f"{name}.lora_dropout.default", dropout)
        if isinstance(layer, nn.Linear):
            model.set_submodule(place, _Adapted(layer, *parts, scale, masked))
        else:
            model.set_submodule(place, other_definition(place, layer, parts, scale, masked))
    for module in list(model.modules()):
        _widen(module)
    if hasattr(model, "config"):
        checkpoint_blocks(model)
    return _NoAutocast(model).train()


def _parts(name: str, weights: Mapping[str, nn.Parameter]) -> tuple[Any, Any, Any]:
    """A, B and magnitude of one layer, as PEFT names them."""
    magnitude = weights.get(f"{name}.{arms_.MAGNITUDE}.default.weight")
    embeds = f"{name}.lora_embedding_A.default" in weights
    names = ("lora_embedding_{}.default" if embeds else "lora_{}.default.weight",) * 2
    A, B = (weights[f"{name}." + n.format(factor)] for n, factor in zip(names, "AB", strict=True))
    return A, B, magnitude


class _Adapted(nn.Module):
    """One linear by definition."""

    def __init__(
        self,
        linear: nn.Linear,
        lora_A: nn.Parameter,
        lora_B: nn.Parameter,
        magnitude: nn.Parameter | None,
        scale: float,
        dropout: nn.Module,
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A, self.lora_B, self.magnitude = lora_A, lora_B, magnitude
        self.scale, self.dropout = scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N]"""
        out = F.linear(x, self.weight)
        dropped = self.dropout(x)
        lora = self.scale * F.linear(F.linear(dropped, self.lora_A), self.lora_B)
        if self.magnitude is None:
            out = out + lora
        else:
            gain = self.magnitude / self._norm()
            out = out + (gain - 1) * F.linear(dropped, self.weight) + gain * lora
        return out if self.bias is None else out + self.bias

    @torch.no_grad()
    def _norm(self) -> Tensor:
        full = self.weight.double() + self.scale * self.lora_B.double() @ self.lora_A.double()
        norm: Tensor = torch.linalg.vector_norm(full, dim=1)
        return norm.float().clamp_min(1e-30)


def _widen(module: nn.Module) -> None:
    """Let `module` see fp32 in place of its own weights and buffers of 16 bits while it runs."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    narrow = {name: tensor for name, tensor in own.items() if tensor.dtype in _NARROW}
    if not narrow:
        return
    forward: Callable[..., Any] = module.forward

    def widened(*args: Any, **kwargs: Any) -> Any:
        for name, tensor in narrow.items():
            wide = tensor.detach().float()
            frozen = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(wide, requires_grad=False) if frozen else wide)
        try:
            return forward(*args, **kwargs)
        finally:  # a recomputation may stop in the middle
            for name, tensor in narrow.items():
                setattr(module, name, tensor)

    module.forward = widened


class _NoAutocast(nn.Module):
    """A model that takes no part in the autocast around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_base_model(self) -> nn.Module:
        """The model itself, where PEFT's model has it."""
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's; tensors of 16 bits among the arguments are widened."""
        wide = [_wide(a) for a in args], {name: _wide(a) for name, a in kwargs.items()}
        with torch.autocast(next(self.model.parameters()).device.type, enabled=False):
            return self.model(*wide[0], **wide[1])


def _wide(thing: Any) -> Any:
    return thing.float() if isinstance(thing, Tensor) and thing.dtype in _NARROW else thing


class _SameMask(nn.Dropout):
    """Dropout whose mask depends on the layer's name alone, so that all arms drop the same."""

    def __init__(self, name: str, p: float) -> None:
        super().__init__(p)
        self.seed = zlib.crc32(name.encode())

    def forward(self, x: Tensor) -> Tensor:
        """x or x with entries dropped, in its own dtype"""
        if not self.training or self.p == 0:
            return x
        draw = torch.Generator(x.device).manual_seed(self.seed)
        keep = torch.rand(x.shape, generator=draw, device=x.device) >= self.p
        return x * keep / (1 - self.p)


@contextmanager
def same_masks(model: nn.Module) -> Iterator[None]:
    """Let the adapter's dropout of `model` draw the masks of `truth_of`."""
    found = {
        name: module
        for name, module in model.named_modules()
        if ".lora_dropout." in name and isinstance(module, nn.Dropout)
    }
    for name, module in found.items():
        model.set_submodule(name, _SameMask(name, module.p).train(module.training))
    try:
        yield
    finally:
        for name, module in found.items():
            model.set_submodule(name, module)

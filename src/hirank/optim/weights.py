"""What is trained: weights in their own dtype, or in 8 bits without a master copy (Q-GaLore).

`Int8Weight` is a tensor of shape [out, in] and dtype bf16 (or another) to the outside: a parameter,
with a dense gradient, hooks and a place in `model.parameters()`. Inside it holds one code a weight
and two numbers a block of 256. `F.linear` widens it for the product and again in backward, so that
no wide copy outlives a layer; any other operation sees the widened tensor.

An update reads a span of weights, moves it in fp32 and rounds it stochastically: the mean of the
new codes is the exact weight, so steps smaller than one code are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hirank.errors import HirankError
from hirank.kernels.blockquant import BLOCK, dequantize_affine, quantize_affine
from hirank.kernels.galore_step import Blocks, Move, move_bf16_, move_int8_
from hirank.optim import sharded
from hirank.optim.costs import int8_weight_cost

__all__ = [
    "Int8Weight",
    "cost",
    "dequantize_weights",
    "int8_weights",
    "move",
    "quantize_weights",
]


_LINEAR = nn.functional.linear


class Int8Weight(Tensor):
    """A weight in int8 blocks; see the module's text.

    Attributes:
        codes: uint8 [numel].
        scale: fp32 [ceil(numel / 256)], the step of each block.
        low: fp32 [ceil(numel / 256)], the value of code 0.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, low: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> Int8Weight:
        """Wrap codes and blocks that exist."""
        made: Int8Weight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.device
        )
        made.codes, made.scale, made.low = codes, scale, low
        return made

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """The nearest codes of `weight`; its dtype stays the outer one."""
        parts = quantize_affine(weight.detach(), 8)
        return Int8Weight(*parts, weight.shape, weight.dtype)

    def widened(self, span: slice | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as a plain tensor; flat if only a `span` of them (from a block's start)."""
        dtype = dtype or self.dtype
        if span is None:
            parts = (self.codes, self.scale, self.low)
            return dequantize_affine(*parts, self.numel(), 8, dtype).view(self.shape)
        return dequantize_affine(*self.blocks(span), span.stop - span.start, 8, dtype)

    def blocks(self, span: slice) -> Blocks:
        """Codes and blocks of a span that starts and ends with a block (or with the end)."""
        if span.stop - span.start == self.codes.numel():
            return Blocks(self.codes, self.scale, self.low)
        each = slice(span.start // BLOCK, -(-span.stop // BLOCK))
        return Blocks(self.codes[span], self.scale[each], self.low[each])

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and dtype; the numbers would be widened to be shown."""
        return f"Int8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch: the tensors inside."""
        return ["codes", "scale", "low"], (self.shape, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, *_: Any) -> Int8Weight:
        """For torch: put together again."""
        return Int8Weight(inner["codes"], inner["scale"], inner["low"], *meta)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """A linear keeps codes for its backward pass instead of widened weights."""
        # In there, a weight's shape and dtype are asked for in C, not by way of this function.
        with torch._C.DisableTorchFunctionSubclass():
            return (_linear if func is _LINEAR else func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copies and moves keep the codes; everything else works on widened weights."""
        kwargs = kwargs or {}
        kept = _KEPT.get(func)
        if kept is not None and isinstance(args[0], Int8Weight):
            return kept(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map(_widen, (args, kwargs))
        return func(*args, **kwargs)


# A state dict with int8 weights in it loads as data: they are three tensors, a shape and a dtype.
torch.serialization.add_safe_globals([Int8Weight])


def _widen(value: Any) -> Any:
    return value.widened() if isinstance(value, Int8Weight) else value


def _each(weight: Int8Weight, change: Callable[[Tensor], Tensor], dtype: Any = None) -> Int8Weight:
    codes, scale, low = (change(part) for part in (weight.codes, weight.scale, weight.low))
    return Int8Weight(codes, scale, low, weight.shape, dtype or weight.dtype)


def _detach(weight: Int8Weight) -> Int8Weight:
    return _each(weight, lambda part: part)


def _clone(weight: Int8Weight, **_: Any) -> Int8Weight:
    return _each(weight, torch.clone)


def _to(
    weight: Int8Weight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Int8Weight:
    return _each(weight, lambda part: part.to(device=device, copy=True), dtype)


def _copy(weight: Int8Weight, source: Tensor, *_: Any) -> Int8Weight:
    new = source if isinstance(source, Int8Weight) else Int8Weight.of(source.to(weight.dtype))
    for mine, theirs in zip(
        (weight.codes, weight.scale, weight.low), (new.codes, new.scale, new.low), strict=True
    ):
        mine.copy_(theirs)
    return weight


_KEPT: dict[Any, Callable[..., Int8Weight]] = {
    torch.ops.aten.detach.default: _detach,
    torch.ops.aten.alias.default: _detach,
    torch.ops.aten.clone.default: _clone,
    torch.ops.aten._to_copy.default: _to,
    torch.ops.aten.copy_.default: _copy,
}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert isinstance(weight, Int8Weight)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _Int8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _Int8Linear(torch.autograd.Function):
    """y = x W'. Saves x and the weight itself, which is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return _LINEAR(x, weight.widened(dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dx = dw = None
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.needs_input_grad[0]:
                dx = dy @ weight.widened(dtype=dy.dtype)
            if ctx.needs_input_grad[1]:
                dw = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
                dw = dw.to(weight.dtype)
        return dx, dw


# Models.


def quantize_weights(model: nn.Module, names: Iterable[str]) -> int:
    """Turn the named parameters (tied ones once) into Int8Weight in place; how many there were.

    The GPU gets back what the wide ones took: kept by PyTorch's allocator, gigabytes of it would be
    in pieces of sizes that nothing asks for any more.

    Raises:
        HirankError: one is sharded by FSDP2.
    """
    count = _quantize_each(model, names)
    if count and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return count


def _quantize_each(model: nn.Module, names: Iterable[str]) -> int:
    wanted, made = set(names), dict[int, nn.Parameter]()
    for prefix, module in model.named_modules():
        for name, old in list(module._parameters.items()):
            if old is not None and _joined(prefix, name) in wanted:
                _refuse_sharded(old, _joined(prefix, name))
                new = made.setdefault(id(old), nn.Parameter(Int8Weight.of(old), old.requires_grad))
                module._parameters[name] = new
    return len(made)


def _refuse_sharded(p: Tensor, name: str) -> None:
    if sharded.is_sharded(p):
        raise HirankError(
            f"{name} is sharded by FSDP2, which gathers weights in their own dtype and knows no "
            "int8 blocks; use weights='keep' (moments and bases stay small), or "
            "Q-GaLore in one process per whole model."
        )


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def dequantize_weights(model: nn.Module) -> None:
    """Turn every Int8Weight of `model` into a plain parameter, so that anything can save it."""
    made = dict[int, nn.Parameter]()
    for module in model.modules():
        old: Any
        for name, old in list(module._parameters.items()):
            if isinstance(old, Int8Weight):
                plain = nn.Parameter(old.widened(), old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), plain)


def int8_weights(model: nn.Module) -> dict[str, Tensor]:
    """Codes and blocks of every Int8Weight, by NAME.codes, NAME.scale and NAME.low: the exact
    weights as plain tensors, for a checkpoint. Writing into them changes the model."""
    return {
        f"{name}.{part}": getattr(weight, part)
        for name, weight in model.named_parameters()
        if isinstance(weight, Int8Weight)
        for part in ("codes", "scale", "low")
    }


def cost(n: int) -> int:
    """Bytes of a weight of `n` numbers in int8."""
    return int8_weight_cost(n)


# Moving weights.


def move(
    p: Tensor,
    span: slice,
    delta: Tensor,
    step: float,
    keep: Tensor | None,
    seed: int | None,
) -> None:
    """p[span] <- p[span] keep - step delta, in fp32 with one rounding.

    Args:
        p: an Int8Weight, or a contiguous tensor.
        span: of the flat weight; for int8 from a block's start.
        delta: flat, fp32.
        step: its factor.
        keep: one number, or one for each weight of a plain tensor; None is 1.
        seed: rounds bf16 weights stochastically, and int8 ones, which must have one; None to the
            nearest.
    """
    if isinstance(p, Int8Weight):
        assert seed is not None, "int8 weights are always rounded stochastically"
        move_int8_(p.blocks(span), delta, Move(step, keep, seed, span.start))
        return
    kept = p.view(-1)[span]
    if kept.dtype == torch.bfloat16 and seed is not None:
        move_bf16_(kept, delta, Move(step, keep, seed, span.start))
        return
    wide = kept.to(delta.dtype)
    kept.copy_((wide if keep is None else wide * keep).sub(delta, alpha=step))

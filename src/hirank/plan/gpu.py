"""The ways that hirank's code takes on a GPU, for fake tensors that are on the CPU.

It asks tensors where they are and what class they are of, and fake ones give the wrong answer. What
is replaced inside `as_on_gpu`, and by what, is all in this file:

    layers     take fake weights for plain ones, and the Triton kernels for their joins, with the
               tiles of an H200; a joined GEMM makes its result and nothing else
    norms      are two vectors a layer, written in place: the table's, and what backward relies on
    products   of 16-bit numbers come out in fp32 at once
    optimisers launch kernels that make what they return and nothing else

Optimisers that work span by span work on three spans of a parameter, whatever its size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from hirank.adapters.peft import converted, route
from hirank.kernels import dora_linear
from hirank.kernels._backend import GainPass
from hirank.kernels._tuning import TABLE
from hirank.kernels.gain_pass import gain_backward, gain_forward_
from hirank.optim import bases, rules, state, weights
from hirank.optim.hyper import Hyper
from hirank.plan import live
from hirank.plan.faked import answer

__all__ = ["as_fake", "as_here", "as_on_gpu"]

_PROCESSORS = 132
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@contextmanager
def as_fake(*, masked: bool) -> Iterator[None]:
    """Fake weights and inputs are taken for plain ones inside, and all else is as on this machine.

    `masked`: whether attention gets a mask, as for packed rows. Transformers makes one for fake
    inputs in any case, and none for real rows of one length.
    """
    from transformers import masking_utils

    with (
        _replaced(route, "plain_tensor", lambda tensor: not hasattr(tensor, "ds_id")),
        _replaced(masking_utils, "is_tracing", lambda *asked: masked),
        _replaced(state, "spans", _few(state.spans)),
        _replaced(rules, "_slabs", _few(rules._slabs)),
    ):
        yield


@contextmanager
def as_here(*, masked: bool) -> Iterator[None]:
    """`as_fake`, for hirank's reference code: no column needs a second look."""

    def found(func: Any, args: tuple[Any, ...]) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return answer(func, args)

    with as_fake(masked=masked), _replaced(live, "answer", found):
        yield


def _few(parts: Callable[..., Iterable[slice]]) -> Callable[..., list[slice]]:
    """The first two parts and the last: those between make what the second one makes."""

    def found(*asked: Any) -> list[slice]:
        every = list(parts(*asked))
        return every if len(every) < 4 else [*every[:2], every[-1]]

    return found


@contextmanager
def as_on_gpu(*, masked: bool, quantised: bool = False) -> Iterator[None]:
    """hirank's layers and optimisers make the tensors inside that they make on an H200.

    `quantised`: as if the weights of adapted layers were no floats, which are then made for each
    forward and each backward pass of a layer.
    """
    with ExitStack() as stack:
        stack.enter_context(as_fake(masked=masked))
        if quantised:
            for name, place in (("dora_linear_fwd_ref", 1), ("dora_linear_bwd_ref", 4)):
                with_floats = _with_floats(getattr(dora_linear, name), place)
                stack.enter_context(_replaced(dora_linear, name, with_floats))
        for owner, name, new in (
            (dora_linear, "gain_pass_for", lambda *asked: _GAIN_PASS),
            (dora_linear, "joined_gemm", lambda tile, out, *operands, **more: out),
            (dora_linear, "product", _product),
            (converted, "norms_of", _norms_of),
            (bases, "multiply", lambda a, b, dtype: _product(a.to(dtype), b.to(dtype), dtype)),
            *_LAUNCHES,
        ):
            stack.enter_context(_replaced(owner, name, new))
        yield


@contextmanager
def _replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _with_floats(run: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`run`, with a weight [N, K] in the dtype of its first operand alive beside it."""

    def found(*operands: Any, **more: Any) -> Any:
        floats = torch.empty_like(operands[place], dtype=operands[0].dtype)
        made = run(*operands, **more)
        del floats
        return made

    return found


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=_WIDE.get(dtype, dtype))


def _tile(a1: Tensor, b1: Tensor, b2: Tensor, *, by_column: bool) -> Any:
    """As `joined_tile` chooses it on an H200."""
    M, N = a1.shape[0], b1.shape[0 if by_column else 1]
    widths = (a1.shape[1], b1.shape[1], b2.shape[1], N, b2.shape[1 if by_column else 0])
    if a1.dtype not in _WIDE or any(width % 8 for width in widths):
        return None
    for rows, columns, *_, waves in TABLE["nvidia", "hopper"].joined:
        if -(-M // rows) * -(-N // columns) >= waves * _PROCESSORS:
            return rows, columns
    return None


def _decoded(
    codes: Tensor, scale: Tensor, low: Tensor, n: int, bits: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(n, dtype=dtype)


def _direction(
    grad: Tensor,
    codes: Any,
    ok: Tensor,
    adam: Any,
    seed: int,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


def _narrow(p: Tensor, dense: Tensor | None, hyper: Hyper) -> torch.dtype:
    """As on a GPU, where the product rounds to 16 bits in any case."""
    narrow = dense is None and hyper.sides != "two" and p.dtype in _WIDE
    return p.dtype if narrow else torch.float32


def _decoded_in(like: Tensor) -> torch.dtype:
    return like.dtype if like.dtype == torch.bfloat16 else torch.float32


def _as_multiplied(change: Any, p: Tensor) -> Any:
    if change.product is None:
        return change
    return change._replace(product=tuple(part.to(p.dtype) for part in change.product))


_LAUNCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (rules, "launchable", lambda tensor: True),
    (rules, "adam_int8_", _direction),
    (rules, "_narrow", _narrow),
    (rules, "_as_multiplied", _as_multiplied),
    (weights, "dequantize_affine", _decoded),
    (bases, "dequantize_affine", _decoded),
    (bases, "_decoded_in", _decoded_in),
    (weights, "move_int8_", lambda weight, delta, move: None),
    (weights, "move_bf16_", lambda weight, delta, move: None),
)
"""What the low-rank optimisers launch, and what they ask the device."""

_GAIN_PASS = GainPass(gain_forward_, gain_backward, _tile)


class _Norms:
    """In place of a NormCache."""

    def __init__(self, layer: Any) -> None:
        self.owner = weakref.ref(layer)
        self._kept: tuple[Tensor, Tensor] | None = None

    def norm(
        self, weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        """[N] fp32, of which there are two."""
        if self._kept is None:
            made = (torch.empty(weight.shape[0]) for _ in range(2))
            self._kept = next(made), next(made)
        return self._kept[1]

    def at_hand(self, weight: Tensor, *more: Any) -> tuple[Tensor, None]:
        """The norm; and no casts, so that each call makes its own, as large as a window at most."""
        return self.norm(weight, *more), None

    def clear(self) -> None:
        """As a NormCache forgets."""
        self._kept = None


def _norms_of(layer: Any, name: str) -> Any:
    norms = layer._hirank_norms.get(name)
    if not isinstance(norms, _Norms):
        norms = layer._hirank_norms[name] = _Norms(layer)
    return norms

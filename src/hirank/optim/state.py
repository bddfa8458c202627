"""How Adam's moments are kept: fp32, bf16, or int8 block by block.

    fp32     the tensor itself (fp64 for fp64 weights)
    bf16     rounded stochastically: to the nearest, a second moment of beta 0.999 would stand still
    int8     NAME_codes and NAME_absmax, see `kernels/blockquant.py`; with feedback also
             NAME_error_codes and NAME_error_absmax, what the last rounding took away

State is a flat dict of tensors and numbers. A tensor under SMALL numbers stays in fp32 whatever is
asked for, as in bitsandbytes and torchao.

Access is by spans of the flat tensor, a multiple of the block wide: an embedding's moments are
never in fp32 as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hirank.kernels._noise import random_bits_ref, uniform_ref
from hirank.kernels.blockquant import (
    BLOCK,
    dequantize_power,
    quantize_power,
    round_to_bf16,
)
from hirank.kernels.galore_step import Moments
from hirank.optim.costs import SMALL, kind_of
from hirank.optim.hyper import Hyper

__all__ = [
    "FIRST",
    "SECOND",
    "SMALL",
    "codes_of",
    "create",
    "in_codes",
    "read",
    "spans",
    "stored_bytes",
    "write",
]

State = dict[str, Any]

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_CODES = tuple(f"{name}_{part}" for name in (FIRST, SECOND) for part in ("codes", "absmax"))
_ERROR = f"{FIRST}_error_codes"
SPAN, WIDE_SPAN = 2**22, 2**24
"""Numbers worked on at a time, with a dozen copies in fp32; and with one, where kernels run."""


def spans(n: int, width: int = SPAN) -> Iterator[slice]:
    """The spans that cover [n]."""
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))


def create(state: State, name: str, shape: Sequence[int], like: Tensor, hyper: Hyper) -> None:
    """Zeros of `shape` under `name`, on `like`'s device."""
    n, device = math.prod(shape), like.device
    if kind_of(n, hyper) != "int8":
        wide = torch.promote_types(like.dtype, torch.float32)
        dtype = torch.bfloat16 if kind_of(n, hyper) == "bf16" else wide
        state[name] = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return
    _create_codes(state, name, n, torch.int8 if name == FIRST else torch.uint8, device)
    if hyper.rounding == "feedback":
        _create_codes(state, f"{name}_error", n, torch.int8, device)


def _create_codes(
    state: State, name: str, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    state[f"{name}_codes"] = torch.zeros(n, dtype=dtype, device=device)
    state[f"{name}_absmax"] = torch.zeros(-(-n // BLOCK), device=device)


def read(state: State, name: str, span: slice) -> Tensor:
    """[span] fp32 (fp64 where kept so). The caller must not write into it."""
    if name in state:
        kept: Tensor = state[name].view(-1)[span]
        return kept.float() if kept.dtype == torch.bfloat16 else kept
    value = _decode(state, name, span)
    if f"{name}_error_codes" in state:
        value += _decode(state, f"{name}_error", span)
        value = value.clamp_(min=0) if name == SECOND else value
    return value


def _decode(state: State, name: str, span: slice) -> Tensor:
    codes, absmax = state[f"{name}_codes"][span], state[f"{name}_absmax"][_blocks(span)]
    return dequantize_power(codes, absmax, _power(name))


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))


def _power(name: str) -> int:
    return 4 if name == SECOND else 2


def in_codes(state: State) -> bool:
    """Whether both moments are kept in int8 without feedback: what one launch moves."""
    return _CODES[0] in state and _ERROR not in state


def codes_of(state: State, span: slice) -> Moments | None:
    """Both moments of a span if they are kept so."""
    if not in_codes(state):
        return None
    first, first_max, second, second_max = (state[key] for key in _CODES)
    if span.stop - span.start == first.numel():
        return Moments(first, first_max, second, second_max)
    each = _blocks(span)
    return Moments(first[span], first_max[each], second[span], second_max[each])


def write(state: State, name: str, span: slice, value: Tensor, ok: Tensor, seed: int) -> None:
    """Store [span] where `ok` (a bool on the device) holds; else what is stored stays as it is.
    Rounding draws by `seed`, of each moment other numbers."""
    drawn = (seed + (name == SECOND), span.start, span.stop - span.start, value.device)
    if name in state:
        kept = state[name].view(-1)[span]
        if kept.dtype == torch.bfloat16:
            bits = random_bits_ref(*drawn).bitwise_and_(2**16 - 1)
            value = round_to_bf16(torch.where(ok, value, 0), bits)
        kept.copy_(torch.where(ok, value, kept))
    elif f"{name}_error_codes" in state:
        _encode(state, name, span, value, ok, None)
        error = value - _decode(state, name, span)
        _encode(state, f"{name}_error", span, error, ok, None)
    else:
        _encode(state, name, span, value, ok, uniform_ref(*drawn))


def _encode(
    state: State, name: str, span: slice, value: Tensor, ok: Tensor, noise: Tensor | None
) -> None:
    codes, absmax = quantize_power(value, _power(name), signed=name != SECOND, noise=noise)
    for key, new, part in (("codes", codes, span), ("absmax", absmax, _blocks(span))):
        kept = state[f"{name}_{key}"][part]
        kept.copy_(torch.where(ok, new, kept))


def stored_bytes(state: State) -> int:
    """Bytes of the tensors that a state really holds."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

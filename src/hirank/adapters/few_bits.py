"""Base weights as a training saw them that held its linears in few bits.

Who trains an adapter on a base quantised while loading (QLoRA) trains it beside other weights than
those of the files. Merged into the files' weights it is beside the wrong ones; merged into these
it computes what was trained. Needs bitsandbytes.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hirank.adapters.base_files import BaseFolder, is_weights
from hirank.errors import HirankError

__all__ = ["KINDS", "as_trained", "check_kind", "dense_copy", "quantised_layers"]

KINDS = ("nf4", "nf4-double", "fp4", "fp4-double", "int8")
"""bitsandbytes' formats: 4 bits in blocks of 64 (`-double`: their scales in 8 bits), LLM.int8."""


def check_kind(kind: str) -> None:
    """Raises HirankError: no such kind, or no bitsandbytes."""
    if kind not in KINDS:
        raise HirankError(f"The base was trained on {kind!r}: choose from {', '.join(KINDS)}.")
    _bitsandbytes()


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise HirankError(
            "Weights in few bits need bitsandbytes, which is not installed: pip install "
            "'hirank[quant]'."
        ) from None
    return bitsandbytes


@torch.no_grad()
def as_trained(weight: Tensor, kind: str) -> Tensor:
    """`weight` quantised to `kind` and back, in its dtype: what the training multiplied with."""
    functional = _bitsandbytes().functional
    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        wide: Tensor = codes.float() * (scales[:, None] / 127)
        return wide.to(weight.dtype)
    codes, state = functional.quantize_4bit(
        weight.contiguous(),
        quant_type=kind.removesuffix("-double"),
        compress_statistics=kind.endswith("-double"),
    )
    dense: Tensor = functional.dequantize_4bit(codes, state)
    return dense.to(weight.dtype)


def quantised_layers(model: nn.Module) -> Iterator[str]:
    """The linears that Transformers would load in few bits: all but the head and the like."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = set(get_keys_to_not_convert(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not _within(name, kept):
            yield name


def _within(name: str, kept: set[str]) -> bool:
    return any(name == key or name.startswith(f"{key}.") or f".{key}" in name for key in kept)


def dense_copy(folder: Path, place: Path) -> BaseFolder:
    """A model whose weights are stored in few bits, written to `place` in a floating dtype.

    Needs the memory of the whole model. Raises HirankError: Transformers cannot load it so.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        model.dequantize(dtype=model.dtype).save_pretrained(place)
    except (OSError, ValueError, ImportError, RuntimeError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HirankError(f"{folder} cannot be dequantised ({reason}).") from None
    for path in sorted(folder.iterdir()):
        if path.is_file() and not (place / path.name).exists() and not is_weights(path):
            shutil.copyfile(path, place / path.name)
    return BaseFolder(place)

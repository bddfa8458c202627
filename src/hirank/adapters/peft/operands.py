"""What the layers of each kind hold, as the matrices that norms and merges are made of.

    kind                 W [N, K]            A [R, K], B [N, R]           N
    nn.Linear            the weight          lora_A, lora_B               out features
    GPT-2's Conv1D       its transpose       lora_A, lora_B               out features
    nn.Embedding         its transpose       lora_embedding_A and _B      dimensions
    nn.Conv1d, 2d, 3d    channels by rest    lora_A, lora_B, flattened    out channels

Everything is a view of what the layer holds, wherever its layout allows.
"""

import functools
from collections.abc import Callable
from typing import Any

from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hirank.adapters.conv import matrices
from hirank.adapters.viewed_norms import as_they_lie

__all__ = [
    "as_matrix",
    "convolves",
    "dropout_of",
    "embeds",
    "factors",
    "groups_of",
    "magnitude_of",
    "matrices_of",
    "norm_inputs",
    "present",
    "turned",
]


def embeds(layer: Any) -> bool:
    return isinstance(layer, peft_lora.Embedding)


def convolves(layer: Any) -> bool:
    return isinstance(layer, peft_lora._ConvNd)


def turned(base: nn.Module) -> bool:
    """Whether the base weight lies as [K, N]."""
    return isinstance(base, (Conv1D, nn.Embedding))


def groups_of(layer: Any) -> int:
    return int(layer.base_layer.groups) if convolves(layer) else 1


def present(layer: Any) -> list[str]:
    """The active adapters that the layer has."""
    held = layer.lora_embedding_A if embeds(layer) else layer.lora_A
    return [name for name in layer.active_adapters if name in held]


def dropout_of(layer: Any, name: str) -> nn.Module | None:
    """The dropout that a call meets, if any, as in PEFT.

    LoRA's is a module with a mode of its own, so that it can be on in a layer that is not trained
    (Monte Carlo dropout). DoRA's is on in training only, and an embedding has none.
    """
    found: nn.Module = layer.lora_dropout[name]
    if isinstance(found, nn.Identity) or embeds(layer):
        return None
    if name in layer.lora_variant:
        return found if layer.training else None
    return None if type(found) is nn.Dropout and not found.training else found


def factors(layer: Any, name: str) -> tuple[Tensor, Tensor]:
    """The parameters A and B as they lie."""
    if embeds(layer):
        return layer.lora_embedding_A[name], layer.lora_embedding_B[name]
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def magnitude_of(layer: Any, name: str) -> Tensor | None:
    """m as [N]; None for plain LoRA."""
    if name not in layer.lora_variant:
        return None
    magnitude: Tensor = layer.lora_magnitude_vector[name].weight
    return magnitude if magnitude.dim() == 1 else magnitude.flatten()


def as_matrix(layer: Any, weight: Tensor) -> Tensor:
    """A tensor that lies as the base weight does, as [N, K]; to be written to, too."""
    if turned(layer.base_layer):
        return weight.T
    return matrices(weight, weight, weight)[0] if weight.dim() > 2 else weight


def norm_inputs(layer: Any, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B as matrices, in one order of columns."""
    return matrices_of(layer)(layer.base_layer.weight, *factors(layer, name))


def matrices_of(layer: Any) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """How base weight, A and B of such a layer become matrices, in one order of columns."""
    if convolves(layer):
        return functools.partial(matrices, groups=groups_of(layer))
    return _turned if turned(layer.base_layer) else as_they_lie


def _turned(weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weight.T, lora_A, lora_B

"""What is wrong with a layer or its input, in one sentence that names the layer.

Nothing here runs while all is well: shapes are looked at when a layer meets new weights, values
when it is converted, and the input only after a call has failed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hirank.adapters.peft.operands import (
    as_matrix,
    convolves,
    embeds,
    factors,
    groups_of,
    magnitude_of,
    norm_inputs,
    present,
)
from hirank.adapters.peft.route import (
    adapter_obstacle,
    base_obstacle,
    foreign_base,
    plain_tensor,
    tensor_parallel,
)
from hirank.errors import HirankError
from hirank.kernels._backend import check_backend

__all__ = ["check_adapters", "check_backend_of", "check_shapes", "check_whole"]
__all__ += ["fault_of_call", "fault_of_transform"]


def check_shapes(name: str, layer: Any, adapters: list[str]) -> None:
    """Raises HirankError: A, B or magnitude of an adapter do not fit the base weight."""
    n, k = as_matrix(layer, layer.base_layer.weight).shape
    groups = groups_of(layer)
    for adapter in adapters:
        _, A, B = norm_inputs(layer, adapter)
        k_a, r = k * groups, A.shape[0]
        if A.dim() != 2 or A.shape[1] != k_a or tuple(B.shape) != (n, r // groups):
            raise HirankError(
                f"{name} has a weight {n}x{k} and adapter {adapter!r} with A {_text(A)} and "
                f"B {_text(B)}: A must be [R, {k_a}] and B [{n}, R] of one rank R."
            )
        magnitude = magnitude_of(layer, adapter)
        if magnitude is not None and tuple(magnitude.shape) != (n,):
            raise HirankError(
                f"{name} has {n} rows and adapter {adapter!r} a magnitude {_text(magnitude)}: "
                "it must have one entry for each row."
            )


def _text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "()"


def check_adapters(name: str, layer: Any) -> None:
    """Raises HirankError: an adapter that hirank is to compute does not fit or is not finite."""
    if base_obstacle(layer) is not None:
        return
    held = layer.lora_embedding_A if embeds(layer) else layer.lora_A
    names = [a for a in held if adapter_obstacle(layer, a) is None]
    check_shapes(name, layer, names)
    for adapter in names:
        _check_values(name, layer, adapter)


@torch.no_grad()
def _check_values(name: str, layer: Any, adapter: str) -> None:
    """Raises HirankError: A, B or magnitude hold NaN or infinity, and so would the gain."""
    A, B = factors(layer, adapter)
    parts = {"lora_A": A, "lora_B": B, "lora_magnitude_vector": magnitude_of(layer, adapter)}
    for part, weight in parts.items():
        if weight is None or weight.is_meta or not plain_tensor(weight):
            continue
        if not torch.isfinite(weight).all():
            raise HirankError(
                f"{name} has NaN or infinity in {part} of adapter {adapter!r}: load a checkpoint "
                "from before the training diverged."
            )


def check_whole(name: str, layer: Any) -> None:
    """Raises HirankError: DoRA on a layer of which this process has a part only.

    PEFT splits A and B, but neither m nor the norm: its DoRA would compute something else.
    """
    base = layer.get_base_layer()
    if layer.lora_variant and tensor_parallel(base):
        raise HirankError(
            f"{name} is split over processes (tensor parallelism, plan {base._hf_tp_plan!r}), "
            "where DoRA's norm and magnitude would be those of a part: use LoRA, or load the model "
            "without tp_plan."
        )


def check_backend_of(name: str, layer: Any, backend: str) -> None:
    """Raises HirankError: Triton was asked for and cannot run where the layer lies."""
    device = layer.base_layer.weight.device
    if device.type == "meta":
        return  # it will lie elsewhere
    try:
        check_backend(backend, device)
    except ValueError as error:
        raise HirankError(f"{name}: {error}") from None


def fault_of_call(layer: Any, x: Any) -> HirankError | None:
    """Why a call of a converted layer with `x` failed, if it is the input or the weights."""
    if not isinstance(x, Tensor) or foreign_base(layer) is not None:
        return None
    name, weight = layer._hirank_options.name, layer.base_layer.weight
    transformed = fault_of_transform(name)
    if transformed is not None:
        return transformed
    for adapter in present(layer):
        where = factors(layer, adapter)[0].device
        if where != weight.device:
            return HirankError(
                f"{name} has its weight on {weight.device} and adapter {adapter!r} on {where}: "
                "move one of them."
            )
    if x.device != weight.device:
        return HirankError(
            f"{name} got x on {x.device} and has its weight on {weight.device}: move one of them."
        )
    if embeds(layer):
        return _fault_of_ids(name, x, len(weight))
    if convolves(layer):
        channels = weight.shape[1] * groups_of(layer)
        if x.dim() not in (weight.dim(), weight.dim() - 1) or x.shape[1 - weight.dim()] != channels:
            return HirankError(
                f"{name} got x of shape {list(x.shape)}: it must be [images, {channels}, ...] with "
                f"{weight.dim() - 2} dimensions of space."
            )
    elif x.dim() == 0 or x.shape[-1] != as_matrix(layer, weight).shape[1]:
        k = as_matrix(layer, weight).shape[1]
        return HirankError(
            f"{name} got x of shape {list(x.shape)}: the last dimension must be {k}."
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return HirankError(
            f"{name} got x in {x.dtype} and has its weight in {weight.dtype}: cast one of them, or "
            "run under autocast."
        )
    return None


def fault_of_transform(name: str) -> HirankError | None:
    """What a call inside torch.func or forward-mode differentiation is told, if it failed there."""
    if torch._C._are_functorch_transforms_active():
        where = "a transform of torch.func"
    elif forward_ad._current_level >= 0:
        where = "forward-mode differentiation"
    else:
        return None
    return HirankError(
        f"{name} was called inside {where}, which hirank's own backward pass does not take: undo "
        "hirank.accelerate with hirank.restore(model), and PEFT computes it."
    )


def _fault_of_ids(name: str, ids: Tensor, entries: int) -> HirankError | None:
    if ids.dtype not in (torch.int64, torch.int32):
        return HirankError(f"{name} got ids in {ids.dtype}: give integers (int64 or int32).")
    if ids.numel() and not ids.is_meta and not (0 <= int(ids.min()) and int(ids.max()) < entries):
        return HirankError(
            f"{name} got ids from {int(ids.min())} to {int(ids.max())}: they must be from 0 to "
            f"{entries - 1}."
        )
    return None

"""What is compared. All arms share the base weights and the adapter weights, bit for bit.

    base          the frozen model; gradients reach the input embeddings only
    peft-lora     PEFT's LoRA
    peft-dora     PEFT's DoRA
    dense-dora    PEFT's DoRA with B.weight @ A.weight in place of the product with an identity
    hirank-lora   PEFT's LoRA after hirank.accelerate
    hirank-dora   PEFT's DoRA after hirank.accelerate

Shared weights make the arms comparable tensor by tensor, and let six of them fit where one does.
The adapters are perturbed, as training leaves them: B is not zero and m is not the norm.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hirank.adapters.peft import accelerate
from hirank.bench.bases import dequantised
from hirank.bench.shapes import MODELS, config_of
from hirank.errors import HirankError

__all__ = [
    "ARMS",
    "MAGNITUDE",
    "SCALE",
    "adapt",
    "autocast",
    "base_dtype",
    "build",
    "computed_norms",
    "copy_sharing_weights",
    "load_base",
    "trainable",
]

ARMS = ("base", "peft-lora", "peft-dora", "dense-dora", "hirank-lora", "hirank-dora")
MAGNITUDE = "lora_magnitude_vector"
SCALE = 2.0  # s: lora_alpha by rank
_BRANCH = 0.1  # norm of s B A by the norm of W
_STRETCH = 0.1  # spread of m around the norm


def base_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device: torch.device, cached: bool = True) -> AbstractContextManager[Any]:
    """Mixed precision as in training: bf16 on a GPU, none on a CPU. `cached`: keep casts."""
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=cached)


def load_base(name: str, device: torch.device) -> nn.Module:
    """The frozen base model on `device`: a folder's weights, or random ones for a known shape.

    Random weights are drawn on the device itself, so a large model never exists on the host.

    Raises:
        HirankError: `name` is neither a shape nor a model folder.
    """
    from transformers import AutoModelForCausalLM

    dtype = base_dtype(device)
    model: nn.Module
    create: Any = AutoModelForCausalLM.from_config
    if name in MODELS:
        torch.manual_seed(0)
        with device:
            model = create(config_of(name), dtype=dtype)
    elif (Path(name) / "config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True)
    else:
        shapes = ", ".join(MODELS)
        raise HirankError(f"--model got {name!r}: give a model folder, or one of {shapes}.")
    model = model.to(device)
    return model.requires_grad_(False)


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """A model with modules of its own over the same parameters and buffers."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def build(
    base: nn.Module,
    names: Sequence[str],
    *,
    rank: int,
    dropout: float = 0.0,
    targets: str | list[str] = "all-linear",
) -> dict[str, nn.Module]:
    """The arms, in training mode. `base` must be frozen and stays as it is."""
    shared: dict[str, nn.Parameter] = {}
    models = {}
    for name in names:
        model = copy_sharing_weights(base)
        if name != "base":
            with next(base.parameters()).device:
                model = adapt(model, dora="dora" in name, rank=rank, dropout=dropout, to=targets)
            _share(model, shared)
            _specialise(model, name)
        models[name] = model.train()
    return models


def adapt(
    model: nn.Module, *, dora: bool, rank: int, dropout: float = 0.0, to: str | list[str]
) -> nn.Module:
    """Stock PEFT's LoRA or DoRA on the linears `to`, as PEFT creates it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=int(SCALE * rank), lora_dropout=dropout, use_dora=dora, target_modules=to
    )
    with warnings.catch_warnings():
        # PEFT 0.21 asks Transformers 5.24 by an old name
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _specialise(model: nn.Module, name: str) -> None:
    if name.startswith("hirank"):
        accelerate(model)
    if name == "dense-dora":
        for module in model.modules():
            if hasattr(module, "get_lora_weight"):
                setattr(module, "get_lora_weight", _dense_product)  # noqa: B010 (an attribute)


def _dense_product(lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> Tensor:
    product: Tensor = lora_B.weight @ lora_A.weight
    return product


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by name; the same names in every arm that has them."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _share(model: nn.Module, shared: dict[str, nn.Parameter]) -> None:
    """Point the adapter at the values all arms use, which the first arm to need them draws."""
    for name, parameter in trainable(model).items():
        if name not in shared:
            shared[name] = nn.Parameter(_perturbed(model, name, parameter.detach()))
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, shared[name])


def _perturbed(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Seeded fp32 values for a parameter of an adapter that PEFT has just created."""
    draw = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(value.shape, generator=draw, device=value.device)
    if MAGNITUDE in name:  # PEFT made it the norm of W
        return noise.mul_(_STRETCH).add_(1).mul_(value)
    if "_A." in name:
        return noise.div_(value[0].numel() ** 0.5)
    base = model.get_submodule(name.partition(".lora_")[0] + ".base_layer")
    weight = dequantised(cast(nn.Linear, base)).weight
    length = torch.linalg.vector_norm(weight, dtype=torch.float32) / value.shape[0] ** 0.5
    return noise.mul_(_BRANCH * length / (SCALE * value.shape[1] ** 0.5))


def computed_norms(model: nn.Module) -> tuple[int, int]:
    """How many norms hirank computed so far, and on how many layers it keeps one."""
    caches = [
        norms
        for module in model.modules()
        for norms in getattr(module, "_hirank_norms", {}).values()
    ]
    return sum(norms.computed for norms in caches), len(caches)

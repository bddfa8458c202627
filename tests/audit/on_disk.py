"""Small adapters on disk, with every kind of layer, and the base they belong to."""

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

KINDS = ["words", "layers.0", "layers.1", "turned", "image", "grouped"]


class Kinds(nn.Module):
    """One layer of each kind, run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 14)
        self.layers = nn.ModuleList([nn.Linear(14, 18), nn.Linear(14, 11)])
        self.turned = Conv1D(20, 14)
        self.image = nn.Conv2d(4, 12, 3)
        self.grouped = nn.Conv2d(4, 16, 3, groups=2)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        x = self.words(ids)
        made = [self.layers[0](x), self.layers[1](x), self.turned(x)]
        return torch.cat([y.flatten() for y in (*made, self.image(picture), self.grouped(picture))])


class OnDisk(NamedTuple):
    base: Path
    adapter: Path
    model: Kinds
    """The base, without the adapter."""
    peft: PeftModel


def inputs() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(7)
    return torch.arange(23), torch.randn(2, 4, 5, 5, generator=dice)


def saved(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> OnDisk:
    """A base and a trained-looking adapter of rank 8 on it, both written below `folder`."""
    torch.manual_seed(0)
    model = Kinds().to(dtype)
    write_base(folder / "base", model)
    settings = {"r": 8, "lora_alpha": 12, "use_dora": True, "target_modules": KINDS} | changes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="LoRA adapter added to ConvNd layer with groups")
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    peft.save_pretrained(folder / "adapter")
    return OnDisk(folder / "base", folder / "adapter", model, peft.eval())


def write_base(folder: Path, model: nn.Module, config: str = "{}") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config)


def delta(peft: PeftModel, name: str) -> Tensor:
    """s B A of a layer in fp64 as [N, K], from PEFT's own parameters."""
    layer = peft.base_model.model.get_submodule(name)
    if name == "words":
        A, B = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    else:
        A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    A, B = A.detach().double().flatten(1), B.detach().double().flatten(1)
    groups = A.shape[0] // B.shape[1]
    parts = [b @ a for b, a in zip(B.chunk(groups), A.chunk(groups), strict=True)]
    return layer.scaling["default"] * torch.cat(parts)


def weight(model: Kinds, name: str) -> Tensor:
    """W of a layer in fp64 as the dense [N, K] that its adapter adds to."""
    layer = model.get_submodule(name)
    W = layer.weight.detach().double()
    if name in ("words", "turned"):
        return W.T
    if name == "grouped":
        half = W.shape[0] // 2
        return torch.block_diag(W[:half].flatten(1), W[half:].flatten(1))
    return W.flatten(1)

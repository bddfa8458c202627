"""An adapter folder read layer by layer, without a model: for audits and merges.

    adapter_config.json, adapter_model.safetensors  ->  AdapterFolder  ->  AdapterLayer, one by one

Only the layer that is looked at is in memory. Everything that can be wrong with the files is
found when the folder is opened, but for numbers that are not finite, found with their layer.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from hirank.adapters.export import WEIGHTS_FILE, check_adapter
from hirank.errors import HirankError

__all__ = ["PREFIX", "AdapterFolder", "AdapterLayer", "Kind"]

Kind = Literal["linear", "embedding", "conv"]

PREFIX = "base_model.model."
"""Of every key in PEFT's files."""
# `.weight` behind a magnitude: as older PEFT wrote it.
_PART = re.compile(
    r"(?P<layer>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)(?P<end>\.weight|\.bias)?$"
)
_NEEDED = {"lora_A": "lora_B", "lora_B": "lora_A"}
_NEEDED |= {"lora_embedding_A": "lora_embedding_B", "lora_embedding_B": "lora_embedding_A"}

# Initialisations that take the adapter out of the base weight and leave another base behind.
_OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
_OTHER_FORWARD = (
    "target_parameters", "layer_replication", "trainable_token_indices", "use_qalora",
    "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config",
    "velora_config", "megatron_config",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterLayer:
    """The adapter of one layer, as its file holds it. R rank, K in, N out (channels, dimensions).

    The layer's weight, as [N, K], is `g (W + s B A)`, with `g = m / |W + s B A|` per row for DoRA
    and 1 for LoRA. An embedding's lies as the transpose of that.
    """

    name: str
    """Of the layer in the base model, as in `model.layers.0.self_attn.q_proj`."""
    kind: Kind
    lora_A: Tensor
    """[R, K]; of a convolution [R, C, *k]."""
    lora_B: Tensor
    """[N, R]; of a convolution [N, R / groups, 1 ...]."""
    magnitude: Tensor | None
    """[N]; None: plain LoRA."""
    bias: Tensor | None
    """[N], from `lora_bias`: the layer adds s times this to its bias."""
    alpha: float
    scale: float
    """s: alpha / R, or alpha / sqrt(R) with rsLoRA."""

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]

    @property
    def A(self) -> Tensor:
        """[R, K], convolutions flattened."""
        return self.lora_A.flatten(1)

    @property
    def B(self) -> Tensor:
        """[N, R], convolutions flattened."""
        return self.lora_B.flatten(1)


class AdapterFolder:
    """A LoRA or DoRA adapter on disk.

    Args:
        folder: in PEFT's format, with weights as safetensors.

    Raises:
        HirankError: files that cannot be read, or lack what the forward needs (see
            `check_adapter`): alpha, rank, magnitudes, one of A and B.
    """

    settings: dict[str, Any]
    """What `adapter_config.json` says."""
    names: list[str]
    """The adapted layers, in the order of their names' numbers."""
    others: dict[str, str]
    """Weights that replace one of the base (`modules_to_save`, trained biases): name, key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / WEIGHTS_FILE
        self.settings = check_adapter(folder)
        if self.settings["peft_type"] != "LORA":
            raise HirankError(
                f"{folder} holds a {self.settings['peft_type']} adapter: give one of LoRA or DoRA."
            )
        with safe_open(self.path, framework="pt") as file:
            keys = list(file.keys())
        self._parts, self.others = _sorted_out(keys)
        self.names = sorted(self._parts, key=_natural)
        self._check()

    def __iter__(self) -> Iterator[AdapterLayer]:
        return (self.layer(name) for name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def dora(self) -> bool:
        return bool(self.settings.get("use_dora"))

    def layer(self, name: str) -> AdapterLayer:
        """Read one layer.

        Raises:
            HirankError: numbers that are not finite, shapes that do not go together, a rank unlike
                that of the settings, a scale that is no number.
        """
        read = {part: self.tensor(key) for part, key in self._parts[name].items()}
        kind: Kind = "embedding" if "lora_embedding_A" in read else "linear"
        prefix = "lora_embedding_" if kind == "embedding" else "lora_"
        A, B = read[prefix + "A"], read[prefix + "B"]
        if A.dim() > 2:
            kind = "conv"
        magnitude = read.get("lora_magnitude_vector")
        _need_shapes(f"{self.path} has in {name}", A, B, magnitude)
        alpha, scale = self._strength(name, A.shape[0])
        return AdapterLayer(
            name=name,
            kind=kind,
            lora_A=A,
            lora_B=B,
            magnitude=None if magnitude is None else magnitude.flatten(),
            bias=read.get("bias"),
            alpha=alpha,
            scale=scale,
        )

    def tensor(self, key: str) -> Tensor:
        """One tensor of the weights file. Raises HirankError if it is not finite."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise HirankError(
                f"{self.path} has numbers in {key} that are not finite: take an earlier "
                "checkpoint, this one is ruined."
            )
        return tensor

    def obstacle(self) -> str | None:
        """Why A, B, m and the scale do not say all about the adapted layers; None if they do."""
        initialised = str(self.settings.get("init_lora_weights", "")).lower()
        if initialised.startswith(_OTHER_BASE):
            return f"init_lora_weights {initialised!r} trains beside a changed base weight"
        found = next((name for name in _OTHER_FORWARD if self.settings.get(name)), None)
        return None if found is None else f"{found} changes what the layers compute"

    def _strength(self, name: str, rank: int) -> tuple[float, float]:
        from hirank.adapters.peft.saving import rank_and_alpha

        patterns = {key: self.settings.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        try:
            said, alpha = rank_and_alpha(SimpleNamespace(**self.settings | patterns), name)
        except (re.error, TypeError, AttributeError) as error:
            raise HirankError(
                f"{self.folder} has a rank_pattern or alpha_pattern that cannot be read ({error}): "
                "write names, or regular expressions of names, and their numbers."
            ) from None
        if said != rank:
            raise HirankError(
                f"{self.path} has rank {rank} in {name}, for which the settings say {said}: set r "
                "or rank_pattern to what was trained."
            )
        return alpha, self._scale(name, alpha, rank)

    def _scale(self, name: str, alpha: Any, rank: int) -> float:
        if not _fits_fp32(alpha):
            raise HirankError(
                f"{self.folder} has alpha {alpha!r} for {name}, which is no strength: write the "
                "number it was trained with."
            )
        return float(alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank))

    def _check(self) -> None:
        if not self.names:
            raise HirankError(f"{self.path} holds no adapted layers; take it from the run again.")
        for name, parts in self._parts.items():
            missing = [b for a, b in _NEEDED.items() if a in parts and b not in parts]
            if not parts.keys() & _NEEDED.keys():
                missing = ["lora_A"]
            if not missing and self.dora and "lora_magnitude_vector" not in parts:
                missing = ["lora_magnitude_vector"]
            if missing:
                raise HirankError(
                    f"{self.path} has no {missing[0]} for {name}; take it from the run again."
                )


def _need_shapes(said: str, A: Tensor, B: Tensor, magnitude: Tensor | None) -> None:
    """Raises HirankError unless B A is a product, and m has a number for each of its rows."""
    names = [("A", A), ("B", B)] + ([] if magnitude is None else [("magnitudes", magnitude)])
    odd = next((name for name, part in names if not part.is_floating_point()), None)
    if odd is not None:
        raise HirankError(f"{said} {odd} that are no floats: take it from the run again.")
    ranks = A.shape[0] if A.dim() else 0, B.shape[1] if B.dim() > 1 else 0
    fits = A.dim() == B.dim() and min(A.dim(), *ranks) > 0 and ranks[0] % ranks[1] == 0
    if not fits or (A.dim() == 2 and ranks[0] != ranks[1]):
        raise HirankError(
            f"{said} A {list(A.shape)} and B {list(B.shape)}, which have no rank in common: take "
            "the adapter from the run again."
        )
    if magnitude is not None and magnitude.numel() != B.shape[0]:
        raise HirankError(
            f"{said} {B.shape[0]} rows and {magnitude.numel()} magnitudes: take the adapter from "
            "the run again."
        )


def _fits_fp32(alpha: Any) -> bool:
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    return is_number and abs(alpha) <= torch.finfo(torch.float32).max  # NaN is not


def _sorted_out(keys: list[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Keys by layer and part, and those of whole weights by their name in the base."""
    layers: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    for key in keys:
        plain = key.removeprefix(PREFIX)
        if (match := _PART.match(plain)) is None:
            others[plain.replace(".base_layer.", ".")] = key
            continue
        part = "bias" if match["end"] == ".bias" else match["part"]
        layers.setdefault(match["layer"], {})[part] = key
    return layers, others


def _natural(name: str) -> list[Any]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", name)]

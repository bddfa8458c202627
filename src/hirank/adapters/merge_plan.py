"""What a merge of files will write, and all that can be refused before it does."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from hirank.adapters.base_files import CONFIG, BaseFolder, Entry
from hirank.adapters.export import CONFIG_FILE
from hirank.adapters.few_bits import check_kind, quantised_layers
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.errors import HirankError

__all__ = ["NEAREST", "MergePlan", "Rounding", "meta_model", "plan_merge"]


class Rounding(NamedTuple):
    """How a merged number becomes one that is stored."""

    dtype: torch.dtype | None = None
    """Of all floating tensors; None: as the base has them."""
    seed: int | None = None
    """Of stochastic rounding to bf16, up or down so that the mean is exact; None: to nearest."""


NEAREST = Rounding()


@dataclass(frozen=True)
class MergePlan:
    """What will be written, checked against both folders."""

    base: BaseFolder
    adapter: AdapterFolder
    rounding: Rounding
    layers: dict[str, str]
    """Key that an adapted layer's weight is written under: name of the layer."""
    turned: frozenset[str]
    """Keys of weights that lie as [K, N]."""
    replaced: dict[str, str]
    """Key: that of the adapter's file whose tensor takes its place."""
    biases: dict[str, str]
    """Key of a bias that `lora_bias` adds to: name of the layer."""
    sources: dict[str, str]
    """Key that is new because a shared weight parts: key of the base it starts from."""
    requantised: frozenset[str]
    """Keys of weights that were held in few bits during training, see `trained_on`."""
    trained_on: str | None
    shards: dict[str, list[Entry]]
    dequantised: bool = True
    """Whether the weights trained on are merged into; False: those of the base's files."""

    def into_original(self) -> "MergePlan":
        """The same, merged into weights that the training did not see."""
        return replace(self, dequantised=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for held in self.shards.values() for entry in held)

    @property
    def unties(self) -> bool:
        return bool(self.sources)


def plan_merge(
    base: BaseFolder,
    adapter: AdapterFolder,
    rounding: Rounding = NEAREST,
    *,
    trained_on: str | None = None,
) -> MergePlan:
    """Everything that can be refused, before a byte is written. Reads no weight of the base.

    Args:
        base, adapter: the folders.
        rounding: how merged numbers are stored.
        trained_on: what the base's linears were quantised to while the adapter was trained, one
            of `few_bits.KINDS`: the adapter is then merged into those weights, dequantised.

    Raises:
        HirankError: names or shapes that do not fit, a base of few bits, an adapter whose files do
            not say all that its layers compute, a layer that no plain weight can hold.
    """
    if (obstacle := adapter.obstacle()) is not None:
        raise HirankError(f"{adapter.folder} cannot be merged from its files: {obstacle}.")
    if (base.folder / CONFIG_FILE).is_file():
        raise HirankError(
            f"{base.folder} holds an {CONFIG_FILE} beside the model, and Transformers would put "
            "that on it: move the adapter to a folder of its own."
        )
    if base.config.get("quantization_config") is not None:
        raise HirankError(
            f"{base.folder} holds weights of few bits, which no merged weight fits into: give the "
            "base in a floating dtype, or make one with dense_copy."
        )
    if trained_on is not None:
        check_kind(trained_on)
    return _Planner(base, adapter, rounding, trained_on).plan()


class _Planner:
    def __init__(
        self,
        base: BaseFolder,
        adapter: AdapterFolder,
        rounding: Rounding,
        trained_on: str | None,
    ) -> None:
        self.base, self.adapter, self.rounding = base, adapter, rounding
        self.trained_on = trained_on
        self.model = meta_model(base)
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self.layers: dict[str, str] = {}
        self.turned: set[str] = set()
        self.replaced: dict[str, str] = {}
        self.biases: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def plan(self) -> MergePlan:
        for name in self.adapter.names:
            self._add_layer(name)
        for name, key in self.adapter.others.items():
            self.replaced[self._key(name)] = key
            _check_whole(name, self.adapter.tensor(key), self.parameters[name])
        return MergePlan(
            self.base,
            self.adapter,
            self.rounding,
            self.layers,
            frozenset(self.turned),
            self.replaced,
            self.biases,
            self.sources,
            frozenset(self._requantised()),
            self.trained_on,
            self._checked(self._shards()),
        )

    def _requantised(self) -> set[str]:
        if self.trained_on is None:
            return set()
        found = (self.base.key_of(f"{name}.weight") for name in quantised_layers(self.model))
        return {key for key in found if key is not None}

    def _checked(self, shards: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        merged = [e for held in shards.values() for e in held if e.key in self.layers]
        odd = next((e for e in merged if not _floats(e.dtype)), None)
        if odd is not None:
            raise HirankError(
                f"{self.base.folder} stores {odd.key} as {odd.dtype}, which no merged weight fits "
                "into: give the base in a floating dtype."
            )
        narrow = next((e for e in merged if e.dtype != torch.bfloat16), None)
        if self.rounding.seed is not None and narrow is not None:
            raise HirankError(
                f"Stochastic rounding is to bfloat16, and {narrow.key} is written as "
                f"{str(narrow.dtype).removeprefix('torch.')}: give --dtype bfloat16."
            )
        return shards

    def _add_layer(self, name: str) -> None:
        from hirank.adapters.peft.operands import turned

        module = self._module(name)
        layer = self.adapter.layer(name)
        key = self._key(f"{name}.weight")
        _check_fit(layer, module, self.parameters[f"{name}.weight"])
        self.layers[key] = name
        if turned(module):
            self.turned.add(key)
        if layer.bias is not None:
            if f"{name}.bias" not in self.parameters:
                raise HirankError(
                    f"{name} has no bias that the adapter's lora_bias could be added to: serve the "
                    "adapter unmerged."
                )
            self.biases[self._key(f"{name}.bias")] = name

    def _module(self, name: str) -> nn.Module:
        try:
            module: nn.Module = self.model.get_submodule(name)
        except AttributeError:
            raise HirankError(
                f"{self.base.folder} ({type(self.model).__name__}) has no layer {name}: is it the "
                "base of this adapter?"
            ) from None
        return module

    def _key(self, name: str) -> str:
        """Where parameter `name` is stored; a shared weight that is changed parts here."""
        if name not in self.parameters:
            raise HirankError(
                f"{self.base.folder} ({type(self.model).__name__}) has no parameter {name}: is it "
                "the base of this adapter?"
            )
        stored = self.base.key_of(name)
        twins = self._twins(name)
        if not twins:
            if stored is None:
                raise HirankError(
                    f"{self.base.folder} stores {name} under another name: serve the adapter "
                    "unmerged."
                )
            return stored
        for each in (name, *twins):
            self._part(each, (name, *twins))
        return stored if stored is not None else name

    def _twins(self, name: str) -> list[str]:
        """Other names of the same weight."""
        own = self.parameters[name]
        return [other for other, p in self.parameters.items() if p is own and other != name]

    def _part(self, name: str, shared: tuple[str, ...]) -> None:
        if self.base.key_of(name) is not None:
            return
        source = next((k for n in shared if (k := self.base.key_of(n)) is not None), None)
        if source is None:
            raise HirankError(
                f"{self.base.folder} stores {name} under another name: serve the adapter unmerged."
            )
        self.sources[name] = source

    def _shards(self) -> dict[str, list[Entry]]:
        shards = {name: [self._written(e) for e in held] for name, held in self.base.shards.items()}
        last = shards[next(reversed(shards))]
        last += [
            self._written(replace(self.base.entries[source], key=key))
            for key, source in self.sources.items()
        ]
        # Wider numbers first, so that each tensor begins at a multiple of its dtype's size.
        return {
            name: sorted(held, key=lambda entry: -entry.dtype.itemsize)
            for name, held in shards.items()
        }

    def _written(self, entry: Entry) -> Entry:
        wanted = self.rounding.dtype
        return entry if wanted is None or not _floats(entry.dtype) else replace(entry, dtype=wanted)


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


_NO_MODEL = (
    StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError,
    ArithmeticError,
)  # fmt: skip
"""What Transformers raises over a config."""


def meta_model(base: BaseFolder) -> Any:
    """The architecture without weights, its shared weights tied."""
    import transformers

    named = base.config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        known = f"{names[0]}, which this Transformers lacks" if names else "no architectures"
        raise HirankError(f"{base.folder / CONFIG} names {known}: give a model it can load.")
    try:
        config = kind.config_class.from_pretrained(base.folder)
        with torch.device("meta"):
            model = kind(config)
    except _NO_MODEL as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HirankError(f"{base.folder / CONFIG} describes no model ({reason}).") from None
    model.tie_weights()
    return model


def _check_whole(name: str, new: Tensor, parameter: Tensor) -> None:
    if new.shape != parameter.shape:
        raise HirankError(
            f"{name} is {list(parameter.shape)} in the base and {list(new.shape)} in the adapter: "
            "is it the base of this adapter?"
        )


def _check_fit(layer: AdapterLayer, module: nn.Module, weight: Tensor) -> None:
    from hirank.adapters.peft.operands import turned

    if getattr(module, "groups", 1) != 1:
        raise HirankError(
            f"{layer.name} is a grouped convolution, whose adapter mixes all groups so that no "
            "grouped weight can hold it: serve the adapter unmerged."
        )
    rows, columns = weight.flatten(1).shape
    if turned(module):
        rows, columns = columns, rows
    found = (layer.B.shape[0], layer.A.shape[1])
    if found != (rows, columns):
        raise HirankError(
            f"{layer.name} has a weight [{rows}, {columns}] in the base and an adapter for "
            f"[{found[0]}, {found[1]}]: is it the base of this adapter?"
        )

"""The base weight under an adapted layer, as the matrix [N, K] that the adapter adds to."""

from functools import cached_property

from torch import Tensor

from hirank.adapters.base_files import BaseFolder
from hirank.adapters.files import AdapterFolder, AdapterLayer
from hirank.adapters.merge_plan import meta_model
from hirank.audit.factors import groups_of
from hirank.errors import HirankError

__all__ = ["BaseWeights"]

_TABLES = ("embed", "wte", "head")


class BaseWeights:
    """Weights of a base folder by the names of an adapter's layers.

    Args:
        folder: the base's.
        adapter: what is to fit on it.

    Raises:
        HirankError: a layer has no weight in the base, one of another shape, or one in few bits.
            All names and shapes are looked at here, before any weight is read.
    """

    def __init__(self, folder: BaseFolder, adapter: AdapterFolder) -> None:
        self._folder = folder
        self._turns = bool(adapter.settings.get("fan_in_fan_out"))
        for layer in adapter:
            self._check(layer)

    def of(self, layer: AdapterLayer) -> Tensor:
        """W as [N, K] in its stored dtype; of a grouped convolution [N, K / groups].

        Raises HirankError if it is not finite.
        """
        weight = self._folder.tensor(self._key(layer))
        if not weight.isfinite().all():
            raise HirankError(
                f"{self._folder.folder} has numbers in {self._key(layer)} that are not finite: "
                "fetch the base model again."
            )
        return weight.flatten(1).T if self._turned(layer) else weight.flatten(1)

    def _key(self, layer: AdapterLayer) -> str:
        found = self._folder.key_of(f"{layer.name}.weight") or self._tied(layer)
        if found is None:
            raise HirankError(
                f"{self._folder.folder} has no weight for the adapted layer {layer.name}: give the "
                "base model that this adapter was trained on."
            )
        return found

    def _tied(self, layer: AdapterLayer) -> str | None:
        """The one table that stands for both ends of a model whose head is its input embedding."""
        if not any(word in layer.name for word in _TABLES):
            return None
        shapes = _shape(layer), _shape(layer)[::-1]
        found = [
            key
            for key, entry in self._folder.entries.items()
            if entry.shape in shapes and any(word in key for word in _TABLES)
        ]
        return found[0] if len(found) == 1 else None

    def _turned(self, layer: AdapterLayer) -> bool:
        """Whether the file has W^T: an embedding's table, or Transformers' Conv1D.

        A square weight's shape does not tell, and a mixed adapter's settings are those of its last
        layer: so the architecture is asked.
        """
        if layer.kind != "linear":
            return layer.kind == "embedding"
        stored, wanted = self._folder.entries[self._key(layer)].shape, _shape(layer)
        if stored != wanted or wanted != wanted[::-1]:
            return stored == wanted[::-1]
        return self._turns if self._turned_names is None else layer.name in self._turned_names

    @cached_property
    def _turned_names(self) -> set[str] | None:
        """Names of all Conv1D; None where Transformers does not know the architecture."""
        from transformers.pytorch_utils import Conv1D

        try:
            modules = dict(meta_model(self._folder).named_modules())
        except HirankError:
            return None
        return {name for name, module in modules.items() if isinstance(module, Conv1D)}

    def _check(self, layer: AdapterLayer) -> None:
        entry, wanted = self._folder.entries[self._key(layer)], _shape(layer)
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise HirankError(
                f"{self._folder.folder} holds {entry.key} as {entry.dtype}, a quantised weight: "
                "give the folder of the base model in bf16, fp16 or fp32."
            )
        flat = (entry.shape[0], _product(entry.shape[1:]))
        if flat != wanted and (layer.kind == "conv" or flat != wanted[::-1]):
            raise HirankError(
                f"{self._folder.folder} holds {entry.key} of shape {_by(entry.shape)}, on which "
                f"the adapter's {_by(wanted)} does not fit: give the base it was trained on."
            )


def _shape(layer: AdapterLayer) -> tuple[int, int]:
    """Of W as [N, K]."""
    return layer.B.shape[0], layer.A.shape[1] // (groups_of(layer) if layer.kind == "conv" else 1)


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))

"""A base model's folder read tensor by tensor, and one written so: Transformers' layout.

    config.json, model.safetensors                                           ->  BaseFolder
    config.json, model.safetensors.index.json, model-0000i-of-0000n.safetensors

One tensor is in memory at a time, whatever the size of a shard: each is read into its place, with
nothing mapped, and written in order behind a header that is known beforehand.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hirank.errors import HirankError
from hirank.files import need_new

__all__ = [
    "CONFIG", "DTYPES", "INDEX", "SINGLE", "BaseFolder", "Entry", "ShardWriter", "is_weights",
    "new_folder",
]  # fmt: skip

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The format's names of dtypes."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor as a header has it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    """Where its bytes begin in the file that it was read from."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class BaseFolder:
    """The weights of a model in Transformers' layout.

    Raises:
        HirankError: no folder, no safetensors in it, a shard that is missing, torn or not what
            the index says, a config that is no JSON.
    """

    shards: dict[str, list[Entry]]
    """Entries by file name, in the order of the files and of what lies in them."""
    config: dict[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise HirankError(f"{folder} is no folder: give the folder of the base model.")
        self.config = _config(folder / CONFIG)
        self.shards = {name: _entries(folder / name) for name in _shard_names(folder)}
        self.where = {entry.key: name for name, held in self.shards.items() for entry in held}
        self.entries = {entry.key: entry for held in self.shards.values() for entry in held}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def key_of(self, name: str) -> str | None:
        """The key that holds parameter `name` of the model: the name, or the only one that is it
        with a prefix more or less, as where a head's model reads the files of its trunk.
        """
        if name in self.entries:
            return name
        found = [
            key for key in self.entries if key.endswith(f".{name}") or name.endswith(f".{key}")
        ]
        return found[0] if len(found) == 1 else None

    def weight(self, name: str) -> Tensor:
        """Parameter `name`, as `model.layers.0.mlp.up_proj.weight`, in its stored dtype.

        Raises:
            HirankError: there is none, or more than one that may be meant.
        """
        key = self.key_of(name)
        if key is None:
            raise HirankError(f"{self.folder} has no {name}: is it the base of this adapter?")
        return self.tensor(key)

    def tensor(self, key: str) -> Tensor:
        """What is stored under `key`, in memory of its own."""
        path, entry = self.folder / self.where[key], self.entries[key]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        try:
            with path.open("rb") as file:
                file.seek(entry.start)
                read = file.readinto(_bytes_of(tensor))
        except OSError as error:
            raise HirankError(f"{path} cannot be read ({error}); fetch it again.") from None
        if read != entry.nbytes:
            raise HirankError(f"{path} ends in the middle of {key}; fetch it again.")
        return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """What a contiguous tensor on the CPU holds; of an empty one, nothing."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data.cast("B") if tensor.numel() else memoryview(bytearray())


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise HirankError(
            f"{path} cannot be read as JSON: give the folder of a Transformers model."
        ) from None
    if not isinstance(config, dict):
        raise HirankError(f"{path} holds no settings: give the folder of a Transformers model.")
    return config


def _shard_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():  # which Transformers looks for first, too
        return [SINGLE]
    if (folder / INDEX).is_file():
        named = _config(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
            raise HirankError(f"{folder / INDEX} has no weight_map; fetch the folder again.")
        missing = sorted(name for name in set(named.values()) if not (folder / name).is_file())
        if missing:
            raise HirankError(
                f"{folder} lacks {missing[0]}, which its index names: fetch it again."
            )
        return sorted(set(named.values()))
    other = next(iter(sorted(folder.glob("*.bin")) or sorted(folder.glob("*.gguf"))), None)
    held = "no model.safetensors" if other is None else f"{other.name}, but no model.safetensors"
    raise HirankError(f"{folder} has {held}: save the model as safetensors first.")


def _entries(path: Path) -> list[Entry]:
    """What a file holds, by its header, in the order of its bytes."""
    try:
        with path.open("rb") as plain:
            start = 8 + int.from_bytes(plain.read(8), "little")
        with safe_open(path, framework="pt") as file:  # checks that the bytes follow without holes
            slices = [(key, file.get_slice(key)) for key in file.offset_keys()]
            entries = []
            for key, part in slices:
                dtype, shape = DTYPES[part.get_dtype()], tuple(part.get_shape())
                entries.append(Entry(key, dtype, shape, start))
                start += entries[-1].nbytes
            return entries
    except (OSError, SafetensorError) as error:
        raise HirankError(f"{path} cannot be read ({error}); fetch it again.") from None
    except KeyError as error:
        raise HirankError(f"{path} holds numbers of type {error}, which nobody knows.") from None


def new_folder(target: Path) -> Path:
    """Where a new folder is to be made, links followed.

    Raises HirankError: `target` holds something or cannot be made, or is the current folder, which
    a rename would take from under whoever stands in it.
    """
    place = target.resolve()
    need_new(place)
    if place == Path.cwd():
        raise HirankError(f"{target} is the current folder: name a new one in it.")
    return place


def is_weights(path: Path) -> bool:
    """Whether a file of a model's folder holds weights, or says where they are."""
    return path.suffix in WEIGHTS or path.name.endswith(".index.json")


class ShardWriter:
    """Writes one safetensors file, tensor by tensor, in the order of `entries`.

    Use it as a context; leaving it with tensors missing raises, and the file is then of no use.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path, self._left = path, list(reversed(entries))
        self._file = path.open("wb")
        header = _header(entries, dict(metadata or {"format": "pt"}))
        self._file.write(len(header).to_bytes(8, "little") + header)

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor; its dtype and shape must be those announced."""
        entry = self._left.pop()
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ValueError(f"{entry.key} was announced as {entry.dtype} {entry.shape}")
        self._file.write(_bytes_of(tensor.detach().cpu().contiguous()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None and self._left:
            raise ValueError(f"{self.path} lacks {self._left[-1].key}")


def _header(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for entry in entries:
        end = start + entry.nbytes
        header[entry.key] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % 8)  # so that the numbers are aligned

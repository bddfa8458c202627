"""Which model is meant: a name in the catalogue, a config.json, a folder, a Hub name that is here.

Nothing is downloaded, and of a folder nothing but config.json is read.
"""

from __future__ import annotations

import json
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hirank.errors import HirankError
from hirank.plan.catalogue import CATALOGUE
from hirank.plan.inventory import Shape, read_shape

__all__ = ["find_config", "find_shape"]


def find_shape(name: str) -> Shape:
    """The sizes of a model.

    Raises:
        HirankError: there is no such model, or its config.json cannot be used.
    """
    config, title = find_config(name)
    return read_shape(config, title)


def find_config(name: str) -> tuple[dict[str, Any], str]:
    """A model's config.json, and what to call the model."""
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return _read(path / "config.json"), path.resolve().name
    if os.path.isfile(path):
        return _read(path), path.resolve().parent.name if path.name == "config.json" else path.stem
    known = _in_catalogue(name)
    if known:
        return dict(CATALOGUE[known].config), known
    cached = _in_cache(name)
    if cached is not None:
        return _read(cached), name
    raise HirankError(_unknown(name))


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".gguf":
        raise HirankError(
            f"{path} is a GGUF file; give the config.json of the model it is made of."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HirankError(
            f"The folder {path.parent} has no config.json, so it is no model."
        ) from None
    except OSError as error:
        raise HirankError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise HirankError(
            f"{path} is not valid JSON, so it is no config.json of a model."
        ) from None
    if not isinstance(found, dict):
        raise HirankError(f"{path} must hold a model's settings by name, as a config.json does.")
    return found


def _in_catalogue(name: str) -> str | None:
    """By its short name or its repository's, in any case; instruct and base have one shape."""
    wanted = _plain(name)
    names = {_plain(key): key for key in CATALOGUE}
    names |= {_plain(entry.repository): key for key, entry in CATALOGUE.items()}
    return names.get(wanted)


def _plain(name: str) -> str:
    short = name.lower().rpartition("/")[2]
    for ending in ("-instruct", "-base", "-pt", "-it"):
        short = short.removesuffix(ending)
    return short.removeprefix("meta-")


def _in_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _unknown(name: str) -> str:
    names = [*CATALOGUE, *(entry.repository for entry in CATALOGUE.values())]
    lowered = {one.lower(): one for one in names}
    near = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    hint = f"the nearest known one is {lowered[near[0]]}" if near else "see hirank plan --models"
    return (
        f"There is no model {name}: no folder, no config.json, not in the Hub's cache here and not "
        f"in the catalogue; {hint}."
    )

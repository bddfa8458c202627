"""One run, as one value: the settings of every part, read from YAML and `--set a.b=c`.

Each part's settings live beside that part; this file only puts them together, and says in one
sentence what is wrong with a file. What comes later wins: defaults, file, `--set`.

Paths that are relative are looked up from the current directory, and if they are not there,
from the folder of the configuration file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hirank.errors import HirankError
from hirank.train import lowrank
from hirank.train.aliases import ALIASES, REFUSED, translated
from hirank.train.data import DataConfig
from hirank.train.evaluate import EvalConfig
from hirank.train.method import MethodConfig
from hirank.train.model import ModelConfig
from hirank.train.optim import OptimConfig
from hirank.train.run import RunConfig
from hirank.train.strict import Strict

__all__ = [
    "ALIASES",
    "TrainConfig",
    "build_config",
    "dump_config",
    "explain_validation",
    "load_config",
    "resolved",
]

# What a section means if it is given as a single value.
SHORTHANDS = {"model": "name", "method": "name", "data": "train"}


class TrainConfig(Strict):
    """Everything that `hirank train` can be told."""

    model: ModelConfig
    """The base model."""

    data: DataConfig
    """What to learn from."""

    method: MethodConfig = MethodConfig()
    """What is trained: an adapter of some kind, or all weights."""

    optim: OptimConfig = OptimConfig()
    """How it is trained."""

    eval: EvalConfig = EvalConfig()
    """How the result is measured."""

    run: RunConfig = RunConfig()
    """Where the run is written, and how often."""


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a configuration file and apply `a.b=c` overrides, whose values are YAML.

    Raises HirankError for a file that cannot be read, an unknown key or a value of a wrong type.
    """
    tree = _spread(_read(path)) if path else {}
    if path:
        tree = _with_paths(tree, path.parent)
    for override in overrides:
        tree = _merge(tree, _spread(_parse_override(override)))
    return build_config(_with_paths(tree, Path(".")))


def build_config(tree: dict[str, Any]) -> TrainConfig:
    """Check a nested dict and make it a TrainConfig, or raise HirankError about the first fault."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise HirankError(explain_validation(error)) from None


def dump_config(config: TrainConfig) -> str:
    """The configuration with every default written out, as YAML that `load_config` reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def resolved(config: TrainConfig) -> TrainConfig:
    """The same settings with those filled in that follow from others."""
    method = config.method
    lr = config.optim.lr or method.method.learning_rate
    if method.method.adapter:
        filled: dict[str, Any] = {"alpha": method.effective_alpha}
    else:
        filled = lowrank.choices(method) if method.method.optimizer else {}
    return config.model_copy(
        update={
            "optim": config.optim.model_copy(update={"lr": lr}),
            "method": method.model_copy(update=filled),
        }
    )


# Reading.


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = _parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HirankError(f"Cannot read the configuration {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise HirankError(f"The configuration {path} is not a text file in UTF-8.") from None
    except YAML_ERRORS as error:
        raise HirankError(f"{path} is not valid YAML: {_yaml_reason(error)}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise HirankError(f"{path} must hold settings by name, such as model: and data:.")
    return tree


YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
"""ValueError: a date, or a number, that there is not. RecursionError: thousands of brackets."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a name may be given once: the second would silently win."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return node


def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _yaml_reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, " if mark else ""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.YAMLError):
        return str(error).split(";")[0]
    return where + (getattr(error, "problem", None) or "cannot be read")


def _parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested dict."""
    name, separator, value = text.partition("=")
    parts = name.strip().split(".")
    if not separator or not all(parts):
        raise HirankError(f"--set {text}: write it as name=value, such as --set optim.lr=1e-4.")
    try:
        tree: Any = _parsed(value)
    except YAML_ERRORS:
        raise HirankError(f"--set {text}: {value!r} is not valid YAML; quote it.") from None
    for part in reversed(parts):
        tree = {part: tree}
    return dict(tree)


def _spread(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace shorthands and other trainers' names by our own."""
    result: dict[str, Any] = {}
    names: dict[tuple[str, ...], str] = {}
    for name, path, value in _settings(translated(tree)):
        if path in names:
            raise HirankError(f"{names[path]} and {name} are the same setting; give it once.")
        names[path] = name
        for part in reversed(path):
            value = {part: value}
        result = _merge(result, value)
    return result


def _settings(tree: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """(name as written, where it belongs, value) of every setting."""
    for key, value in tree.items():
        if key in SHORTHANDS and not isinstance(value, dict):
            yield key, (key, SHORTHANDS[key]), value
        elif key in TrainConfig.model_fields and isinstance(value, dict):
            for name, inner in value.items():
                alias = name in ALIASES and name not in _section_fields(key)
                path = tuple(ALIASES[name].split(".")) if alias else (key, str(name))
                yield f"{key}.{name}", path, inner
        else:
            yield key, tuple(ALIASES.get(key, key).split(".")), value


def _section_fields(section: str) -> Iterable[str]:
    kind: Any = TrainConfig.model_fields[section].annotation
    return list(kind.model_fields)


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`low` with `high` laid over it, at any depth."""
    result = dict(low)
    for key, value in high.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        result[key] = value
    return result


def _with_paths(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of existing files absolute: from here first, else from `folder`."""
    places = {
        ("model", "name"),
        ("model", "tokenizer"),
        ("data", "train"),
        ("data", "eval"),
        ("run", "parent"),
    }
    result = dict(tree)
    for section, key in places:
        part = result.get(section)
        if isinstance(part, dict) and key in part:
            result[section] = part | {key: _absolute(part[key], folder)}
            part = result[section]
    return result


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(item, folder) if isinstance(item, str) else item for item in value]
    if not isinstance(value, str) or not value:
        return value
    for candidate in (Path(value).expanduser(), folder / value):
        if os.path.exists(candidate):  # unlike Path's, False for what is no possible name
            return str(candidate.resolve())
    return value


# Faults, told.


def explain_validation(error: ValidationError) -> str:
    """The first fault of a pydantic error as one sentence; unknown keys come first."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return _explain(faults[0]) + more + "."


def _explain(fault: ErrorDetails) -> str:
    path = [str(part) for part in fault["loc"]]
    name = ".".join(path)
    if fault["type"] == "refused":
        return fault["msg"]
    if fault["type"] == "extra_forbidden" and name in REFUSED:
        return f"{name} is no setting here: {REFUSED[name]}"
    if fault["type"] == "extra_forbidden":
        return f"Unknown setting {name}" + _nearest(path)
    if fault["type"] == "missing":
        return f"The setting {name} is missing; give it in the file or with --set {name}=..."
    reason = fault["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{_setting(path)} is {fault['input']!r}: {reason[:1].lower()}{reason[1:]}"


def _setting(path: list[str]) -> str:
    """The dotted name of a setting, without the parts pydantic adds for unions."""
    return ".".join(path[:2] + [part for part in path[2:] if part.isdigit()])


def _nearest(path: list[str]) -> str:
    """Which known setting was probably meant."""
    known = {
        f"{part}.{key}": key for part in TrainConfig.model_fields for key in _section_fields(part)
    }
    inside = [name for name in known if len(path) > 1 and name.startswith(path[0] + ".")]
    beside = [".".join([path[0], key]) for key in _close(path[-1], (known[n] for n in inside))]
    sections = _close(path[0], TrainConfig.model_fields) if len(path) == 1 else []
    elsewhere = [n for key in _close(path[-1], known.values()) for n in known if known[n] == key]
    found = beside or sections or elsewhere
    if found:
        return f"; the nearest known one is {found[0]}"
    return "; known here: " + ", ".join(inside or TrainConfig.model_fields)


def _close(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)

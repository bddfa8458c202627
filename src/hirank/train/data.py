"""From data files to checked examples, before any model or tokenizer is loaded.

Every row is read and checked; the bad ones are reported together, each with file, line and
reason. The held-out split depends on the rows and the seed, not on their order.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from hirank.errors import HirankError
from hirank.train.formats import FORMATS, Example, Format, detect, known_keys, read
from hirank.train.messages import BadRow, Message, kind, lowered
from hirank.train.rows import Raw, check_file, read_rows
from hirank.train.strict import Strict

__all__ = ["Counts", "DataConfig", "Example", "Examples", "FileCount", "Message", "load_examples"]

SHOWN = 20
"""Bad rows told one by one; the rest is only counted."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


Paths = Annotated[list[Path], BeforeValidator(_listed)]


class DataConfig(Strict):
    """Which rows are learnt, and how they become tokens."""

    train: Annotated[Paths, Field(min_length=1)]
    """Files to learn from (.jsonl, .json, .csv, .parquet): one path or a list."""
    eval: Paths = []
    """Files to evaluate on; without any, a part of the training rows is held out."""
    eval_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the training rows held out when `eval` is empty; 0 holds out none."""
    format: Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt-completion", "query-response", "text"
    ] = "auto"
    """Shape of the rows; auto looks at the first row of each file."""
    columns: dict[str, str] = {}
    """Names of the file's columns for known ones, for instance {"frage": "query"}."""
    system: str | None = None
    """System text for every conversation that has none of its own."""
    skip_bad_rows: bool = False
    """Leave bad rows out and count them, instead of stopping."""
    max_length: int = Field(default=1024, ge=2)
    """Longest example in tokens; with packing also the length of a packed row."""
    overflow: Literal["error", "drop", "truncate"] = "drop"
    """What happens to a longer example: stop, leave it out, or cut its end off."""
    packing: bool = False
    """Put several examples into one row; they do not see each other."""
    train_on_prompt: bool = False
    """Learn every token, instead of the assistant's answers alone."""
    seed: int = 0
    """Chooses the held-out rows."""
    limit: int | None = Field(default=None, ge=1)
    """Train on this many examples at most, the first ones."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Evaluate on this many examples at most, the first ones."""

    @field_validator("columns")
    @classmethod
    def _columns_are_known(cls, columns: dict[str, str]) -> dict[str, str]:
        for name in columns.values():
            if name not in known_keys():
                near = difflib.get_close_matches(name, known_keys(), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name!r} is no known column{hint}")
        return columns


@dataclass(frozen=True)
class FileCount:
    """What one file held."""

    path: Path
    format: str
    rows: int
    bad: int


@dataclass(frozen=True)
class Counts:
    """What was read. `also_in_train` counts evaluation rows that are training rows too."""

    rows: int
    bad: int
    bad_reasons: tuple[str, ...]
    also_in_train: int
    repeated: int
    files: tuple[FileCount, ...]

    def __str__(self) -> str:
        told = [f"{self.rows} rows read"]
        told += [f"{file.path} as {file.format}" for file in self.files]
        told += [f"{self.bad} bad rows left out"] * bool(self.bad)
        told += [f"{self.repeated} training rows are repeats"] * bool(self.repeated)
        told += [f"{self.also_in_train} eval rows are also in train"] * bool(self.also_in_train)
        return ", ".join(told)


@dataclass(frozen=True)
class Examples:
    """Checked rows in file order; `eval` is empty when nothing is held out."""

    train: tuple[Example, ...]
    eval: tuple[Example, ...]
    counts: Counts


@dataclass
class _Read:
    """One file while it is read."""

    path: Path
    form: Format | None = None
    form_place: str = ""
    examples: list[Example] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    rows: int = 0
    unknown: int = 0

    def count(self) -> FileCount:
        name = self.form.name if self.form else "unknown"
        return FileCount(self.path, name, self.rows, len(self.bad))


def load_examples(cfg: DataConfig) -> Examples:
    """Read and check all files of `cfg`.

    Raises `HirankError` with every bad row (the first 20 in words) unless they are skipped,
    and for a file or a dataset without rows.
    """
    for path in (*cfg.train, *cfg.eval):
        check_file(path.expanduser())
    train = [_read_file(path, cfg) for path in cfg.train]
    held = [_read_file(path, cfg) for path in cfg.eval]
    files = [*train, *held]
    _refuse_bad_rows(files, cfg)
    _refuse_unused_columns(files, cfg)
    learnt = [example for file in train for example in file.examples]
    if not learnt:
        raise HirankError(f"No usable training row in {_names(cfg.train)}: all rows are bad.")
    evaluated = [example for file in held for example in file.examples]
    if not cfg.eval:
        learnt, evaluated = _hold_out(learnt, cfg.eval_fraction, cfg.seed)
    learnt, evaluated = learnt[: cfg.limit], evaluated[: cfg.eval_limit]
    return Examples(tuple(learnt), tuple(evaluated), _counts(files, learnt, evaluated))


def _names(paths: list[Path]) -> str:
    return ", ".join(str(path) for path in paths)


# One file.


def _read_file(path: Path, cfg: DataConfig) -> _Read:
    path = path.expanduser()
    file = _Read(path, FORMATS.get(cfg.format), "data.format")
    for raw in read_rows(path):
        file.rows += 1
        where = f"{path}:{raw.place}"
        try:
            file.examples.append(replace(_example(raw, file, cfg), source=where))
        except (BadRow, RecursionError) as reason:
            file.bad.append(f"{where}: {reason}")
    if not file.rows:
        raise HirankError(f"The data file {path} has no rows; put at least one row into it.")
    return file


def _example(raw: Raw, file: _Read, cfg: DataConfig) -> Example:
    if raw.problem:
        raise BadRow(raw.problem)
    if not isinstance(raw.value, dict):
        raise BadRow(f"the row is {kind(raw.value)}, not an object with named columns")
    file.keys.update(_keys(raw))
    renamed = {cfg.columns.get(key, key): raw.value[key] for key in _renamed_last(raw.value, cfg)}
    row = lowered(renamed)
    return _with_system(read(_format_of(row, raw, file), row), cfg.system)


def _renamed_last(row: dict[str, object], cfg: DataConfig) -> list[str]:
    """The row's keys, those of `cfg.columns` last so that they win over their new name."""
    return sorted(row, key=lambda key: key in cfg.columns)


def _format_of(row: dict[str, object], raw: Raw, file: _Read) -> Format:
    """The file's format, set by its first recognised row; another one is a bad row."""
    if file.form is not None and file.form.matches(row):
        return file.form
    found = detect(row)
    if found is None:
        file.unknown += 1
        raise BadRow(f"the keys {', '.join(map(repr, _keys(raw)))} fit no {_wanted(file)}")
    if file.form is not None:
        raise BadRow(
            f"has the format {found.name}, but {file.form_place} makes this file {file.form.name}; "
            "a file holds one format, so give each its own file"
        )
    file.form, file.form_place = found, f"{file.path}:{raw.place}"
    return found


def _keys(raw: Raw) -> list[str]:
    """The keys of a row as the file spells them."""
    return [str(key) for key in raw.value] if isinstance(raw.value, dict) else []


def _wanted(file: _Read) -> str:
    return f"{file.form.name} row" if file.form else "known format"


def _with_system(example: Example, system: str | None) -> Example:
    """`data.system` in front of a conversation that has no system text."""
    if system is None or example.text is not None or example.messages[0].role == "system":
        return example
    return replace(example, messages=(Message("system", system), *example.messages))


# All files.


def _refuse_bad_rows(files: list[_Read], cfg: DataConfig) -> None:
    """Tell every bad row at once: one run, one list to work through."""
    reasons = [reason for file in files for reason in file.bad]
    if not reasons or cfg.skip_bad_rows:
        return
    rows = sum(file.rows for file in files)
    told = [
        f"{len(reasons)} of {rows} rows cannot be used; correct them, or leave them out with "
        "--skip-bad-rows (data.skip_bad_rows=true):"
    ]
    told += [f"  {reason}" for reason in reasons[:SHOWN]]
    if len(reasons) > SHOWN:
        told.append(f"  and {len(reasons) - SHOWN} more")
    raise HirankError("\n".join(told + _accepted(files)))


def _accepted(files: list[_Read]) -> list[str]:
    """The shapes to write, when rows had keys that fit none."""
    forms = {file.form.name if file.form else "" for file in files if file.unknown}
    if not forms:
        return []
    shown = [form for form in FORMATS.values() if "" in forms or form.name in forms]
    told = ["Accepted rows (or name the columns with data.columns):"]
    return told + [f"  {form.name}: {form.shape}" for form in shown]


def _refuse_unused_columns(files: list[_Read], cfg: DataConfig) -> None:
    """A column that no row has is a slip of the pen, not a wish."""
    seen = sorted({key for file in files for key in file.keys})
    for name in cfg.columns:
        if name not in seen:
            raise HirankError(
                f"data.columns renames {name!r}, which no row has; name one of {', '.join(seen)}."
            )


def _hold_out(
    examples: list[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Part `examples` into (train, eval) by a hash of each row's content and the seed.

    So a row's side does not depend on where it stands, and repeats stay on one side. Both
    parts keep the order of the files; one distinct row is left to train in any case.
    """
    sizes = Counter(_digest(example, seed) for example in examples)
    wanted = max(1, round(fraction * len(examples))) if fraction else 0
    chosen: set[str] = set()
    for digest in sorted(sizes)[:-1]:
        if wanted <= 0:
            break
        chosen.add(digest)
        wanted -= sizes[digest]
    parts: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        parts[_digest(example, seed) in chosen].append(example)
    return parts


def _digest(example: Example, seed: int) -> str:
    return hashlib.sha256(repr((seed, example.content)).encode()).hexdigest()


def _counts(files: list[_Read], train: list[Example], held: list[Example]) -> Counts:
    reasons = [reason for file in files for reason in file.bad]
    learnt = {example.content for example in train}
    return Counts(
        rows=sum(file.rows for file in files),
        bad=len(reasons),
        bad_reasons=tuple(reasons[:SHOWN]),
        also_in_train=sum(example.content in learnt for example in held),
        repeated=len(train) - len(learnt),
        files=tuple(file.count() for file in files),
    )

"""Read the rows of a data file, each with the place where it stands.

A row that cannot be read alone (a broken line of a jsonl file) is given back as a problem and
the reading goes on; a file that cannot be read from some point on raises `HirankError`.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hirank.errors import HirankError

__all__ = ["READERS", "Raw", "check_file", "read_rows"]

BOM = b"\xef\xbb\xbf"
SPACE = " \t\n\r"


@dataclass(frozen=True)
class Raw:
    """One row as it stands: `place` is its line number or "row N"; either value or problem."""

    place: str
    value: object = None
    problem: str | None = None


def read_rows(path: Path) -> Iterator[Raw]:
    """Rows of a jsonl, json, csv or parquet file in order; blank lines are no rows."""
    check_file(path)
    try:
        yield from READERS[path.suffix.lower()](path)
    except OSError as error:
        raise HirankError(
            f"The data file {path} cannot be read: {error.strerror or error}."
        ) from error


def check_file(path: Path) -> None:
    """Refuse what is not a readable kind of file, with a way out."""
    try:
        _check_file(path)
    except OSError as error:
        raise HirankError(f"The data file {path} cannot be read: {error.strerror}.") from error


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise HirankError(f"{path} is a folder; name the data files in it{_files_in(path)}.")
    if path.is_symlink() and not os.path.exists(path):
        raise HirankError(f"The data file {path} is a link to nowhere; check what it points to.")
    if not path.exists():
        raise HirankError(f"There is no data file {path}{_nearest(path)}.")
    if path.suffix.lower() not in READERS:
        known = ", ".join(READERS)
        raise HirankError(
            f"The data file {path} has the unknown extension {path.suffix or '(none)'!r}; "
            f"convert it to one of {known}."
        )
    if path.stat().st_size == 0:
        raise HirankError(f"The data file {path} is empty; put at least one row into it.")


def _files_in(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in READERS)
    return f", for instance {folder / names[0]}" if names else " (it holds none)"


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor the folder {path.parent}; check the path"
    names = [p.name for p in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else "; check the path"


def _text(path: Path) -> str:
    """The whole file as text; invalid UTF-8 is an error with its line."""
    data = path.read_bytes().removeprefix(BOM)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise HirankError(f"{path}:{line}: not valid UTF-8; save the file as UTF-8.") from error


# jsonl


def _jsonl(path: Path) -> Iterator[Raw]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            data = line.removeprefix(BOM) if number == 1 else line
            if data.strip():
                yield _json_line(str(number), data.rstrip())


def _json_line(place: str, data: bytes) -> Raw:
    try:
        return Raw(place, json.loads(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        return Raw(place, problem=f"not valid UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return Raw(place, problem=f"not valid JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Raw(place, problem=f"not usable JSON: {error}")


# json


class _Scanner:
    """Walks through JSON text value by value, and knows the line it is on."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.at, self.line, self._counted = 0, 1, 0
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while self.at < len(self.text) and self.text[self.at] in SPACE:
            self.at += 1
        self.line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self.text[self.at : self.at + 1]

    def value(self) -> Raw:
        """Read the value that starts here."""
        self.peek()
        try:
            value, self.at = self._decoder.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.error(f"{error.msg} at column {error.colno}", error.lineno) from error
        except (ValueError, RecursionError) as error:
            raise self.error(str(error)) from error
        return Raw(str(self.line), value)

    def take(self, mark: str) -> bool:
        """Step over `mark` if it is next."""
        if self.peek() != mark:
            return False
        self.at += 1
        return True

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise self.error(f"expected {mark!r}")

    def error(self, reason: str, line: int | None = None) -> HirankError:
        place = f"{self.path}:{line or self.line}"
        return HirankError(f"{place}: not valid JSON: {reason}; correct the file.")


def _json(path: Path) -> Iterator[Raw]:
    """A list of rows, an object with such a list under "data", or objects one after another."""
    scanner = _Scanner(path, _text(path))
    if scanner.peek() == "[":
        yield from _json_list(scanner)
    elif not scanner.peek():
        return
    elif _enter_data(scanner):
        yield from _json_list(scanner)
        _leave_data(scanner)
    else:
        while scanner.peek():
            yield scanner.value()
        return
    if scanner.peek():
        raise scanner.error("something follows the end of the list")


def _json_list(scanner: _Scanner) -> Iterator[Raw]:
    scanner.expect("[")
    if scanner.take("]"):
        return
    yield scanner.value()
    while scanner.take(","):
        yield scanner.value()
    scanner.expect("]")


def _enter_data(scanner: _Scanner) -> bool:
    """Move to the list under the key "data" of the outer object; False if there is none."""
    start = (scanner.at, scanner.line, scanner._counted)
    if scanner.take("{") and scanner.peek() == '"':
        while True:
            key = scanner.value().value
            scanner.expect(":")
            if key == "data" and scanner.peek() == "[":
                return True
            scanner.value()
            if not scanner.take(","):
                break
    scanner.at, scanner.line, scanner._counted = start
    return False


def _leave_data(scanner: _Scanner) -> None:
    while scanner.take(","):
        scanner.value()
        scanner.expect(":")
        scanner.value()
    scanner.expect("}")


# csv


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lift the csv module's limit of 128 KiB a cell while a file is read."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(path: Path) -> Iterator[Raw]:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    with _long_cells():
        header: list[str] = []
        for line, cells in _records(path, reader):
            if header:
                yield _csv_row(line, header, cells)
            else:
                header = _header(path, cells)


def _records(path: Path, reader: Iterator[list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Records with the line each starts on: a quoted cell may go over several lines."""
    while True:
        line = reader.line_num + 1  # type: ignore[attr-defined]
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise HirankError(
                f"{path}:{line}: not valid csv: {error}; correct the file."
            ) from error
        if cells is None:
            return
        if cells:
            yield str(line), cells


def _header(path: Path, cells: list[str]) -> list[str]:
    _columns_once(f"{path}:1", cells)
    return cells


def _columns_once(place: str | Path, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise HirankError(f"{place}: the header names the column {twice[0]!r} twice; rename one.")


def _csv_row(line: str, header: list[str], cells: list[str]) -> Raw:
    if len(cells) != len(header):
        return Raw(line, problem=f"has {len(cells)} cells, but the header has {len(header)}")
    return Raw(line, dict(zip(header, cells, strict=True)))


# parquet


def _parquet(path: Path) -> Iterator[Raw]:
    """Rows are counted from 0, as data frames do."""
    import pyarrow as pa  # type: ignore[import-untyped]  # late: reading settings needs none
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        file = pq.ParquetFile(path)
        _columns_once(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for value in batch.to_pylist():
                yield Raw(f"row {number}", value)
                number += 1
    except (pa.ArrowException, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise HirankError(f"{path}: not a readable parquet file: {reason}.") from error


READERS: dict[str, Callable[[Path], Iterator[Raw]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}

"""Bring the tables of results in README.md, benchmarks/README.md and docs/optim.md up to date.

    python scripts/tables.py [--check] [FILE ...]

--check changes nothing and fails if a table is not what the results files give.
"""

import argparse
import sys
from pathlib import Path

from hirank.bench.tables import filled
from hirank.errors import HirankError

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "docs" / "optim.md"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    parser.add_argument("files", nargs="*", type=Path, default=TEXTS)
    given = parser.parse_args(arguments)
    try:
        stale = [file for file in given.files if update(file, write=not given.check)]
    except HirankError as error:
        print(error, file=sys.stderr)
        return 2
    for file in stale:
        print(f"{file}: {'differs from the results' if given.check else 'brought up to date'}")
    return 1 if stale and given.check else 0


def update(file: Path, *, write: bool) -> bool:
    """Whether the tables of `file` differ from the results; with `write` they are replaced."""
    text = file.read_text(encoding="utf-8")
    new = filled(text, ROOT / "benchmarks" / "results")
    if write and new != text:
        file.write_text(new, encoding="utf-8")
    return new != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

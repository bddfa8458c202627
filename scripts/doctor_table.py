"""Write the table of traps in docs/doctor.md from the doctor's own registry.

    python scripts/doctor_table.py [--check]

--check changes nothing and fails if the table is not current.
"""

import argparse
import sys
from pathlib import Path

from hirank.doctor.registry import TRAPS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
BEGIN, END = "<!-- traps: scripts/doctor_table.py -->\n", "<!-- end of traps -->\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    given = parser.parse_args(arguments)
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if new == text:
        return 0
    if given.check:
        print(f"{PAGE} differs from the registry: run python scripts/doctor_table.py")
        return 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """The page with the table between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def table() -> str:
    """One row a trap: name, level, what happens, fix, source."""
    rows = [("Trap", "Level", "What happens", "Fix", "Reported"), ("---",) * 5]
    rows += [(f"`{t.name}`", t.level, t.title, t.fix, t.source) for t in TRAPS]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

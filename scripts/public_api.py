"""List what each public module of hirank exports, read from its __all__ without importing it.

    python scripts/public_api.py [--write]

A module is public if no part of its name starts with an underscore.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
RECORD = ROOT / "tests" / "public_api.txt"


def main() -> None:
    if "--write" in sys.argv[1:]:
        RECORD.write_text(listing(), encoding="utf-8")
    else:
        print(listing(), end="")


def listing() -> str:
    """One module a line: 'hirank.errors: HirankError'."""
    lines = (f"{module}: {' '.join(names or ['-'])}" for module, names in modules())
    return "\n".join(lines) + "\n"


def modules() -> Iterator[tuple[str, list[str] | None]]:
    """Yield every public module and its sorted __all__, None where it has none.

    A package whose __init__ is only a docstring exports nothing and needs no __all__.
    """
    for file in sorted(SOURCE.rglob("*.py")):
        parts = list(file.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts), exports(ast.parse(file.read_text(encoding="utf-8")))


def exports(tree: ast.Module) -> list[str] | None:
    statements = [node for node in tree.body if not is_docstring(node)]
    for node in statements:
        if isinstance(node, ast.Assign) and any(is_all(target) for target in node.targets):
            return sorted(ast.literal_eval(node.value))
    return None if statements else []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


if __name__ == "__main__":
    main()

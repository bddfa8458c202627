"""House rules that a linter does not know, checked in src/hirank.

    python scripts/house_rules.py [FILE ...]

- print() only in cli/ and bench/cli.py: everything else is handed a console or a log.
- No os.environ, os.getenv or os.putenv: a setting that changes a result is an argument. The one
  exception is launch/process.py, which hands the environment on to the command it starts, with a
  folder in front of PYTHONPATH: nothing of ours reads it.
- No bare except, and none of Exception or BaseException that swallows: a slower path is
  chosen, not fallen into. A handler that raises again, to clean up first, is fine.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "hirank"
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
HANDS_ENVIRONMENT_ON = ("launch", "process.py")
CATCH_ALL = {"Exception", "BaseException"}


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]] or sorted(SOURCE.rglob("*.py"))
    found = [breach for file in files for breach in breaches(file)]
    for breach in found:
        print(breach)
    return 1 if found else 0


def breaches(file: Path) -> Iterator[str]:
    """Yield 'file:line: what to do instead' for every broken rule."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if (advice := advice_on(node, file)) is not None:
            yield f"{file}:{getattr(node, 'lineno', 1)}: {advice}"


def advice_on(node: ast.AST, file: Path) -> str | None:
    if "cli" not in (file.stem, file.parent.name) and calls_print(node):
        return "print() belongs in the command line: take a rich Console as an argument"
    if reads_environment(node) and file.parts[-2:] != HANDS_ENVIRONMENT_ON:
        return "no environment variables in src: make it an argument or a setting"
    if isinstance(node, ast.ExceptHandler) and swallows_everything(node):
        return "name the exceptions you expect, or raise again"
    return None


def calls_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and is_name(node.func, {"print"})


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in ENVIRONMENT for alias in node.names)
    return (
        isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and is_name(node.value, {"os"})
    )


def swallows_everything(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    catches_all = any(kind is None or is_name(kind, CATCH_ALL) for kind in types)
    return catches_all and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


if __name__ == "__main__":
    sys.exit(main())

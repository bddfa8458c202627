"""Who may import whom in hirank. What the table does not list is forbidden."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "hirank"

# part: the parts it may import. errors is open to all; testing is imported by no one.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "quiet": set(),
    "testing": {"kernels"},
    "kernels": set(),
    "adapters": {"kernels"},
    "optim": {"kernels"},
    "page": set(),
    "plan": {"kernels", "adapters", "optim", "page"},
    "audit": {"kernels", "adapters", "optim", "page"},
    "train": {"adapters", "optim", "plan", "audit", "page"},
    "serve": {"adapters", "kernels"},
    "bench": {"kernels", "adapters", "optim"},
    # It uses what any user may; the public API and nothing below it.
    "launch": {"__init__"},
    "doctor": {"adapters", "train"},
    "cli": {
        "__init__",
        "kernels",
        "adapters",
        "optim",
        "plan",
        "audit",
        "page",
        "train",
        "serve",
        "bench",
        "doctor",
        "launch",
    },
    "__main__": {"cli"},
    # The public API gathers layers and optimisers; what needs an extra is imported by its own name.
    "__init__": {"adapters", "doctor", "optim"},
}
OPEN_TO_ALL = {"errors", "files", "quiet", "__version__"}

# Seconds to import, and each needed by a part only.
HEAVY = ("bitsandbytes", "datasets", "fastapi", "gguf", "pandas", "plotly", "pydantic", "trl")
LIBRARIES = ("peft", "torch", "transformers")


def test_every_import_in_src_is_allowed():
    found = [breach for file in sorted(SRC.rglob("*.py")) for breach in breaches(SRC, file)]
    assert found == []


def test_every_part_of_src_is_in_the_table():
    parts = {part_of(SRC, file) for file in SRC.rglob("*.py")}
    assert parts <= set(ALLOWED)


@pytest.mark.parametrize(
    ("file", "code", "caught"),
    [
        ("kernels/a.py", "from hirank.adapters import b", "adapters"),
        ("adapters/a.py", "import hirank.train.data", "train"),
        ("adapters/a.py", "from ..optim.bases import b", "optim"),
        ("optim/a.py", "from hirank import plan", "plan"),
        ("train/a.py", "from hirank.kernels.dora_norm import dora_norm", "kernels"),
        ("train/a.py", "import hirank", "__init__"),
        ("train/a.py", "from hirank import accelerate", "__init__"),
        ("plan/a.py", "def late():\n    import hirank.audit", "audit"),
        ("train/a.py", "from hirank.bench.timing import calls", "bench"),
        ("cli/a.py", "from ..testing import x", "testing"),
        ("serve/a.py", "from hirank.errors import HirankError", None),
        ("adapters/a.py", "from . import gain", None),
        ("adapters/a.py", "from .. import kernels", None),
        ("train/a.py", "from hirank import __version__", None),
        ("cli/a.py", "from hirank.train import loop", None),
    ],
)
def test_the_check_itself(tmp_path: Path, file: str, code: str, caught: str | None):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    found = list(breaches(tmp_path, path))
    assert [breach.split()[-1] for breach in found] == ([caught] if caught else [])


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import hirank", HEAVY + LIBRARIES),
        ("from hirank import GaLoreAdamW", (*HEAVY, "peft", "transformers")),
        ("from hirank import accelerate, diagnose, explain, patch_peft, restore", HEAVY),
        ("import hirank.bench.options, hirank.bench.tables", HEAVY + LIBRARIES),
        ("import hirank.launch.process", (*HEAVY, *LIBRARIES, "rich", "typer")),
        ("import hirank.bench.model, hirank.bench.inference", (*HEAVY, "rich", "typer")),
    ],
)
def test_what_an_import_does_not_load(statement: str, unwanted: tuple[str, ...]):
    # PEFT itself loads the quantisation libraries that are installed, and those may talk
    report = f"print(sorted(set(sys.modules) & set({unwanted!r})))"
    alone = "import peft" if "peft" not in unwanted else "pass"
    control, done = (run_python(f"import sys; {code}; {report}") for code in (alone, statement))
    assert done.stdout == control.stdout
    assert bool(done.stderr) == bool(control.stderr)


def test_importing_the_public_api_computes_nothing_and_needs_no_gpu():
    code = """
import peft, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise SystemExit(f"the import ran {func}")

with Refuse():
    from hirank import accelerate
assert not torch.cuda.is_initialized()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(SRC.parent), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def breaches(root: Path, file: Path) -> Iterator[str]:
    """Yield 'file:line: PART imports OTHER' for every import that the table does not list."""
    part = part_of(root, file)
    allowed = ALLOWED[part] | OPEN_TO_ALL | {part}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for other in sorted(imported_parts(root, file, node) - allowed):
            yield f"{file.relative_to(root)}:{node.lineno}: {part} imports {other}"


def part_of(root: Path, file: Path) -> str:
    """The row of the table: a folder of src/hirank, or one of the modules beside them."""
    return file.relative_to(root).with_suffix("").parts[0]


def imported_parts(root: Path, file: Path, node: ast.AST) -> set[str]:
    """The parts of hirank that one statement imports; `import hirank` is its __init__."""
    if isinstance(node, ast.Import):
        return {part for alias in node.names if (part := second_word(alias.name))}
    if not isinstance(node, ast.ImportFrom):
        return set()
    module = absolute_name(root, file, node)
    if module != "hirank":
        return {second_word(module)} - {None}
    return {name_in_top_level(alias.name) for alias in node.names}


def absolute_name(root: Path, file: Path, node: ast.ImportFrom) -> str:
    """The module of a from-import, with leading dots resolved against the file's place."""
    if not node.level:
        return node.module or ""
    package = ["hirank", *file.relative_to(root).parent.parts]
    parents = package[: len(package) - (node.level - 1)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def second_word(module: str) -> str | None:
    words = module.split(".")
    if words[0] != "hirank":
        return None
    return words[1] if len(words) > 1 else "__init__"


def name_in_top_level(name: str) -> str:
    """`from hirank import NAME`: a part of its own, or something the top level re-exports."""
    return name if name in ALLOWED or name in OPEN_TO_ALL else "__init__"

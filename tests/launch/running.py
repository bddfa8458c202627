"""Starting `hirank run` as a user would, for the tests beside it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCHER = (
    f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import hirank.cli as c; c.main()"
)


def command(*words: object) -> list[str]:
    """`hirank run WORDS`, with hirank out of reach of the command itself."""
    return [sys.executable, "-c", LAUNCHER, "run", *map(str, words)]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return (
        kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes
    )


def run(*words: object, **changes: Any) -> subprocess.CompletedProcess[str]:
    return plain(command(*words), **changes)


def plain(words: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env=environment(**changes))

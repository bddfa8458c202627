"""Results on disk: one JSON object a line, with everything needed to believe and repeat it.

    benchmarks/results/DEVICE/SUITE.jsonl

A line holds one arm under one set of settings: suite, arm, settings, metrics, device, versions,
commit (and whether the tree was dirty), command and date. Lines are only ever added.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hirank import __version__
from hirank.errors import HirankError

if TYPE_CHECKING:
    import torch

    from hirank.bench.session import Result

__all__ = [
    "append",
    "command_line",
    "device_facts",
    "read",
    "records",
    "slug",
    "source_facts",
    "version_facts",
]

_PACKAGES = ("torch", "triton", "transformers", "peft")


def append(folder: Path, suite: str, lines: Iterable[dict[str, Any]]) -> Path:
    """Add `lines` to the suite's file of their device, and return that file."""
    lines = list(lines)
    path = folder / slug(lines[0]["device"]) / f"{suite}.jsonl"
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise HirankError(
            f"Cannot write results to {path} ({error.strerror}): name another folder with --out."
        ) from error
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a results file, oldest first.

    Raises:
        HirankError: no such file, or a line that is not a record.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise HirankError(f"Cannot read the results {path} ({error.strerror}).") from error
    except json.JSONDecodeError as error:
        raise HirankError(f"{path} holds a line that is not JSON ({error}).") from error


def records(
    suite: str, settings: Any, found: Iterable[Result], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record for each result. A model folder is recorded by its name, not by its place."""
    said = asdict(settings)
    for key in ("model", "text"):
        if key in said:
            said[key] = Path(said[key]).name
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return [
        {"suite": suite, "arm": one.arm, "settings": said, "metrics": one.metrics}
        | facts
        | {"date": date}
        for one in found
    ]


def slug(device: dict[str, Any]) -> str:
    """The folder of a device: nvidia-h200, or intel-xeon-processor-2-cores."""
    cores = f" {device['cores']} cores" if device["kind"] == "cpu" else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{device['name']}{cores}".lower()).strip("-")


def device_facts(device: torch.device) -> dict[str, Any]:
    """GPU with driver and power limit, or CPU with its cores."""
    import torch

    if device.type != "cuda":
        return {"kind": "cpu", "name": _cpu_name(), "cores": torch.get_num_threads()}
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    driver, _, limit = _said(query).partition("\n")[0].partition(", ")
    return {
        "kind": "gpu",
        "name": torch.cuda.get_device_name(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "driver": driver or None,
        "power_limit": limit or None,
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def version_facts() -> dict[str, str | None]:
    """Versions of what the numbers depend on; None for what is not installed."""
    versions: dict[str, str | None] = {"hirank": __version__}
    versions["python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def source_facts(commit: str | None) -> dict[str, Any]:
    """Commit of the code and whether files differ from it; `commit` where git cannot tell."""
    here = Path(__file__).parent
    head = _said(["git", "-C", str(here), "rev-parse", "HEAD"]).strip()
    if commit or not head:
        return {"commit": commit, "dirty": None}
    changed = ["git", "-C", str(here), "status", "--porcelain", "--", ".."]
    return {"commit": head, "dirty": bool(_said(changed).strip())}


def _said(command: list[str]) -> str:
    """What a program prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def command_line(arguments: Iterable[str]) -> str:
    """The command to repeat, without folders that exist on one machine only."""
    return " ".join(["python -m hirank.bench", *map(_portable, arguments)])


def _portable(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)

"""Make a virtual environment with hirank in it: the right PyTorch first, then the rest.

    python3 scripts/install.py [--venv .venv] [--extras train,dev]

Standard library only, since nothing is installed yet. Running it again repairs or updates.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_CONSTRAINTS = ROOT / "constraints-cpu.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to make it")
    parser.add_argument("--extras", default="train,dev", help="comma-separated, see pyproject.toml")
    args = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever runs this may have an older one)
        sys.exit(f"hirank needs Python 3.11 or newer, this is {sys.version.split()[0]}.")
    python = make_environment(args.venv.absolute())
    # Old resolvers try one version after another where a new one looks once.
    pip(python, "install", "--upgrade", "pip")
    torch = torch_arguments(python)
    pins = ["-c", str(CONSTRAINTS)]
    if torch[0].endswith("+cpu"):
        pins += ["-c", str(CPU_CONSTRAINTS)]
    pip(python, "install", *pins, *torch)
    pip(python, "install", *pins, "-e", f"{ROOT}[{args.extras}]")


def make_environment(folder: Path) -> Path:
    """Create the environment, or keep a working one, and return its interpreter."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not succeeds([python, "-m", "pip", "--version"]):
        say(f"Creating {folder}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", folder])
        if made.returncode:
            sys.exit("Python could not create a virtual environment: install its venv module.")
    return python


def torch_arguments(python: Path) -> list[str]:
    """What to ask pip for, so that a machine without a GPU does not download CUDA.

    Only on Linux does the package index serve a CUDA build under the plain version.
    """
    version = pinned_version("torch")
    plain, cpu_build = f"torch=={version}", f"torch=={version}+cpu"
    if sys.platform != "linux" or has_nvidia_gpu():
        return [plain]
    if pip_can_see(python, f"{version}+cpu"):
        return [cpu_build]
    if reachable(f"{CPU_INDEX}/torch/"):
        return [cpu_build, "--extra-index-url", CPU_INDEX]
    say(f"No GPU here, but {CPU_INDEX} does not answer: taking the ordinary, much larger PyTorch.")
    return [plain]


def pinned_version(package: str) -> str:
    """The version in constraints.txt."""
    found = re.search(rf"^{package}==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.M)
    if not found:
        sys.exit(f"constraints.txt does not pin {package}: add a line '{package}==VERSION'.")
    return found.group(1)


def has_nvidia_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and succeeds(["nvidia-smi", "-L"])


def pip_can_see(python: Path, version: str) -> bool:
    """Whether the user's own pip configuration already offers this build of PyTorch."""
    command = [python, "-m", "pip", "index", "versions", "torch"]
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    return version in re.split(r"[\s,()]+", listing)


def reachable(url: str) -> bool:
    """Ask once, in a process of its own: a name look-up cannot be timed out from inside."""
    code = f"import urllib.request as u; u.urlopen({url!r}, timeout={PROBE_SECONDS})"
    return succeeds([sys.executable, "-c", code], timeout=PROBE_SECONDS)


def succeeds(command: list[str | Path], timeout: float | None = None) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=timeout).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pip(python: Path, *arguments: str) -> None:
    """Run pip, errors shown; byte-compiling is left to the first import, which needs a fraction."""
    say("pip " + " ".join(arguments))
    quiet = ["--quiet", "--quiet", "--no-compile", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([python, "-m", "pip", arguments[0], *quiet, *arguments[1:]])
    if done.returncode:
        sys.exit(done.returncode)


def say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    main()

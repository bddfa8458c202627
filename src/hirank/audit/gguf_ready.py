"""Whether llama.cpp can make a GGUF file of a model folder, as far as it can be told beforehand."""

import shlex
from pathlib import Path

from hirank.adapters.base_files import BaseFolder
from hirank.errors import HirankError

__all__ = ["conversion", "need_convertible"]

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def need_convertible(base: Path) -> None:
    """Raises HirankError: no tokenizer in the folder, or an architecture that no GGUF is read as.

    What Transformers reads from GGUF is what it knows of llama.cpp's architectures; a newer
    llama.cpp may know more.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if not any((base / name).is_file() for name in TOKENIZERS):
        raise HirankError(
            f"{base} has neither {' nor '.join(TOKENIZERS)}, which a GGUF file needs: add the "
            "model's tokenizer."
        )
    kind = str(BaseFolder(base).config.get("model_type", "")).replace("_", "")
    known = sorted(name for name in GGUF_CONFIG_MAPPING if name not in ("general", "tokenizer"))
    if kind not in {name.replace("_", "") for name in known}:
        raise HirankError(
            f"{base} is a model of type {kind!r}, which is not among the GGUF architectures known "
            f"here ({', '.join(known)}): merge it with 'hirank merge'."
        )


def conversion(folder: Path) -> str:
    """The command, for a shell."""
    place = shlex.quote(str(folder))
    return f"python convert_hf_to_gguf.py {place} --outfile {place}/model.gguf"

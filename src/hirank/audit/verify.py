"""An export is loaded as whoever serves it would, before it takes its place."""

import math
from pathlib import Path
from typing import Any

from hirank.adapters.base_files import BaseFolder
from hirank.audit.served import probe, served

__all__ = ["verified"]


def verified(
    base: Path, source: Path, export: Path, *, trained_on: str | None = None
) -> dict[str, Any]:
    """Load `export` and what it was made of, and compare their logits, if the memory allows it.

    Arguments as of `hirank.audit.served.served`.

    Returns:
        `told`, a sentence, and `distance` where they were compared.

    Raises:
        HirankError: it does not load whole.
    """
    folder = BaseFolder(base)
    if not _is_language_model(folder):
        return {"told": "Not verified: only causal language models are loaded for that."}
    needed, free = _memory_needed(folder, source), _memory_free()
    if free is not None and needed > free:
        return {
            "told": f"Not verified: loading it needs {needed / 1e9:.0f} GB of memory and "
            f"{free / 1e9:.0f} GB are free."
        }
    vocabulary = folder.config.get("vocab_size") or 256
    found = served(base, source, export, probe(int(vocabulary)), trained_on=trained_on)
    return {"distance": found.distance, "told": _told(found.distance)}


def _told(distance: float) -> str:
    if not math.isfinite(distance):
        return "Verified: it loads whole; its logits differ, but the training changed none."
    return (
        f"Verified: it loads whole, and its logits are off by {100 * distance:.2g} % of what the "
        "training changed."
    )


def _is_language_model(base: BaseFolder) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(name in kinds for name in base.config.get("architectures") or [])


def _memory_needed(base: BaseFolder, source: Path) -> int:
    """Bytes of one model in fp32, with an adapter and room to compute."""
    numbers = sum(entry.nbytes // entry.dtype.itemsize for entry in base.entries.values())
    adapter = source / "adapter_model.safetensors"
    return 5 * numbers + (adapter.stat().st_size if adapter.exists() else 0)


def _memory_free() -> int | None:
    """Bytes, where the system says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(found["MemAvailable"]) * 1024 if "MemAvailable" in found else None

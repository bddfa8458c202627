"""What `accelerate` and `patch_peft` can be asked, as a converted layer keeps it."""

from typing import NamedTuple

from hirank.errors import HirankError
from hirank.kernels._backend import BACKENDS

__all__ = ["DROPOUTS", "Options", "options"]

DROPOUTS = ("peft", "single-gemm")


class Options(NamedTuple):
    """How one converted layer computes, and what to call it when something is wrong."""

    backend: str = "auto"
    single_gemm: bool = False
    """Dropout without a second base GEMM: `adapters/layers.py` says what each way means."""
    name: str = "an adapted layer"


def options(backend: str, dropout: str) -> Options:
    """Raises HirankError: a value that does not exist."""
    for argument, value, values in (("backend", backend, BACKENDS), ("dropout", dropout, DROPOUTS)):
        if value not in values:
            raise HirankError(f"{argument} got {value!r}: choose from {', '.join(values)}.")
    return Options(backend, dropout == "single-gemm")

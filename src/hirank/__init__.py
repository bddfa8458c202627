"""hirank: train large models at high quality in little memory.

Public names:

    accelerate(model)   convert a PEFT model's LoRA and DoRA layers in place
    restore(model)      undo it
    explain(model)      which way each layer takes, and why
    patch_peft()        make PEFT create converted layers from now on
    diagnose(model)     traps that a training is about to fall into
    HirankError         bad input, told in one sentence
"""

from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.adapters.peft import accelerate, explain, patch_peft, restore
    from hirank.doctor import diagnose

__version__ = "0.1.0"
__all__ = [
    "HirankError",
    "__version__",
    "accelerate",
    "diagnose",
    "explain",
    "patch_peft",
    "restore",
]


def __getattr__(name: str) -> Any:
    """Import PEFT only when one of its functions is asked for: `import hirank` stays instant."""
    if name in ("accelerate", "explain", "patch_peft", "restore"):
        from hirank.adapters import peft

        return getattr(peft, name)
    if name == "diagnose":
        from hirank.doctor import diagnose

        return diagnose
    raise AttributeError(f"module 'hirank' has no attribute {name!r}")

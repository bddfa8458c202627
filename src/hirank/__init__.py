"""hirank: train large models at high quality in little memory.

Public names:

    accelerate(model)   convert a PEFT model's LoRA and DoRA layers in place
    restore(model)      undo it
    hotswap_adapter(model, folder)
                        other weights in a loaded adapter, DoRA too
    prepare_hotswap(model, rank)
                        the same without compiling again
    explain(model)      which way each layer takes, and why
    patch_peft()        make PEFT create converted layers from now on
    register_quantised_linear(layer_class, dequantize)
                        adapt a class of quantised linear that nobody knew
    GaLoreAdamW, QGaLoreAdamW, Fira, Apollo, ApolloMini
                        train all weights with the optimiser's state in low rank
    diagnose(model)     traps that a training is about to fall into
    HirankError         bad input, told in one sentence
"""

from typing import TYPE_CHECKING, Any

from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.adapters.dequantise import register_quantised_linear
    from hirank.adapters.peft import (
        accelerate,
        explain,
        hotswap_adapter,
        patch_peft,
        prepare_hotswap,
        restore,
    )
    from hirank.doctor import diagnose
    from hirank.optim.presets import Apollo, ApolloMini, Fira, GaLoreAdamW, QGaLoreAdamW

__version__ = "0.1.0"
__all__ = [
    "Apollo",
    "ApolloMini",
    "Fira",
    "GaLoreAdamW",
    "HirankError",
    "QGaLoreAdamW",
    "__version__",
    "accelerate",
    "diagnose",
    "explain",
    "hotswap_adapter",
    "patch_peft",
    "prepare_hotswap",
    "register_quantised_linear",
    "restore",
]


_OF_PEFT = ("accelerate", "explain", "hotswap_adapter", "patch_peft", "prepare_hotswap", "restore")


def __getattr__(name: str) -> Any:
    """Import PEFT or torch only when something that needs it is asked for: this stays instant."""
    if name in _OF_PEFT:
        from hirank.adapters import peft

        return getattr(peft, name)
    if name == "register_quantised_linear":
        from hirank.adapters.dequantise import register_quantised_linear

        return register_quantised_linear
    if name in ("Apollo", "ApolloMini", "Fira", "GaLoreAdamW", "QGaLoreAdamW"):
        from hirank.optim import presets

        return getattr(presets, name)
    if name == "diagnose":
        from hirank.doctor import diagnose

        return diagnose
    raise AttributeError(f"module 'hirank' has no attribute {name!r}")

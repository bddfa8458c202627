"""PEFT stays at the door: every PEFT name, attribute and version difference is in this folder.

`accelerate` turns the LoRA layers of a PEFT model into subclasses of themselves by setting their
`__class__`. Parameters, state-dict keys, configuration and `isinstance` stay as they were, so
saving, loading, optimizers and trainers notice nothing. Whatever a subclass does not support at a
call it hands to PEFT's own forward, and `explain` tells why.

    layer.py     the subclass for linears; embedding.py and conv.py those for the other kinds
    converted.py what they have in common: norms, merge, unmerge
    operands.py  what each kind holds, as matrices
    route.py     which way a layer's next call goes, and why
    options.py   what can be chosen
    check.py     what is wrong with a layer or its input
    convert.py   accelerate, restore
    describe.py  explain
    patch.py     models yet to be made
    mixed.py     an adapter for each sample of a batch
    hotswap.py   other weights in a loaded adapter
    combine.py   one adapter made of several
    saving.py    files that lose nothing
    guard.py     optimizers leave inactive adapters alone
    model.py     the models around converted layers, which offer these
"""

from hirank.adapters.peft.convert import accelerate, restore, unmatched_keys
from hirank.adapters.peft.describe import explain
from hirank.adapters.peft.hotswap import hotswap_adapter, prepare_hotswap
from hirank.adapters.peft.layer import FastLinear
from hirank.adapters.peft.patch import Patch, patch_peft

__all__ = ["FastLinear", "Patch", "accelerate", "explain", "patch_peft", "restore"]
__all__ += ["hotswap_adapter", "prepare_hotswap", "unmatched_keys"]

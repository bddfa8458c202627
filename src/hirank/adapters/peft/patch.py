"""Making PEFT create converted layers itself, for models yet to be made."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from peft import PeftModel
from peft.tuners.lora import layer as peft_lora
from peft.tuners.lora import model as peft_model
from peft.tuners.lora import variants as peft_variants
from peft.tuners.lora.dora import DoraEmbeddingLayer, DoraLinearLayer
from peft.utils import hotswap
from torch import nn

from hirank.adapters.groups import Family
from hirank.adapters.peft.convert import convert, fresh_norm
from hirank.adapters.peft.hotswap import swapping
from hirank.adapters.peft.mixed import MixedBatches
from hirank.adapters.peft.model import convert_models, convert_one
from hirank.adapters.peft.operands import embeds, factors, turned
from hirank.adapters.peft.options import Options, options
from hirank.adapters.peft.quantised import dispatching, may_init, quantised_init
from hirank.adapters.peft.route import foreign_base, plain_tensor

__all__ = ["Patch", "patch_peft"]


_undo: list[tuple[Any, str, Any]] = []
_patches: dict[Any, Options] = {}  # the last one made decides
_families: "weakref.WeakKeyDictionary[Any, Family]" = weakref.WeakKeyDictionary()


class Patch:
    """One wish for converted layers; PEFT is restored when the last one is removed.

    Also a context manager. Where several are in force, the options of the last one made hold.
    """

    def __init__(self, wanted: Options) -> None:
        if not _patches:
            owner = peft_model.LoraModel
            for variant in (peft_variants.DoraLinearVariant, peft_variants.DoraEmbeddingVariant):
                _replace(variant, "init", staticmethod(_fast_init(variant.init)))
            convs = peft_variants._DoraConvNdVariant
            _replace(convs, "init_convd_variant", staticmethod(_fast_conv_init(convs)))
            _replace(owner, "_create_and_replace", _converting(owner._create_and_replace))
            create = staticmethod(dispatching(owner._create_new_module))
            _replace(owner, "_create_new_module", create)
            _replace(PeftModel, "__init__", _converting_model(PeftModel.__init__))
            swap = hotswap.hotswap_adapter_from_state_dict
            _replace(hotswap, "hotswap_adapter_from_state_dict", swapping(swap))
        _patches[self] = wanted

    def remove(self) -> None:
        """Take the wish back. Models made meanwhile stay converted; twice is harmless."""
        _patches.pop(self, None)
        while _undo and not _patches:
            owner, name, old = _undo.pop()
            setattr(owner, name, old)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _replace(owner: Any, name: str, new: Any) -> None:
    _undo.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, new)


def _fast_init(original: Callable[..., None]) -> Callable[..., None]:
    """DoRA's init without the product B A where B is zero, and m kept in fp32."""

    @functools.wraps(original)
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if may_init(module):
            quantised_init(module, adapter_name)
            return
        if not _untrained(module, adapter_name):
            original(module, adapter_name, **kwargs)
            return
        kind = DoraEmbeddingLayer if embeds(module) else DoraLinearLayer
        holder = kind(fan_in_fan_out=turned(module.base_layer))  # type: ignore[no-untyped-call]
        _hold(module, adapter_name, holder)

    return init


def _fast_conv_init(variant: Any) -> Callable[..., None]:
    original = variant.init_convd_variant

    @functools.wraps(original)
    def init(module: Any, adapter_name: str, dora_layer: nn.Module) -> None:
        if not _untrained(module, adapter_name):
            original(module, adapter_name, dora_layer)
            return
        _hold(module, adapter_name, dora_layer)

    return init


def _untrained(module: Any, adapter_name: str) -> bool:
    """Whether B A is known to be zero, so that m is the norm of W."""
    if module.base_layer is not module.get_base_layer() or foreign_base(module) is not None:
        return False
    held = (module.base_layer.weight, *factors(module, adapter_name))
    if any(t.is_meta or not plain_tensor(t) for t in held):
        return False
    return not all(factor.any() for factor in held[1:])


def _hold(module: Any, adapter_name: str, holder: Any) -> None:
    norm = fresh_norm(module, adapter_name)
    rest = module.base_layer.weight.dim() - 2
    holder.weight = nn.Parameter(norm.view(1, -1, *[1] * rest) if rest else norm)
    if not module.lora_magnitude_vector:
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
    module.lora_magnitude_vector[adapter_name] = holder


def _converting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def create_and_replace(
        self: Any,
        lora_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        original(
            self, lora_config, adapter_name, target, target_name, parent, current_key, **kwargs
        )
        made = getattr(parent, target_name)
        if isinstance(made, peft_lora.LoraLayer) and _patches:
            *_, wanted = _patches.values()
            family = _families.setdefault(self, Family())
            convert(made, current_key, wanted, family, just_made=True, again=False)
            convert_one(made)
            convert_one(self)

    return create_and_replace


def _converting_model(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if any(isinstance(module, MixedBatches) for module in self.modules()):
            convert_models(self)

    return init


def patch_peft(*, backend: str = "auto", dropout: str = "peft") -> Patch:
    """Make PEFT itself create converted layers, until the returned patch is removed.

    Besides saving the call of `accelerate`, this is quicker at creation: DoRA's init needs one
    pass over each weight and no product B A, as B is still zero.

        with hirank.patch_peft():
            model = get_peft_model(base, LoraConfig(use_dora=True, ...))

    Args:
        backend, dropout: as in `accelerate`; but as layers are mostly made before they are moved,
            "triton" where it cannot run is an error at the first call.

    Raises:
        HirankError: an option has no such value.
    """
    return Patch(options(backend, dropout))

"""The converted layers over quantised bases: PEFT's classes with hirank's forward.

PEFT has one class for each library. Each gets a subclass here, made when first needed, so that no
library is imported that the model does not use. Merging stays PEFT's: it quantises again, which
loses more than how it is done.
"""

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from peft.tuners.lora import layer as peft_lora
from peft.tuners.lora import variants as peft_variants
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hirank.adapters.dequantise import Packed, is_registered, kind_of
from hirank.adapters.groups import Family
from hirank.adapters.mixed import Run
from hirank.adapters.peft.mixed import MixedBatches
from hirank.adapters.peft.operands import dropout_of
from hirank.adapters.peft.options import Options
from hirank.adapters.peft.quantised_merge import Stored, keep, lay_back, put_back, renew_bias
from hirank.adapters.peft.quantised_route import (
    check_quantised,
    fault_of_quantised,
    known_kind,
    obstacle_of,
)
from hirank.adapters.peft.quantised_route import quantised_present as present
from hirank.adapters.peft.quantised_route import quantised_route as route
from hirank.adapters.peft.route import Known
from hirank.adapters.peft.traced_quantised import in_one_graph
from hirank.adapters.quantised import QuantisedAdapter, composed_quantised, owned_quantised
from hirank.adapters.quantised_norms import QuantisedNorms, Watch
from hirank.adapters.traced_handles import handle_for
from hirank.errors import HirankError

__all__ = ["QuantisedLayer", "RegisteredLinear", "convert_quantised", "dispatching", "fast_class"]
__all__ += ["base_norm_of", "may_init", "quantised_init", "restore_quantised"]

_STOCK = {
    "FastLinear4bit": ("peft.tuners.lora.bnb", "Linear4bit"),
    "FastLinear8bitLt": ("peft.tuners.lora.bnb", "Linear8bitLt"),
    "FastHqqLinear": ("peft.tuners.lora.hqq", "HqqLoraLinear"),
    "FastTorchaoLinear": ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
}


class QuantisedLayer(MixedBatches):
    """What hirank does for a LoRA layer of PEFT's over a quantised linear."""

    _hirank_norms: dict[str, QuantisedNorms]
    _hirank_watch: Watch  # the norms of all such layers of its model
    _hirank_stored: Stored | None  # the base while adapters are merged into it
    _hirank_options: Options
    _hirank_known: Known | None = None  # the last route, for as long as it holds
    _hirank_handle: Tensor | None = None  # by which compiled code finds it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hirank_handle = handle_for(self)  # a copy's own

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # adapter_names, aLoRA offsets, or a base layer with more arguments
            return self._by_peft(x, *args, **kwargs)
        try:
            if not torch.compiler.is_compiling():
                return _computed(self, x)
            y = in_one_graph(self, x)
            if y is None and _is_left_to_peft(self):
                return self._by_peft(x)
            return cast(Tensor, _outside_graphs(self, x)) if y is None else y
        except (ValueError, RuntimeError, IndexError) as error:
            fault = fault_of_quantised(self, x)
            if fault is None:
                raise
            raise fault from error

    def _by_peft(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return y

    def _hirank_obstacle(self, names: list[str]) -> str | None:
        return obstacle_of(self, names)

    def _hirank_turn(self) -> None:
        self._hirank_watch.turn()

    def _hirank_run(self, x: Tensor) -> Run:
        layer: Any = self
        packed = Packed(layer.base_layer, known_kind(layer), x)
        backend = self._hirank_options.backend

        def run(rows: Tensor | None, name: str | None) -> Tensor:
            own = x if rows is None else x[rows]
            adapters = [] if name is None else [_adapter(layer, name)]
            return composed_quantised(own, packed, adapters, backend)

        return run

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's; `unmerge` is then exact."""
        layer: Any = self
        lay_back(layer.base_layer)
        stored = self._hirank_stored if layer.merged else keep(layer)
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)  # type: ignore[misc]
        if stored is not None and layer.merged:
            renew_bias(layer, stored)
            self._hirank_stored = stored

    def unmerge(self) -> None:
        """Puts back the very weight that was stored before (kept meanwhile)."""
        if self._hirank_stored is None:  # merged before the layer was converted
            lay_back(cast(Any, self).base_layer)
            super().unmerge()  # type: ignore[misc]
            return
        put_back(self, self._hirank_stored)
        self._hirank_stored = None

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)  # type: ignore[misc]
        self._hirank_norms.pop(adapter_name, None)

    def norms_of(self, name: str) -> QuantisedNorms:
        """The norms of one adapter."""
        if name not in self._hirank_norms:
            beside = next(iter(self._hirank_norms.values()), None)
            self._hirank_norms[name] = QuantisedNorms(self._hirank_watch, beside)
        norms = self._hirank_norms[name]
        if norms.watch is not self._hirank_watch:  # new, or a copy made with its layer
            norms.watch = self._hirank_watch
            norms.watch.join(norms)
        return norms


class RegisteredLinear(QuantisedLayer, peft_lora.Linear):
    """LoRA and DoRA over a layer of a class that was registered. Made by `patch_peft` only."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        self.__dict__.update(_hirank_norms={}, _hirank_watch=Watch(), _hirank_options=Options())
        self.__dict__["_hirank_stored"] = None
        super().__init__(base_layer, adapter_name, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        for names in (("in_features", "out_features"), ("infeatures", "outfeatures")):
            if all(hasattr(module, name) for name in names):
                return int(getattr(module, names[0])), int(getattr(module, names[1]))
        kind = kind_of(module)
        assert kind is not None
        n, k = kind.weight(module, torch.float32).shape
        return k, n

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> Any:
        variant: Any = super().resolve_lora_variant(config=config, **kwargs)
        if type(variant) is peft_variants.DoraLinearVariant:
            variant.init = quantised_init  # type: ignore[method-assign]
        return variant

    def _by_peft(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = route(self)
        idle = self.disable_adapters or not present(self)
        if found.tier == "peft" and _has_dora(self) and not idle:
            raise HirankError(
                f"{self._hirank_options.name} is over {type(self.base_layer).__name__}, which only "
                f"hirank computes with DoRA, and {found.reason}: take that away, or use LoRA."
            )
        return super()._by_peft(x, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: only the library that made the layer could quantise it again."""
        raise HirankError(
            f"{self._hirank_options.name} is over {type(self.base_layer).__name__}, into which "
            "nothing can be merged: merge into the model that was quantised, or keep the adapter."
        )


class _TorchaoLayer(QuantisedLayer):
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, but not for DoRA, which PEFT would merge as if it were LoRA."""
        layer: Any = self
        names = layer.active_adapters if adapter_names is None else adapter_names
        if any(name in layer.lora_variant for name in names):
            raise HirankError(
                f"{self._hirank_options.name} has a torchao weight, into which PEFT merges DoRA "
                "without its magnitude: merge into the model that was quantised instead."
            )
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


def _is_left_to_peft(layer: Any) -> bool:
    """Whether a compiler is to see PEFT's forward, which its library may compile."""
    return not _has_dora(layer) or route(layer).tier == "peft"


def _has_dora(layer: Any) -> bool:
    return any(name in layer.lora_variant for name in present(layer))


def _known(layer: Any) -> Known:
    """The route and the adapters of this call: asked for anew only where something changed.

    What a library keeps beside its weight is looked at in any case.
    """
    known: Known | None = layer._hirank_known
    base = layer.base_layer
    if known is None or not known.holds(layer) or known_kind(layer).obstacle(base) is not None:
        found = route(layer)
        known = layer._hirank_known = Known(layer, _adapters, found)
    return known


def _adapters(layer: Any, names: list[str]) -> list[QuantisedAdapter]:
    return [_adapter(layer, name) for name in names]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_graphs(layer: Any, x: Tensor) -> Tensor:
    return _computed(layer, x)


def _computed(layer: Any, x: Tensor) -> Tensor:
    kind, known = known_kind(layer), _known(layer)
    if known.tier == "peft":
        y: Tensor = layer._by_peft(x)
        return y
    packed = Packed(known.base, kind, x)
    if known.tier == "owned":
        return owned_quantised(x, packed, known.adapters[0], known.backend)
    return composed_quantised(x, packed, known.adapters, known.backend)


def _adapter(layer: Any, name: str) -> QuantisedAdapter:
    dora = name in layer.lora_variant
    return QuantisedAdapter(
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.lora_magnitude_vector[name].weight if dora else None,
        layer.scaling[name],
        dropout_of(layer, name),
        layer.norms_of(name) if dora else None,
        layer._hirank_options.single_gemm,
    )


# The classes.


def __getattr__(name: str) -> type:  # so that pickle finds them, too
    if name not in _STOCK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name)


@functools.cache
def _made(name: str) -> type:
    module, stock = _STOCK[name]
    base = getattr(importlib.import_module(module), stock)
    ours = _TorchaoLayer if name == "FastTorchaoLinear" else QuantisedLayer
    parts = {"__module__": __name__, "__qualname__": name, "__doc__": f"`{stock}`, by hirank."}
    return type(name, (ours, base), parts)


def fast_class(layer: Any) -> type | None:
    """The converted class for a layer of PEFT's over a quantised base that hirank knows."""
    for name, (module, stock) in _STOCK.items():
        if (type(layer).__module__, type(layer).__qualname__) == (module, stock):
            return None if kind_of(layer.base_layer) is None else _made(name)
    return None


# Converting, and back.

_watches: "weakref.WeakKeyDictionary[Family, Watch]" = weakref.WeakKeyDictionary()


def convert_quantised(
    layer: Any, name: str, wanted: Options, family: Family, *, just_made: bool, again: bool
) -> bool:
    """As `convert`, for layers over quantised bases; whether it is one."""
    found = fast_class(layer)
    if found is None and not isinstance(layer, QuantisedLayer):
        return False
    if found is not None:
        layer.__class__, layer._hirank_norms, layer._hirank_stored = found, {}, None
        layer._hirank_handle = handle_for(layer)
        _mend(layer.base_layer)
    layer._hirank_watch, layer._hirank_known = _watches.setdefault(family, Watch()), None
    if found is not None or again or isinstance(layer, RegisteredLinear):
        layer._hirank_options = wanted._replace(name=name)
    for norms in layer._hirank_norms.values():
        norms.clear()
    if just_made or layer.merged or kind_of(layer.base_layer) is None:
        return True
    check_quantised(name, layer, wanted.backend)
    for adapter in layer.lora_variant:
        _fresh_magnitude(name, layer, adapter)
    return True


def _mend(base: Any) -> None:
    """PEFT's DoRA makes an 8-bit layer that was called before forget its row scales."""
    weight: Any = getattr(base, "weight", None)
    state: Any = getattr(base, "state", None)
    if type(weight).__name__ != "Int8Params" or state is None:
        return
    if weight.SCB is None and state.SCB is not None:
        weight.CB = None  # else the next call would take "no scales" from the weight


def _fresh_magnitude(where: str, layer: Any, name: str) -> None:
    """m of an untrained adapter is the norm itself, in fp32, so that g = 1 exactly.

    PEFT rounds it to the dtype of the weight before quantisation.
    """
    if name not in layer.lora_magnitude_vector:
        return  # of another kind
    magnitude, B = layer.lora_magnitude_vector[name].weight, layer.lora_B[name].weight
    if known_kind(layer).obstacle(layer.base_layer) or magnitude.is_meta or B.is_meta:
        return
    if magnitude.dtype in (torch.bfloat16, torch.float16):
        magnitude.data = magnitude.data.float()
    if B.any():
        return
    norm = base_norm_of(layer, name)
    if not torch.isfinite(norm).all():
        raise HirankError(
            f"{where} has NaN or infinity in its base weight: load the base model again."
        )
    if torch.allclose(magnitude.detach().to(norm), norm, rtol=_SLACK, atol=1e-12):
        magnitude.data = norm.to(device=magnitude.device, dtype=magnitude.dtype)


def base_norm_of(layer: Any, name: str) -> Tensor:
    """||W|| of a converted layer per row, [N] fp32, kept with the norms of this adapter."""
    norms: QuantisedNorms = layer.norms_of(name)
    return norms.base_norm(_packed(layer))


_SLACK = 2.0**-7  # what rounding to bf16 may have moved m by


def _packed(layer: Any) -> Packed:
    kind = known_kind(layer)
    dtype = kind.norm_dtype(layer.base_layer) or torch.float32
    return Packed(layer.base_layer, kind, torch.empty(0, layer.in_features, dtype=dtype))


def quantised_init(module: Any, adapter_name: str, **kwargs: Any) -> None:
    """DoRA's init over a quantised base: m is the norm, in fp32, of one dequantisation."""
    A, B = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
    holder = DoraLinearLayer(fan_in_fan_out=False)  # type: ignore[no-untyped-call]
    norms, packed = QuantisedNorms(), _packed(module)
    if B.any():
        norm = norms.norm(packed, A, B, module.scaling[adapter_name])
    else:
        norm = norms.base_norm(packed)
    holder.weight = nn.Parameter(norm.to(A.device))
    if not module.lora_magnitude_vector:
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
    module.lora_magnitude_vector[adapter_name] = holder


def may_init(layer: Any) -> bool:
    """Whether `quantised_init` serves a layer."""
    base = layer.base_layer
    kind = kind_of(base)
    return kind is not None and kind.obstacle(base) is None and not kind.stored(base)[0].is_meta


def dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's choice of a class for a target, knowing the classes that were registered."""

    @functools.wraps(original)
    def create(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        base: Any = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if is_registered(base):
            return RegisteredLinear(target, adapter_name, config=lora_config, **kwargs)
        try:
            return original(lora_config, adapter_name, target, **kwargs)
        except (ValueError, NotImplementedError) as error:
            if not _refuses_the_class(base, str(error)):
                raise
            kind = f"{type(base).__module__}.{type(base).__qualname__}"
            raise HirankError(
                f"PEFT refuses to adapt a {kind} ({str(error).splitlines()[0][:120]}): if it is a "
                "quantised linear, tell hirank.register_quantised_linear how to dequantise it."
            ) from error

    return create


def _refuses_the_class(base: nn.Module, said: str) -> bool:
    """Whether PEFT would adapt `base` if it knew its class better, rather than with less asked."""
    plain = type(base).__module__.startswith("torch.nn.") or type(base) is Conv1D
    return not plain and ("does not support DoRA" in said or "is not supported" in said)


def restore_quantised(layer: Any) -> bool:
    """Make a converted layer PEFT's own again; whether it was one."""
    name = type(layer).__name__
    if not isinstance(layer, QuantisedLayer) or name not in _STOCK:
        return False
    module, stock = _STOCK[name]
    layer.__class__ = getattr(importlib.import_module(module), stock)
    for key in [key for key in vars(layer) if key.startswith("_hirank_")]:
        delattr(layer, key)
    return True

"""What converted layers of every kind have in common: norms, adapters, merge and unmerge."""

import functools
import warnings
import weakref
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from hirank.adapters.gain import NormCache, base_norm
from hirank.adapters.grouped import GroupedNormCache, GroupedNorms
from hirank.adapters.groups import Family
from hirank.adapters.layers import Adapter, Norms
from hirank.adapters.merge import Increment, merge_into
from hirank.adapters.peft.check import check_backend_of, check_shapes
from hirank.adapters.peft.mixed import MixedBatches
from hirank.adapters.peft.operands import (
    as_matrix,
    dropout_of,
    embeds,
    factors,
    groups_of,
    magnitude_of,
    matrices_of,
    norm_inputs,
    present,
)
from hirank.adapters.peft.options import Options
from hirank.adapters.peft.route import Known, adapter_obstacle, base_obstacle, route
from hirank.adapters.traced import TracedNorms
from hirank.adapters.traced_handles import handle_for
from hirank.adapters.viewed_norms import ViewedNormCache, as_they_lie
from hirank.kernels.grouped_norm import grouped_norm

__all__ = ["Converted", "adapters_of", "fresh_norm", "norms_of", "one_of", "way_of"]
__all__ += ["traced_adapter"]


class Converted(
    MixedBatches, nn.Module
):  # a module, or an object of PEFT's class could not become one
    """Stands before PEFT's class in the layers that `accelerate` makes."""

    _hirank_known: "Known | None"  # the last route, for as long as it holds
    _hirank_norms: dict[str, NormCache]
    _hirank_family: Family  # the norms of all layers of its model
    _hirank_base: Tensor | None  # the base weight while adapters are merged into it
    _hirank_options: Options
    _hirank_handle: Tensor  # by which compiled code finds it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hirank_handle = handle_for(self)  # a copy's own
        for name in list(self._hirank_norms):
            norms_of(self, name)  # a copy's own

    def _hirank_obstacle(self, names: list[str]) -> str | None:
        reasons = (base_obstacle(self), *(adapter_obstacle(self, name) for name in names))
        return next((reason for reason in reasons if reason is not None), None)

    def _hirank_turn(self) -> None:
        self._hirank_family.turn()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, but accumulated in fp32 and rounded once; `unmerge` is then exact."""
        layer, stock = cast(Any, self), cast(Any, super())
        names = check_adapters_to_merge(layer, adapter_names)
        held = layer.lora_embedding_A if embeds(layer) else layer.lora_A
        names = [name for name in names if name in held]
        if not names:
            return
        if self._hirank_base is None and layer.merged:
            stock.merge(safe_merge, names)
            return
        everything = [*layer.merged_adapters, *names]
        if groups_of(layer) > 1 or _obstructed(layer, everything):
            if layer.merged:
                self.unmerge()
            stock.merge(safe_merge, everything)
            return
        _merge(layer, everything, safe_merge)

    def unmerge(self) -> None:
        """Puts back the very weight that was there before (kept meanwhile, so it takes memory)."""
        if self._hirank_base is None:
            cast(Any, super()).unmerge()
            return
        layer: Any = self
        weight = layer.get_base_layer().weight
        weight.data = self._hirank_base.to(device=weight.device, dtype=weight.dtype)
        self._hirank_base = None
        layer.merged_adapters.clear()

    def delete_adapter(self, adapter_name: str) -> None:
        cast(Any, super()).delete_adapter(adapter_name)
        self._hirank_norms.pop(adapter_name, None)


def _obstructed(layer: Any, names: list[str]) -> bool:
    return base_obstacle(layer) is not None or any(adapter_obstacle(layer, n) for n in names)


def _merge(layer: Any, names: list[str], safe_merge: bool) -> None:
    weight = layer.get_base_layer().weight
    source = weight.data if layer._hirank_base is None else layer._hirank_base
    adapters = [(norm_inputs(layer, name), magnitude_of(layer, name)) for name in names]
    parts = [
        Increment(A, B, magnitude, layer.scaling[name])
        for name, ((_, A, B), magnitude) in zip(names, adapters, strict=True)
    ]
    merged = torch.empty_like(source)
    rows = as_matrix(layer, merged)
    merge_into(rows, as_matrix(layer, source), parts)
    if rows.data_ptr() != merged.data_ptr():  # of a layout that has no such view
        merged = rows.view(source.shape)
    if safe_merge and not torch.isfinite(merged).all():
        raise ValueError(
            f"NaNs detected in the merged weights. The adapter {names[-1]} seems to be broken"
        )
    layer._hirank_base = source
    weight.data = merged
    layer.merged_adapters[:] = names


def adapters_of(layer: Any, names: list[str], *, traced: bool = False) -> list[Adapter]:
    """The adapters as they stand at this call, checked; A, B and magnitude as they lie.

    Raises:
        HirankError: shapes that do not fit; Triton was asked for and cannot run here.
    """
    if not traced:
        settings: Options = layer._hirank_options
        check_shapes(settings.name, layer, names)
        check_backend_of(settings.name, layer, settings.backend)
    return [_adapter(layer, name, traced) for name in names]


def one_of(layer: Any, name: str | None) -> list[Adapter]:
    """One adapter, or none, for part of a mixed batch."""
    if name is None:
        return []
    return adapters_of(layer, [name], traced=torch.compiler.is_compiling())


def way_of(layer: Any) -> tuple[Any, list[Adapter], str] | None:
    """The base layer, its adapters and the backend for a plain call; None where PEFT is to run."""
    if torch.compiler.is_compiling():  # nothing kept may enter a graph
        if route(layer).tier == "peft":
            return None
        adapters = adapters_of(layer, present(layer), traced=True)
        return layer.base_layer, adapters, layer._hirank_options.backend
    known: Known | None = layer._hirank_known
    if known is None or not known.holds(layer):
        known = layer._hirank_known = Known(layer, adapters_of)
    return None if known.tier == "peft" else (known.base, known.adapters, known.backend)


def traced_adapter(layer: Any, name: str, scaled: bool) -> Adapter:
    """One adapter for a compiler; not `scaled`: with a scale of 1, and no look at its own."""
    return _adapter(layer, name, True, scaled)


def _adapter(layer: Any, name: str, traced: bool, scaled: bool = True) -> Adapter:
    dora = name in layer.lora_variant
    magnitude = layer.lora_magnitude_vector[name].weight if dora else None  # no view: it is kept
    if not traced and magnitude is not None:
        _warn_half_magnitude(magnitude)
    norms: Norms | None = None
    if magnitude is not None:
        norms = _traced_norms(layer) if traced else norms_of(layer, name)
    return Adapter(
        *factors(layer, name),
        magnitude,
        layer.scaling[name] if scaled else 1.0,
        dropout_of(layer, name),
        norms,
        layer._hirank_options.single_gemm,
    )


def _traced_norms(layer: Any) -> Norms:
    groups = groups_of(layer)
    return GroupedNorms(groups) if groups > 1 else TracedNorms()


def norms_of(layer: Any, name: str) -> NormCache:
    """The norms of one adapter, made where there are none."""
    norms: NormCache | None = layer._hirank_norms.get(name)
    if norms is None or norms.owner() is not layer:  # new, or a copy made with its layer
        norms = layer._hirank_norms[name] = _new_norms(layer, name)
    return norms


def _new_norms(layer: Any, name: str) -> NormCache:
    owner = weakref.ref(layer)
    source, groups = functools.partial(_source, owner, name), groups_of(layer)
    made_for, turn = (source, owner, layer._hirank_family), matrices_of(layer)
    if groups > 1:
        return GroupedNormCache(*made_for, turn=turn, groups=groups)
    if turn is as_they_lie and not embeds(layer):  # a linear: nothing to turn
        return NormCache(*made_for)
    return ViewedNormCache(*made_for, turn=turn)


def fresh_norm(layer: Any, name: str) -> Tensor:
    """The norm of a layer whose adapter is untrained, to the bit as its forward computes it."""
    weight, A, B = norm_inputs(layer, name)
    groups = groups_of(layer)
    if groups > 1:
        return grouped_norm(weight, A, torch.zeros_like(B), scale=1.0, groups=groups)
    return base_norm(weight)


def _source(owner: "weakref.ref[Any]", name: str) -> tuple[Tensor, Tensor, Tensor, float] | None:
    """What the norm of an adapter depends on; None while its layer does not run it.

    None, too, where that is not a view of the weights: whoever keeps it would not see them change.
    """
    layer = owner()
    if layer is None or name not in layer.lora_variant:
        return None
    known = layer.__dict__.get("_hirank_norms")
    if known is None:  # PEFT's own again
        return None
    if name not in layer.active_adapters and name not in layer._hirank_mixed:
        return None
    norms, held = known.get(name), (layer.base_layer.weight, *factors(layer, name))
    viewed = isinstance(norms, ViewedNormCache)
    found = norms.views(*held) if viewed else norm_inputs(layer, name)
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(found, held, strict=True)):
        return None
    return *found, layer.scaling[name]


def _warn_half_magnitude(magnitude: Tensor) -> None:
    half = magnitude.dtype in (torch.bfloat16, torch.float16)
    if half and magnitude.requires_grad and torch.is_grad_enabled():
        warnings.warn(
            f"lora_magnitude_vector is trained in {magnitude.dtype}, where most updates round to "
            "zero and DoRA decays to LoRA: keep it in float32.",
            stacklevel=5,
        )

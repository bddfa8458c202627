"""The converted layer: PEFT's `lora.Linear` with hirank's forward, merge and unmerge."""

import functools
import warnings
import weakref
from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from hirank.adapters.gain import NormCache
from hirank.adapters.groups import Family
from hirank.adapters.layers import Adapter, composed_forward, owned_forward
from hirank.adapters.merge import Increment, merge_into
from hirank.adapters.peft.check import check_backend_of, check_shapes, fault_of_call
from hirank.adapters.peft.options import Options
from hirank.adapters.peft.route import Known, adapter_obstacle, base_obstacle, present, route
from hirank.adapters.traced import TracedNorms, traced_linear

__all__ = ["FastLinear", "magnitude_of", "norms_of"]


class FastLinear(peft_lora.Linear):
    """PEFT's `lora.Linear` over `nn.Linear`, computed by hirank. Made by `accelerate` only."""

    _hirank_known: "Known | None"  # the last route, for as long as it holds
    _hirank_norms: dict[str, NormCache]
    _hirank_family: Family  # the norms of all layers of its model
    _hirank_base: Tensor | None  # the base weight while adapters are merged into it
    _hirank_options: Options

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # adapter_names, aLoRA offsets, or a base layer with more arguments
            return super().forward(x, *args, **kwargs)
        if torch.compiler.is_compiling():
            found = _traced_forward(self, x)
            return super().forward(x) if found is None else found
        known = self._hirank_known
        try:
            if known is None or not known.holds(self):
                known = self._hirank_known = Known(self, _adapters)
            weight, bias, adapters = known.weight, known.bias, known.adapters
            if known.tier == "owned":
                return owned_forward(x, weight, bias, adapters[0], known.backend)
            if known.tier == "peft":
                return super().forward(x)
            return composed_forward(x, known.base, weight, bias, adapters, known.backend)
        except (ValueError, RuntimeError, IndexError) as error:
            fault = fault_of_call(self, x)
            if fault is None:
                raise
            raise fault from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in list(self._hirank_norms):
            norms_of(self, name)  # a copy's own

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, but accumulated in fp32 and rounded once; `unmerge` is then exact."""
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        if self._hirank_base is None and self.merged:
            return super().merge(safe_merge, names)
        everything = [*self.merged_adapters, *names]
        if any(adapter_obstacle(self, name) for name in everything) or base_obstacle(self):
            if self.merged:
                self.unmerge()
            return super().merge(safe_merge, everything)
        _merge(self, everything, safe_merge)

    def unmerge(self) -> None:
        """Puts back the very weight that was there before (kept meanwhile, so it takes memory)."""
        if self._hirank_base is None:
            return super().unmerge()
        weight: Any = self.get_base_layer().weight
        weight.data = self._hirank_base.to(device=weight.device, dtype=weight.dtype)
        self._hirank_base = None
        self.merged_adapters.clear()

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self._hirank_norms.pop(adapter_name, None)


def _merge(layer: Any, names: list[str], safe_merge: bool) -> None:
    weight = layer.get_base_layer().weight
    source = weight.data if layer._hirank_base is None else layer._hirank_base
    parts = [Increment(*_adapter(layer, name)[:4]) for name in names]
    merged = merge_into(torch.empty_like(source), source, parts)
    if safe_merge and not torch.isfinite(merged).all():
        raise ValueError(
            f"NaNs detected in the merged weights. The adapter {names[-1]} seems to be broken"
        )
    layer._hirank_base = source
    weight.data = merged
    layer.merged_adapters[:] = names


def magnitude_of(layer: Any, name: str) -> Tensor | None:
    if name not in layer.lora_variant:
        return None
    magnitude: Tensor = layer.lora_magnitude_vector[name].weight
    return magnitude


def _traced_forward(layer: Any, x: Tensor) -> Tensor | None:
    """As `FastLinear.forward`, of what a compiler can trace and guard; None where PEFT is to run.

    What it looks at becomes a guard, so nothing here may differ from step to step or, among layers
    that are alike, from layer to layer.
    """
    tier = route(layer).tier
    if tier == "peft":
        return None
    base, backend = layer.base_layer, layer._hirank_options.backend
    adapters = [_traced_adapter(layer, name) for name in present(layer)]
    if tier == "composed":
        return composed_forward(x, base, base.weight, base.bias, adapters, backend)
    A, B, magnitude, scale, *_ = adapters[0]
    return traced_linear(x, base.weight, A, B, magnitude, base.bias, scale, backend)


def _traced_adapter(layer: Any, name: str) -> Adapter:
    dropout = layer.lora_dropout[name] if layer.training else None
    return Adapter(
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        magnitude_of(layer, name),
        layer.scaling[name],
        None if isinstance(dropout, nn.Identity) else dropout,
        TracedNorms(),
        layer._hirank_options.single_gemm,
    )


def _adapters(layer: Any, names: list[str]) -> list[Adapter]:
    settings: Options = layer._hirank_options
    check_shapes(settings.name, layer, names)
    check_backend_of(settings.name, layer, settings.backend)
    return [_adapter(layer, name) for name in names]


def _adapter(layer: Any, name: str) -> Adapter:
    magnitude = magnitude_of(layer, name)
    if magnitude is not None and magnitude.dtype in (torch.bfloat16, torch.float16):
        _warn_half_magnitude(magnitude)
    dropout = layer.lora_dropout[name] if layer.training else None
    return Adapter(
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        magnitude,
        layer.scaling[name],
        None if isinstance(dropout, nn.Identity) else dropout,
        None if magnitude is None else norms_of(layer, name),
        layer._hirank_options.single_gemm,
    )


def norms_of(layer: Any, name: str) -> NormCache:
    norms: NormCache | None = layer._hirank_norms.get(name)
    if norms is None or norms.owner() is not layer:  # new, or a copy made with its layer
        owner = weakref.ref(layer)
        source = functools.partial(_norm_inputs, owner, name)
        norms = layer._hirank_norms[name] = NormCache(source, owner, layer._hirank_family)
    return norms


def _norm_inputs(
    owner: "weakref.ref[Any]", name: str
) -> tuple[Tensor, Tensor, Tensor, float] | None:
    """What the norm of an adapter depends on; None while its layer does not run it."""
    layer = owner()
    if layer is None or name not in layer.lora_variant or name not in layer.active_adapters:
        return None
    weight = layer.base_layer.weight
    return weight, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def _warn_half_magnitude(magnitude: Tensor) -> None:
    if magnitude.requires_grad and torch.is_grad_enabled():
        warnings.warn(
            f"lora_magnitude_vector is trained in {magnitude.dtype}, where most updates round to "
            "zero and DoRA decays to LoRA: keep it in float32.",
            stacklevel=4,
        )

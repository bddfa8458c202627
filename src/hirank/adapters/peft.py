"""PEFT stays at the door: every PEFT name, attribute and version difference is in this file.

`accelerate` turns the LoRA layers of a PEFT model into subclasses of themselves by setting their
`__class__`. Parameters, state-dict keys, configuration and `isinstance` stay as they were, so
saving, loading, optimizers and trainers notice nothing. Whatever a subclass does not support at a
call it hands to PEFT's own forward, and `explain` tells why.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from peft.tuners.lora import layer as peft_lora
from peft.tuners.lora import model as peft_model
from peft.tuners.lora import variants as peft_variants
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from hirank.adapters.explain import Explanation, Route, Row
from hirank.adapters.gain import NormCache, base_norm
from hirank.adapters.layers import Adapter, composed_forward, owned_forward
from hirank.adapters.merge import Increment, merge_into
from hirank.errors import HirankError

__all__ = ["FastLinear", "Patch", "accelerate", "explain", "patch_peft", "restore"]

Model = TypeVar("Model", bound=nn.Module)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# --- The layer ---------------------------------------------------------------------------------


class FastLinear(peft_lora.Linear):
    """PEFT's `lora.Linear` over `nn.Linear`, computed by hirank. Made by `accelerate` only."""

    _hirank_known: "_Known | None"  # the last route, for as long as it holds
    _hirank_norms: dict[str, NormCache]
    _hirank_base: Tensor | None  # the base weight while adapters are merged into it

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs:  # adapter_names, aLoRA offsets, or a base layer with more arguments
            return super().forward(x, *args, **kwargs)
        known = self._hirank_known
        if known is None or not known.holds(self):
            known = self._hirank_known = _Known(self)
        if known.tier == "peft":
            return super().forward(x)
        base = known.base
        adapters = [_adapter(self, name) for name in known.names]
        if known.tier == "owned":
            return owned_forward(x, base.weight, base.bias, adapters[0])
        return composed_forward(x, base, base.weight, base.bias, adapters)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, but accumulated in fp32 and rounded once; `unmerge` is then exact."""
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        if self._hirank_base is None and self.merged:
            return super().merge(safe_merge, names)
        everything = [*self.merged_adapters, *names]
        if any(_adapter_obstacle(self, name) for name in everything) or _base_obstacle(self):
            if self.merged:
                self.unmerge()
            return super().merge(safe_merge, everything)
        _merge(self, everything, safe_merge)

    def unmerge(self) -> None:
        """Puts back the very weight that was there before."""
        if self._hirank_base is None:
            return super().unmerge()
        self.get_base_layer().weight.data = self._hirank_base
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


def _present(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _magnitude(layer: Any, name: str) -> Tensor | None:
    if name not in layer.lora_variant:
        return None
    magnitude: Tensor = layer.lora_magnitude_vector[name].weight
    return magnitude


def _adapter(layer: Any, name: str) -> Adapter:
    magnitude = _magnitude(layer, name)
    if magnitude is not None and magnitude.dtype in (torch.bfloat16, torch.float16):
        _warn_half_magnitude(magnitude)
    dropout = layer.lora_dropout[name] if layer.training else None
    return Adapter(
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        magnitude,
        layer.scaling[name],
        None if isinstance(dropout, nn.Identity) else dropout,
        None if magnitude is None else _norms(layer, name),
    )


def _norms(layer: Any, name: str) -> NormCache:
    norms: NormCache | None = layer._hirank_norms.get(name)
    if norms is None or norms.owner() is not layer:  # new, or a copy made with its layer
        owner = weakref.ref(layer)
        source = functools.partial(_norm_inputs, owner, name)
        norms = layer._hirank_norms[name] = NormCache(source, owner)
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


# --- Which way, and why ------------------------------------------------------------------------


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__  # offloading replaces the bound method
    )


def _plain_tensor(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is nn.Parameter or kind is Tensor) and not hasattr(tensor, "ds_id")


def _base_obstacle(layer: Any) -> str | None:
    base = layer.base_layer
    if type(base) is not nn.Linear:
        return f"the base layer is {type(base).__name__}, not nn.Linear"
    if _hooked(base):
        return "the base layer has hooks"
    if not _plain_tensor(base.weight) or base.weight.dtype not in _FLOATS:
        return "the base weight is sharded or quantised"
    if base.weight.requires_grad:
        return "the base weight is trainable"
    return None


def _adapter_obstacle(layer: Any, name: str) -> str | None:
    variant = layer.lora_variant.get(name)
    if variant is not None and type(variant) is not peft_variants.DoraLinearVariant:
        return f"adapter {name!r} is of kind {type(variant).__name__}"
    if layer.lora_bias.get(name):
        return f"adapter {name!r} has a bias of its own (lora_bias)"
    if isinstance(layer.scaling[name], Tensor):
        return f"the scaling of adapter {name!r} is a tensor"
    A, B = layer.lora_A[name], layer.lora_B[name]
    modules = [A, B, *([layer.lora_magnitude_vector[name]] if variant is not None else [])]
    if type(A) is not nn.Linear or type(B) is not nn.Linear or any(map(_hooked, modules)):
        return f"lora_A or lora_B of adapter {name!r} is not a plain module without hooks"
    if not all(_plain_tensor(module.weight) for module in modules):
        return f"adapter {name!r} is sharded"
    if any(module.weight.device != layer.base_layer.weight.device for module in modules):
        return f"adapter {name!r} and the base weight are on different devices"
    return None


class _Known:
    """The route of a layer and what it rests on, so that the next call need not ask again."""

    __slots__ = ("active", "base", "modules", "names", "scales", "tier", "training")

    def __init__(self, layer: Any) -> None:
        self.tier = route(layer).tier
        self.names = _present(layer)
        self.active = layer.active_adapters[:]
        self.training = layer.training
        self.base = layer.base_layer
        self.scales = [layer.scaling[name] for name in self.names]
        self.modules = [self.base, *self._parts(layer)]

    def _parts(self, layer: Any) -> list[nn.Module]:
        own = layer._modules
        lists = [own["lora_A"], own["lora_B"], own["lora_magnitude_vector"], own["lora_dropout"]]
        return [found[name] for name in self.names for found in lists if name in found._modules]

    def holds(self, layer: Any) -> bool:
        """Whether nothing has changed that could change the route."""
        return (
            self.tier != "peft"
            and layer.training == self.training
            and layer.active_adapters == self.active
            and not layer._disable_adapters
            and not layer.merged_adapters
            and [layer._modules["base_layer"], *self._parts(layer)] == self.modules
            and [layer.scaling[name] for name in self.names] == self.scales
            and not any(map(_changed, self.modules))
            and not self.base.weight.requires_grad
        )


def _changed(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return _hooked(module) or (weight is not None and not _plain_tensor(weight))


def route(layer: Any) -> Route:
    """The way this layer's next plain call takes."""
    if layer.disable_adapters:
        return Route("peft", "adapters are disabled: base layer only")
    if layer.merged:
        return Route("peft", "adapters are merged: base layer only")
    names = _present(layer)
    if not names:
        return Route("peft", "no active adapter: base layer only")
    for obstacle in (_base_obstacle(layer), *(_adapter_obstacle(layer, name) for name in names)):
        if obstacle:
            return Route("peft", obstacle)
    if len(names) > 1:
        return Route("composed", f"{len(names)} active adapters")
    if layer.training and not isinstance(layer.lora_dropout[names[0]], nn.Identity):
        return Route("composed", "dropout in training")
    return Route("owned", "one adapter, whole linear")


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, peft_lora.LoraLayer):
            yield name, module


def _kind(layer: Any) -> str:
    for name in layer.active_adapters:
        variant = layer.lora_variant.get(name)
        if variant is not None:
            text = type(variant).__name__
            return "dora" if text.startswith("Dora") else text
    return "lora"


def _explained(layer: Any) -> Route:
    if isinstance(layer, FastLinear):
        return route(layer)
    if type(layer) is peft_lora.Linear and type(layer.base_layer) is nn.Linear:
        return Route("peft", "not converted: call hirank.accelerate(model)")
    what = f"{type(layer).__name__} over {type(layer.get_base_layer()).__name__}"
    return Route("peft", f"{what} is not converted")


def explain(model: nn.Module) -> Explanation:
    """Which way each adapted layer of `model` takes as it stands now, and why."""
    return Explanation(
        tuple(Row(name, _kind(layer), *_explained(layer)) for name, layer in _lora_layers(model))
    )


# --- Conversion --------------------------------------------------------------------------------


def _fresh_magnitude(layer: Any, name: str) -> None:
    """m of an untrained adapter is the fp32 norm itself, so that g = 1 exactly; m stays fp32.

    PEFT rounds m to the base dtype: on a bf16 base a new adapter then changes the output by up to
    0.4 % a row before the first step. Untrained: B is zero and m is the norm up to that rounding.
    """
    magnitude, weight = _magnitude(layer, name), layer.base_layer.weight
    if magnitude is None or weight.is_meta or magnitude.is_meta:
        return
    if magnitude.dtype in (torch.bfloat16, torch.float16):
        magnitude.data = magnitude.data.float()
    if layer.lora_B[name].weight.any():
        return
    norm = base_norm(weight)
    slack = max(torch.finfo(weight.dtype).eps, 1e-5)
    if torch.allclose(magnitude.detach().to(norm), norm, rtol=slack, atol=1e-12):
        magnitude.data = norm.to(device=magnitude.device)


def _convert(layer: Any) -> None:
    known = type(layer) is peft_lora.Linear and type(layer.base_layer) is nn.Linear
    if known:
        layer.__class__ = FastLinear
        layer._hirank_norms, layer._hirank_base, layer._hirank_known = {}, None, None
    elif type(layer) is not FastLinear:
        return
    for norms in layer._hirank_norms.values():
        norms.clear()
    for name in layer.lora_variant:
        _norms(layer, name)  # known from the start, so that a first pass refreshes all at once
        if not layer.merged and _adapter_obstacle(layer, name) is None:
            _fresh_magnitude(layer, name)


def accelerate(model: Model) -> Model:
    """Convert the LoRA and DoRA layers of a PEFT model to hirank's, in place.

    Layers it does not know stay PEFT's (`explain` tells which and why). Calling it again is a
    no-op for converted layers, except that every cached norm is forgotten; call it again after
    adding adapters to layers that had none.

    Untrained DoRA adapters get m from the fp32 norm, so that the model starts as exactly its base.

    Args:
        model: what `get_peft_model` or `PeftModel.from_pretrained` returned, on any device, the
            meta device included (nothing is computed there).

    Returns:
        The same model.

    Raises:
        HirankError: the model holds no LoRA layer.
    """
    layers = dict(_lora_layers(model))
    if not layers:
        raise HirankError(
            f"accelerate got a {type(model).__name__} without LoRA layers: wrap it with "
            "peft.get_peft_model first."
        )
    for layer in layers.values():
        _convert(layer)
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`: the layers are PEFT's own again, in place, merged ones stay merged."""
    for _, layer in _lora_layers(model):
        converted = type(layer) is FastLinear
        if converted:
            merged = list(layer.merged_adapters) if layer._hirank_base is not None else []
            if merged:
                layer.unmerge()
            layer.__class__ = peft_lora.Linear
            del layer._hirank_norms, layer._hirank_base, layer._hirank_known
            if merged:
                layer.merge(adapter_names=merged)
    return model


# --- Models yet to be made ---------------------------------------------------------------------


class Patch:
    """What `patch_peft` changed; `remove()` puts it back. Also a context manager."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    def remove(self) -> None:
        """Restore PEFT. Models made meanwhile stay converted."""
        while self._undo:
            owner, name, old = self._undo.pop()
            setattr(owner, name, old)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _fast_init(original: Callable[..., None]) -> Callable[..., None]:
    """DoRA's init without the product B A where B is zero, and m kept in fp32."""

    @functools.wraps(original)
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        B = module.lora_B[adapter_name].weight
        base = module.get_base_layer()
        plain = type(base) is nn.Linear and _plain_tensor(base.weight)
        if not plain or base.weight.is_meta or B.is_meta or B.any():
            return original(module, adapter_name, **kwargs)
        holder = DoraLinearLayer(fan_in_fan_out=False)  # type: ignore[no-untyped-call]
        holder.weight = nn.Parameter(base_norm(base.weight))
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        module.lora_magnitude_vector[adapter_name] = holder

    return init


def _converting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def create_and_replace(
        self: Any,
        lora_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(self, lora_config, adapter_name, target, target_name, parent, *args, **kwargs)
        made = getattr(parent, target_name)
        if isinstance(made, peft_lora.Linear):
            _convert(made)

    return create_and_replace


def patch_peft() -> Patch:
    """Make PEFT itself create converted layers, until the returned patch is removed.

    Besides saving the call of `accelerate`, this is quicker at creation: DoRA's init needs one
    pass over each weight and no product B A, as B is still zero.

        with hirank.patch_peft():
            model = get_peft_model(base, LoraConfig(use_dora=True, ...))
    """
    patch = Patch()
    variant = peft_variants.DoraLinearVariant
    patch._replace(variant, "init", staticmethod(_fast_init(variant.init)))
    owner = peft_model.LoraModel
    patch._replace(owner, "_create_and_replace", _converting(owner._create_and_replace))
    return patch

"""What a user may do with an adapted layer: `support_table.py` tries it all on each kind."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hirank
from support_layers import DTYPES, KINDS

# One adapted layer under trial.


class Trial:
    """A converted model over one layer, and its input."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        torch.manual_seed(0)
        self.kind, self.dtype = KINDS[kind], dtype
        with hirank.patch_peft():
            self.model = get_peft_model(self.kind.make(dtype), self.config(**config))
            hirank.accelerate(self.model)
        self.disturb()
        self.x = self.kind.input()
        self.x = self.x.to(dtype) if self.x.is_floating_point() else self.x

    def config(self, **given: Any) -> LoraConfig:
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["lin"], "use_dora": True}
        return LoraConfig(**(settings | given))

    def disturb(self) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if "lora_" in name and p.is_floating_point() and not p.is_meta:
                    p.add_(0.05 * torch.randn(p.shape).to(p))

    def add(self, name: str, **config: Any) -> None:
        with hirank.patch_peft():
            self.model.add_adapter(name, self.config(**config))
        self.disturb()

    def run(self) -> Tensor:
        y = self.model(self.x)
        assert torch.isfinite(y).all()
        return y

    def train(self) -> Tensor:
        y = self.model.train()(self.x)
        y.float().square().mean().backward()
        grads = [p.grad for p in self.model.parameters() if p.requires_grad]
        assert all(g is not None and torch.isfinite(g).all() for g in grads)
        return y

    def row(self) -> Any:
        return hirank.explain(self.model).rows[0]


def _near(found: Tensor, wanted: Tensor, slack: float = 1e-4) -> None:
    slack = max(slack, 4 * torch.finfo(wanted.dtype).eps)
    off = (found - wanted).norm() / wanted.norm()
    assert off < slack, f"off by {float(off):.2g}"


# The operations: each runs, checks what came out, and returns what `explain` said meanwhile.

Operation = Callable[[str, torch.dtype], Any]
OPERATIONS: dict[str, Operation] = {}


def operation(name: str) -> Callable[[Operation], Operation]:
    def keep(function: Operation) -> Operation:
        OPERATIONS[name] = function
        return function

    return keep


def _trained(kind: str, dtype: torch.dtype, **config: Any) -> Any:
    trial = Trial(kind, dtype, **config)
    trial.train()
    return trial.row()


for _name, _config in {
    "LoRA": {"use_dora": False},
    "DoRA": {},
    "rsLoRA": {"use_rslora": True},
    "`rank_pattern`, `alpha_pattern`": {"rank_pattern": {"lin": 4}, "alpha_pattern": {"lin": 2}},
    "dropout": {"lora_dropout": 0.2},
    "LoRA with `lora_bias`": {"use_dora": False, "lora_bias": True},
    "DoRA with `lora_bias`": {"lora_bias": True},
}.items():
    operation(_name)(lambda kind, dtype, config=_config: _trained(kind, dtype, **config))


@operation("dropout, single GEMM")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype, lora_dropout=0.2)
    hirank.accelerate(trial.model, dropout="single-gemm")
    trial.train()
    return trial.row()


@operation("frozen magnitude")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    for name, p in trial.model.named_parameters():
        if "magnitude" in name:
            p.requires_grad_(False)
    trial.train()
    return trial.row()


@operation("several active adapters")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.add("b")
    trial.model.base_model.set_adapter(["default", "b"])
    trial.train()
    return trial.row()


@operation("switch, disable, enable")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.add("b", use_dora=False)
    before = trial.run()
    trial.model.set_adapter("b")
    trial.run()
    with trial.model.disable_adapter():
        trial.run()
    trial.model.set_adapter("default")
    _near(trial.run(), before)
    return trial.row()


@operation("`adapter_names` (a batch of several)")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.add("b")
    model, names = trial.model.eval(), ["default", "b", "__base__", "b"]
    mixed = model(trial.x, adapter_names=names)
    model.set_adapter("b")
    _near(mixed[1::2], trial.run()[1::2], 1e-2)  # 8-bit layers scale by the whole batch
    return trial.row()


@operation("`set_scale`")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    before, layer = trial.run(), trial.model.base_model.model.lin
    layer.set_scale("default", 3.0)
    assert not torch.equal(trial.run(), before)
    return trial.row()


def _merged(kind: str, dtype: torch.dtype, safe: bool) -> Any:
    trial = Trial(kind, dtype)
    before, row = trial.run(), trial.row()
    trial.model.merge_adapter(safe_merge=safe)
    _near(trial.run(), before, _slack(kind))
    trial.model.unmerge_adapter()
    _near(trial.run(), before, _slack(kind))
    return row


def _slack(kind: str) -> float:
    return 1e-4 if KINDS[kind].dtypes is DTYPES else 0.2  # what is merged is quantised again


@operation("merge, unmerge")
def _(kind: str, dtype: torch.dtype) -> Any:
    return _merged(kind, dtype, False)


@operation("`safe_merge`")
def _(kind: str, dtype: torch.dtype) -> Any:
    return _merged(kind, dtype, True)


@operation("`merge_and_unload`")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    before, row = trial.run(), trial.row()
    _near(trial.model.merge_and_unload()(trial.x), before, _slack(kind))
    return row


@operation("`add_weighted_adapter`")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.add("b")
    trial.model.base_model.add_weighted_adapter(["default", "b"], [0.7, 0.3], "c", "cat")
    trial.model.set_adapter("c")
    trial.run()
    return trial.row()


@operation("delete an adapter")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.add("b")
    trial.model.delete_adapter("default")
    trial.run()
    return trial.row()


@operation("state dict, save, load")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    before = trial.run()
    saved = {k: v.clone() for k, v in get_peft_model_state_dict(trial.model).items()}
    trial.disturb()
    set_peft_model_state_dict(trial.model, saved)
    _near(trial.run(), before, 1e-2)  # 8-bit layers round x, and not always alike
    with tempfile.TemporaryDirectory() as folder:
        trial.model.save_pretrained(folder)
        trial.model.load_adapter(folder, "again")
    trial.model.set_adapter("again")
    _near(trial.run(), before, 1e-2)
    return trial.row()


@operation("hot swap")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial, other = Trial(kind, dtype), Trial(kind, dtype)
    other.disturb()
    with tempfile.TemporaryDirectory() as folder:
        other.model.save_pretrained(folder)
        hirank.hotswap_adapter(trial.model, folder)
    _near(trial.run(), other.model(trial.x), 1e-2)
    return trial.row()


def _copied(kind: str, dtype: torch.dtype, how: Callable[[nn.Module], nn.Module]) -> Any:
    trial = Trial(kind, dtype)
    before = trial.run()
    trial.model = how(trial.model)
    _near(trial.run(), before, 1e-2)
    return trial.row()


@operation("deepcopy")
def _(kind: str, dtype: torch.dtype) -> Any:
    return _copied(kind, dtype, copy.deepcopy)


@operation("pickle")
def _(kind: str, dtype: torch.dtype) -> Any:
    try:
        return _copied(kind, dtype, lambda model: pickle.loads(pickle.dumps(model)))
    except AttributeError as error:  # from the library's own tensors
        raise TypeError(f"{KINDS[kind].library}: {error}") from error


@operation("gradient checkpointing")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    checkpoint(trial.model.train(), trial.x, use_reentrant=False).sum().backward()
    return trial.row()


@operation("double backward")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trained = [p for p in trial.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(trial.run().square().sum(), trained, create_graph=True)
    torch.autograd.grad(sum(g.square().sum() for g in grads), trained)
    return trial.row()


@operation("autocast to bf16")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trial.train()
    return trial.row()


@operation("`torch.compile`")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    before = trial.run()
    torch.compiler.reset()  # or what other layers left would count
    whole = KINDS[kind].dtypes is DTYPES  # quantised layers break the graph
    _near(torch.compile(trial.model, backend="eager", fullgraph=whole)(trial.x), before)
    return trial.row()


@operation("meta device")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.model.to("meta")
    assert trial.model(trial.x.to("meta")).is_meta
    return trial.row()


@operation("trainable base weight")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.model.base_model.model.lin.base_layer.requires_grad_(True)
    trial.run()
    return trial.row()


@operation("hooks on the base layer")
def _(kind: str, dtype: torch.dtype) -> Any:
    trial = Trial(kind, dtype)
    trial.model.base_model.model.lin.base_layer.register_forward_hook(lambda *_: None)
    trial.run()
    return trial.row()

"""Random layers through random lives, against what they mean: `semantics.py`.

After every operation the layer holds, bit by bit, the weights it should, and its output and all its
gradients are those of the model in fp64, as near as the roundings of its dtype explain. 340 lives
for each of six kinds of layer, the same on every run; for more, and others each time:

    pytest tests/adapters/test_differential.py --hypothesis-profile=long
"""

import copy
import gc
import inspect
import pickle
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor, nn

import hirank
from adapters.layer_kinds import Holder
from adapters.random_layers import KINDS, Case, configs
from adapters.semantics import (
    Adapter,
    Layer,
    assert_same,
    truth_and_size,
)
from adapters.setups import layer_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:LoRA adapter added to ConvNd layer:UserWarning",
    "ignore:fan_in_fan_out is set to False:UserWarning",
    "ignore:lora_magnitude_vector is trained in:UserWarning",
    "ignore:Already following adapters were merged:UserWarning",
    "ignore:All adapters are already merged:UserWarning",
    "ignore:Already unmerged:UserWarning",
    "ignore:Adapter cannot be set when the model is merged:UserWarning",
    "ignore:.*was active which is now deleted:UserWarning",
    "ignore:.* is saved in torch.bfloat16, which rounds the magnitude:UserWarning",
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NAMES = ("x", "y", "z")


@dataclass
class Example:
    """What hypothesis draws."""

    case: Case
    dtype: torch.dtype
    seed: int
    adapters: list[dict[str, Any]]
    life: list[tuple[str, int]] = field(default_factory=list)


@st.composite
def examples(draw: Any, cases: st.SearchStrategy[Case]) -> Example:
    case = draw(cases)
    adapters = draw(st.lists(configs(case.groups), min_size=1, max_size=2))
    operation = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 2**16))
    life = draw(st.lists(operation, max_size=8))
    seed = draw(st.integers(0, 2**16))
    return Example(case, draw(st.sampled_from(DTYPES)), seed, adapters, life)


# What can be done with it.


class Life:
    """One model of PEFT's, converted, and beside it what it should be."""

    def __init__(self, example: Example) -> None:
        self.case, self.random = example.case, random.Random()
        self.seed(example.seed)
        base = copy.deepcopy(self.case.layer)
        for p in base.parameters():
            p.data = torch.randn(p.shape)
        holder, (first, *others) = Holder(base).to(example.dtype), example.adapters
        self.model = get_peft_model(holder, LoraConfig(**first), adapter_name="x")
        self.layer = Layer(self.case.kind, base.weight.data.clone(), _copied(base, "bias"))
        for name, config in zip(NAMES[1:], others, strict=False):
            self.model.add_adapter(name, LoraConfig(**config))
        hirank.accelerate(self.model)
        for name, config in zip(NAMES, example.adapters, strict=False):
            self._meet(name, config)
        self.layer.active = ["x"]

    def seed(self, seed: int) -> None:
        self.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # quicker than torch.manual_seed

    @property
    def model(self) -> Any:
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self.real = model, layer_of(model)

    @property
    def base(self) -> Any:
        return self.real.get_base_layer()

    def _parts(self, name: str) -> dict[str, Tensor]:
        real = self.real
        if isinstance(self.base, nn.Embedding):
            found = {"A": real.lora_embedding_A[name], "B": real.lora_embedding_B[name]}
        else:
            found = {"A": real.lora_A[name].weight, "B": real.lora_B[name].weight}
        if name in real.lora_magnitude_vector:
            found["m"] = real.lora_magnitude_vector[name].weight
        return found

    def _meet(self, name: str, config: dict[str, Any]) -> None:
        """A new adapter: its scale is what alpha, rank and rsLoRA say, and m is there for DoRA."""
        r, parts = config["r"], self._parts(name)
        assert ("m" in parts) == config["use_dora"]
        held = {part: tensor.detach().clone() for part, tensor in parts.items()}
        scale = config["lora_alpha"] / (r**0.5 if config["use_rslora"] else r)
        self.layer.adapters[name] = Adapter(held["A"], held["B"], held.get("m"), scale)
        for part in parts:
            if self.random.random() < 0.8:  # else it stays untrained
                self._write(name, part)

    def _write(self, name: str, part: str) -> None:
        new = torch.randn(self._parts(name)[part].shape).to(self._parts(name)[part])
        self._parts(name)[part].data.copy_(new)
        setattr(self.layer.adapters[name], part, new)
        self.changed = True

    def _some(self) -> list[str]:
        names = sorted(self.layer.adapters)
        return self.random.sample(names, self.random.randint(1, len(names)))

    # The operations. Each changes both sides; `check` compares them.

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    def write(self) -> None:
        """As a fused optimiser or `vector_to_parameters` does: no version counter moves."""
        name = self._some()[0]
        self._write(name, self.random.choice(sorted(self._parts(name))))

    def write_base(self) -> None:
        if not self.layer.merged:  # what is merged is not the base weight
            self.layer.weight = torch.randn(self.base.weight.shape).to(self.base.weight)
            self.base.weight.data.copy_(self.layer.weight)

    def kill_row(self) -> None:
        """An output that W gives nothing: its norm is zero where B A is, too."""
        if not self.layer.merged:
            rows = self.layer.weight.movedim(self.case.kind.rows, 0)
            rows[self.random.randrange(len(rows))] = 0
            self.base.weight.data.copy_(self.layer.weight)

    def step(self) -> None:
        """An optimiser's arithmetic is torch's, so its result is taken; what is idle stays."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        y = self.model(self._input())
        self.layer.called()
        if not y.requires_grad or not trained:
            return
        y.backward(torch.randn_like(y))
        kind = self.random.choice([torch.optim.SGD, torch.optim.AdamW])
        kind(trained, lr=0.05, fused=self.random.random() < 0.5).step()
        self.model.zero_grad()
        for name in self.layer.running():
            for part, tensor in self._parts(name).items():
                setattr(self.layer.adapters[name], part, tensor.detach().clone())

    def set_scale(self) -> None:
        name, factor = self._some()[0], self.random.choice([0.0, 0.5, 3.0, -1.0])
        config = self.model.peft_config[name]
        r = config.r**0.5 if config.use_rslora else config.r
        self.real.set_scale(name, factor)
        self.layer.adapters[name].scale = factor * config.lora_alpha / r
        self.changed = True

    def set_adapter(self) -> None:
        names = self._some()
        self.model.base_model.set_adapter(names)
        self.layer.unmerge()
        self.layer.active = names

    @torch.no_grad()
    def mixed(self) -> None:
        """A batch with an adapter of its own for each sample: as if each went alone."""
        x = self._input()
        if self.layer.merged or not self.layer.enabled or not len(x):
            return  # PEFT refuses, or ignores the names
        names = [self.random.choice(["__base__", *self.layer.adapters]) for _ in x]
        training, self.model = self.model.training, self.model.eval()
        y = self.model(x, adapter_names=names)
        for i, name in enumerate(names):
            alone = replace(self.layer, active=[name] if name in self.layer.adapters else [])
            truth, size = truth_and_size(alone, x[i : i + 1])
            unit = torch.finfo(y.dtype).eps / 2
            assert_same({"out": y[i : i + 1]}, truth, size, unit)
        self.model.train(training)

    def disable(self) -> None:
        self.model.base_model.disable_adapter_layers()
        self.layer.enabled = False

    def enable(self) -> None:
        self.model.base_model.enable_adapter_layers()
        self.layer.enabled = True

    def merge(self) -> None:
        if self.layer.merged and self.changed:
            return  # PEFT would add to what was merged before the change, we merge all anew
        names, self.changed = self.random.choice([None, self._some()]), False
        safe = self.random.random() < 0.5
        if self.case.groups > 1:  # PEFT's sentence, and nothing is changed
            with pytest.raises(NotImplementedError, match="groups > 1"):
                self.model.merge_adapter(names, safe_merge=safe)
            return
        self.model.merge_adapter(names, safe_merge=safe)
        self.layer.merge(self.layer.active if names is None else names)

    def unmerge(self) -> None:
        self.model.unmerge_adapter()
        self.layer.unmerge()

    def add_adapter(self) -> None:
        free = [name for name in NAMES if name not in self.layer.adapters]
        if not free or self.layer.merged:  # its m would be the norm of what is merged
            return
        config = {
            "r": self.case.groups * self.random.randint(1, 4),
            "lora_alpha": self.random.choice([1, 8]),
            "use_rslora": self.random.random() < 0.5,
            "use_dora": self.random.random() < 0.7,
            "target_modules": ["lin"],
        }
        self.model.add_adapter(free[0], LoraConfig(**config))
        if not self.layer.enabled:
            self.disable()  # PEFT would train the active ones again
        self._meet(free[0], config)

    def delete_adapter(self) -> None:
        if len(self.layer.adapters) == 1 or self.layer.merged:  # PEFT refuses to delete merged ones
            return
        name = self._some()[0]
        self.model.delete_adapter(name)
        del self.layer.adapters[name]
        if name in self.layer.active:
            self.layer.active.remove(name)
            self.layer.active = self.layer.active or [min(self.layer.adapters)]
            if not self.layer.enabled:
                self.disable()

    def state_dict(self) -> None:
        """Saved, overwritten, loaded."""
        name = self._some()[0]
        how = {"adapter_name": name, "save_embedding_layers": False}
        saved = get_peft_model_state_dict(self.model, **how)
        saved = {key: tensor.clone() for key, tensor in saved.items()}
        for tensor in self._parts(name).values():
            tensor.data.zero_()
        set_peft_model_state_dict(self.model, saved, adapter_name=name)

    def load_adapter(self) -> None:
        """Into the same name, from a folder."""
        name = self._some()[0]
        with tempfile.TemporaryDirectory() as folder:
            how = {"selected_adapters": [name], "save_embedding_layers": False}
            self.model.save_pretrained(folder, **how)
            for tensor in self._parts(name).values():
                tensor.data.zero_()
            self.model.load_adapter(f"{folder}/{name}", name, is_trainable=True)

    def deepcopy(self) -> None:
        self.model = copy.deepcopy(self.model)

    def pickle(self) -> None:
        self.model = pickle.loads(pickle.dumps(self.model))

    def to(self) -> None:
        if self.layer.merged:  # which dtype rounded the merged weight is told by test_merge.py
            return
        dtype = self.random.choice(DTYPES)
        self.model.to(dtype)
        self.layer.weight = self.layer.weight.to(dtype)
        self.layer.bias = None if self.layer.bias is None else self.layer.bias.to(dtype)
        for a in self.layer.adapters.values():
            a.A, a.B, a.m = a.A.to(dtype), a.B.to(dtype), None if a.m is None else a.m.to(dtype)

    def accelerate(self) -> None:
        hirank.accelerate(self.model)
        for a in self.layer.adapters.values():
            if a.m is not None and a.m.dtype == torch.bfloat16:  # m is kept in fp32
                a.m = a.m.float()

    # Comparing.

    def _input(self) -> Tensor:
        if self.case.entries is not None:
            return torch.randint(0, self.case.entries, self.case.shape)
        return torch.randn(self.case.shape).to(self.base.weight.dtype)

    def check(self) -> None:
        x = self._input()
        if x.is_floating_point():
            x.requires_grad_()
        y = self.model(x)
        self.layer.called()
        self._check_weights()
        assert y.dtype == self.base.weight.dtype
        dy = torch.randn(y.shape).to(y)
        if y.requires_grad:
            y.backward(dy)
        found = {"out": y.detach()} | ({"dx": x.grad} if x.grad is not None else {})
        for name in self.layer.adapters:
            for part, tensor in self._parts(name).items():
                if tensor.grad is not None:
                    found[f"d{name}.{part}"] = tensor.grad.clone()
        self.model.zero_grad()
        truth, size = truth_and_size(self.layer, x, dy)
        unit = torch.finfo(y.dtype).eps / 2
        assert_same(found, truth, size, unit)
        with torch.no_grad():
            out = {"out": self.model(x)}
        assert_same(out, {"out": truth["out"]}, size, unit)

    def _check_weights(self) -> None:
        if not self.layer.merged:
            assert torch.equal(self.base.weight, self.layer.weight)
        assert set(self.layer.adapters) == set(self.model.peft_config)
        for name, adapter in self.layer.adapters.items():
            for part, tensor in self._parts(name).items():
                assert torch.equal(tensor, getattr(adapter, part)), f"{part} of {name}"


@pytest.fixture
def quick() -> Iterator[None]:
    """A second thread would only wait for the first, and what is there already is no garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def _copied(module: nn.Module, name: str) -> Tensor | None:
    tensor = getattr(module, name, None)
    return None if tensor is None else tensor.detach().clone()


OPERATIONS = {
    name: member
    for name, member in vars(Life).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in ("check", "seed")
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", KINDS)
def test_a_life(kind, monkeypatch):
    monkeypatch.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)  # slow

    @given(examples(KINDS[kind]))
    def lives(example: Example) -> None:
        life = Life(example)
        life.check()
        for name, seed in example.life:
            life.seed(seed)
            OPERATIONS[name](life)
            life.check()

    lives()

"""The part of plan_h200.py that runs in several processes, one a GPU: DDP and FSDP2.

Each process makes the whole model, shares it, and runs two steps. What is written down is the
largest of what the processes measured; process 0 does so. On a CPU it is the bytes of live tensors.
"""

from __future__ import annotations

import argparse
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import plan_h200 as single
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hirank.bench.record import append
from hirank.plan.setting import Setting
from hirank.plan.subject import optimizer_for

MODELS = (single.SMALL, single.MIDDLE)
WAYS: list[dict[str, Any]] = [
    {"method": "lora", "sequence": 2048},
    {"method": "dora", "sequence": 2048},
    {"method": "full", "base_dtype": "fp32", "sequence": 4096, "checkpointing": True},
    {"method": "full", "autocast": False, "sequence": 2048},
]


def settings(world: int, dry: bool) -> list[Setting]:
    """Every way on every model, with copies and in parts."""
    made = [
        Setting(model, rank=16, world=world, sharding=sharding, **way)
        for model in (("tiny",) if dry else MODELS)
        for sharding in ("ddp", "fsdp2")
        for way in WAYS
    ]
    if not dry:
        return made
    return [single.replace(s, sequence=256, loss="plain") for s in made]


def spread(setting: Setting, model: Any) -> Any:
    """As Accelerate does it for a trainer: FSDP2 by block; fp32 weights travel as bf16."""
    if setting.sharding == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy()
    if setting.base_dtype == "fp32" and setting.autocast:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    inner = model.get_base_model() if setting.is_adapter else model
    for block in inner.model.layers:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def measure(setting: Setting, device: str) -> dict[str, int]:
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    model = single.model_for(setting, device)
    single.ready(setting, model)
    shared = spread(setting, model)
    optimizer = optimizer_for(setting, shared)
    if device == "cuda":
        return single.second_step(setting, _Reached(shared, model), optimizer, before)
    single.step(setting, _Reached(shared, model), optimizer, device)
    alive = Alive(shared, optimizer)
    with alive:
        single.step(setting, _Reached(shared, model), optimizer, device)
    return {"measured": alive.peak}


class Alive(TorchDispatchMode):
    """Bytes of all storages that operations met and that are alive, as large as they are just then:
    FSDP2 lets go of weights by making their storages empty."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.peak, self._known = 0, {}
        self._meet([*model.parameters(), *model.buffers(), list(optimizer.state.values())])

    def _meet(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                storage = getattr(leaf, "_local_tensor", leaf).untyped_storage()
                key = id(storage)
                self._known.setdefault(key, weakref.ref(storage, lambda _, k=key: self._drop(k)))

    def _drop(self, key: int) -> None:
        self._known.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come by next
        out = func(*args, **(kwargs or {}))
        self._meet([args, kwargs, out])
        alive = (ref() for ref in list(self._known.values()))
        self.peak = max(self.peak, sum(one.nbytes() for one in alive if one is not None))
        return out


class _Reached(nn.Module):
    """The wrapper of a model, with what the script asks the model itself."""

    def __init__(self, shared: nn.Module, model: Any) -> None:
        super().__init__()
        self.shared, self.get_input_embeddings = shared, model.get_input_embeddings

    def forward(self, **given: Any) -> Any:
        return self.shared(**given)


@contextmanager
def processes(dry: bool) -> Iterator[None]:
    """Joined as torchrun started them."""
    if not dry:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if dry else "nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare_sharded(asked: argparse.Namespace) -> None:
    """Predict, write down, measure, compare."""
    device = "cpu" if asked.dry else "cuda"
    with processes(asked.dry):
        first = dist.get_rank() == 0
        found = settings(dist.get_world_size(), asked.dry)
        found = [s for s in found if asked.only in (None, s.method, s.model, s.sharding)]
        suite = "plan_sharded_dry" if asked.dry else "plan_sharded"
        known = single.facts(device, asked.commit)
        rows = [{**known, **single.predict(setting, dry=asked.dry)} for setting in found]
        if first:
            append(asked.out, f"{suite}_before", rows)
        for setting, row in zip(found, rows, strict=True):
            row.update(attempted(setting, device))
            if first:
                append(asked.out, suite, [row])
                single.show(row)
        if first:
            single.summary(rows)


def attempted(setting: Setting, device: str) -> dict[str, Any]:
    """Peaks by name and no reason, or the reason: all processes fail at one place, and go on."""
    try:
        return {**together(setting, device), "reason": ""}
    except (RuntimeError, TypeError, ValueError) as error:
        return {"measured": None, "reason": f"{type(error).__name__}: {error}"[:200]}


def together(setting: Setting, device: str) -> dict[str, int]:
    """What the process needed that needed most."""
    sizes = measure(setting, device)
    most = torch.tensor(list(sizes.values()), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
    return dict(zip(sizes, most.tolist(), strict=True))

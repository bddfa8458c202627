"""D49: DoRA under FSDP in two processes trains as in one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hirank
from adapters.setups import perturb, stock
from hirank.testing import relative_rms


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def made():
    torch.manual_seed(0)
    return hirank.accelerate(perturb(stock(Mlp(), target_modules=["up", "down"])))


def train(model, rows=slice(None)):
    """The losses of three steps."""
    draw = torch.Generator().manual_seed(1)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=0.05), []
    for _ in range(3):
        x, y = torch.randn(2, 8, 8, generator=draw)
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def trained(model):
    """Whole tensors of what was trained, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def _layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def fsdp1(rows):
    model = FullyShardedDataParallel(made(), use_orig_params=True, device_id=torch.device("cpu"))
    losses = train(model, rows)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses, trained(model.module)


def fsdp2(rows):
    model = made()
    for part in (*_layers(model), model):
        fully_shard(part)
    losses = train(model, rows)
    return losses, {n: p.full_tensor() for n, p in trained(model).items()}


def factors_apart(rows):
    """A and B as units of their own: what the layer sees of them is a shard."""
    model = made()
    for layer in _layers(model):
        fully_shard(layer.lora_A["default"])
        fully_shard(layer.lora_B["default"])
    fully_shard(model)
    try:
        losses = train(model, rows)
    except RuntimeError as error:
        return str(error)
    return losses, {n: p.full_tensor() for n, p in trained(model).items()}


WAYS = {"fsdp1": fsdp1, "fsdp2": fsdp2, "factors": factors_apart}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name, way in WAYS.items():
            torch.save(way(slice(4 * rank, 4 * rank + 4)), f"{folder}/{name}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process came to. Started once: importing takes longest."""
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(_process, (str(folder),), nprocs=2)
    return lambda name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_d49_two_processes_train_as_one(results, way):
    alone = made()
    losses = train(alone)
    found = results(way)
    if isinstance(found[0], str):  # refused with a sentence, never a wrong number
        assert way == "factors" and "DTensor" in found[0]
        return
    assert relative_rms((found[0][0] + found[1][0]) / 2, losses) < 1e-5
    for _, weights in found:
        for name, weight in trained(alone).items():
            assert relative_rms(weights[name], weight) < 1e-5, name

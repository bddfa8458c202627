"""Two processes: the same weights bit by bit, and those of one process with both halves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from hirank import Apollo, Fira, GaLoreAdamW, QGaLoreAdamW
from hirank.optim.weights import int8_weights
from optim.toys import data, loss, mlp, run_batches, weights

SMALL = {"rank": 4, "gap": 3, "lr": 0.01}


def _process(rank: int, folder: str, work: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        torch.save(work(rank, *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def gloo2(folder: Path, work: Callable, *args: object) -> list:
    """What `work(rank, *args)` returns in either of two processes."""
    mp.spawn(_process, (str(folder), work, args), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def shard(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(8, seed=step)
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def hooked_run(rank: int, cls: type, options: dict, micro_batches: int, clip: float | None):
    model = mlp()
    optimizer = cls(model, **SMALL | options)
    optimizer.step_in_backward(
        micro_batches=micro_batches, clip=clip, process_group=dist.group.WORLD
    )
    for step in range(7):
        x, y = shard(rank, step)
        parts = zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)
        run_batches(optimizer, model, parts)
    return {"weights": weights(model), **int8_weights(model)}


def ddp_run(rank: int, cls: type, options: dict):
    model = mlp()
    optimizer = cls(model, **SMALL | options)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(7):
        run_batches(optimizer, wrapped, [shard(rank, step)])
    return {"weights": weights(model)}


def alone(cls: type, options: dict, clip: float | None = None) -> torch.Tensor:
    model = mlp()
    optimizer = cls(model, **SMALL | options)
    optimizer.step_in_backward(clip=clip)
    for step in range(7):
        run_batches(optimizer, model, [data(8, seed=step)])
    return weights(model)


@pytest.mark.parametrize(
    ("cls", "options", "micro_batches", "clip"),
    [
        (GaLoreAdamW, {}, 1, None),
        (GaLoreAdamW, {}, 2, None),
        (GaLoreAdamW, {"sides": "two"}, 2, 0.1),
        (GaLoreAdamW, {"refresh_from": "first"}, 2, None),
        (Fira, {}, 2, None),
        (Apollo, {}, 1, None),
    ],
    ids=str,
)
def test_g18_reducing_in_the_hook(tmp_path, cls, options, micro_batches, clip):
    first, second = gloo2(tmp_path, hooked_run, cls, options, micro_batches, clip)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone(cls, options, clip), atol=1e-5)


def test_int8_weights_are_bit_equal_on_ranks(tmp_path):
    options = {"state": "int8", "weights": "int8", "lazy": 0.4}
    first, second = gloo2(tmp_path, hooked_run, QGaLoreAdamW, options, 2, None)
    assert len(first) == 7
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{}, {"basis": "random"}], ids=str)
def test_g15_ddp_gives_bit_equal_weights(tmp_path, options: dict):
    first, second = gloo2(tmp_path, ddp_run, GaLoreAdamW, options)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone(GaLoreAdamW, options), atol=1e-5)


def bytes_reduced(rank: int):
    """Bytes handed to all_reduce in a step that refreshes, and in one that does not."""
    sent, real = [], dist.all_reduce

    def counted(tensor: torch.Tensor, **options: object) -> object:
        sent[-1] += tensor.numel() * tensor.element_size()
        return real(tensor, **options)

    dist.all_reduce = counted
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    optimizer = GaLoreAdamW(model, **SMALL)
    optimizer.step_in_backward(process_group=dist.group.WORLD)
    for step in range(2):
        sent.append(0)
        loss(model, *shard(rank, step)).backward()
        optimizer.step()
    dist.all_reduce = real
    return sent


def test_g17_between_refreshes_only_projections_are_sent(tmp_path):
    full, projected = (32 * 64 + 64 * 8) * 4, (4 * 64 + 4 * 64) * 4
    assert gloo2(tmp_path, bytes_reduced) == [[full, projected]] * 2

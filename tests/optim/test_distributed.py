"""Two processes: the same weights bit by bit, and those of one process with both halves."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hirank import Apollo, Fira, GaLoreAdamW, HirankError, QGaLoreAdamW
from hirank.optim.weights import int8_weights
from optim.toys import data, loss, mlp, run_batches, weights

SMALL = {"rank": 4, "gap": 3, "lr": 0.01}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for name, (work, *args) in SCENARIOS.items():
            torch.save(work(rank, *args), f"{folder}/{name}-{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list]:
    """What each of two processes returned for a scenario. Started once: importing takes longest."""
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(_process, (str(folder),), nprocs=2)
    return lambda name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


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


def ddp_run(rank: int, cls: type, options: dict, projected: bool):
    model = mlp()
    optimizer = cls(model, **SMALL | options)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if projected:
        optimizer.project_reduction(wrapped)
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


HOOKED = {
    "galore": (GaLoreAdamW, {}, 1, None),
    "galore-accumulated": (GaLoreAdamW, {}, 2, None),
    "two-sided-clipped": (GaLoreAdamW, {"sides": "two"}, 2, 0.1),
    "refresh-from-first": (GaLoreAdamW, {"refresh_from": "first"}, 2, None),
    "fira": (Fira, {}, 2, None),
    "apollo": (Apollo, {}, 1, None),
}
INT8 = {"state": "int8", "weights": "int8", "lazy": 0.4}
DDP = {
    "ddp": (GaLoreAdamW, {}, False),
    "ddp-random": (GaLoreAdamW, {"basis": "random"}, False),
    "ddp-projected": (GaLoreAdamW, {}, True),
    "ddp-projected-int4": (GaLoreAdamW, {"basis_store": "int4"}, True),
    "ddp-projected-two-sided": (GaLoreAdamW, {"sides": "two"}, True),
    "ddp-projected-fira": (Fira, {}, True),
}


@pytest.mark.parametrize("name", HOOKED)
def test_g18_reducing_in_the_hook(results, name: str):
    first, second = results(name)
    cls, options, _, clip = HOOKED[name]
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone(cls, options, clip), atol=1e-5)


def test_int8_weights_are_bit_equal_on_ranks(results):
    first, second = results("int8")
    assert len(first) == 7
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", DDP)
def test_g15_ddp_gives_bit_equal_weights(results, name: str):
    first, second = results(name)
    cls, options, _ = DDP[name]
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone(cls, options), atol=1e-5)


def bytes_reduced(rank: int, ddp: bool):
    """Bytes handed to all_reduce in a step that refreshes, and in one that does not."""
    sent, real = [], dist.all_reduce

    def counted(tensor: torch.Tensor, **options: object) -> object:
        sent[-1] += tensor.numel() * tensor.element_size()
        return real(tensor, **options)

    dist.all_reduce = counted
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    optimizer = GaLoreAdamW(model, **SMALL)
    if ddp:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer.project_reduction(model)
    else:
        optimizer.step_in_backward(process_group=dist.group.WORLD)
    for step in range(2):
        sent.append(0)
        loss(model, *shard(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce = real
    return sent


@pytest.mark.parametrize("name", ["bytes", "bytes-ddp"])
def test_g17_between_refreshes_only_projections_are_sent(results, name: str):
    full, projected = (32 * 64 + 64 * 8) * 4, (4 * 64 + 4 * 64) * 4
    assert results(name) == [[full, projected]] * 2


# FSDP2.


def odd_mlp() -> nn.Sequential:
    """Sizes that two processes cannot share evenly; one layer is projected on each side."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 65), nn.Tanh(), nn.Linear(65, 9), nn.Tanh(), nn.Linear(9, 8))


def sharded_run(rank: int, cls: type, options: dict, hooked: bool, clip: float | None):
    model = odd_mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = cls(model, **SMALL | options)
    engine = optimizer.step_in_backward(clip=clip) if hooked else None
    for step in range(7):
        run_batches(optimizer, model, [shard(rank, step)])
    made = {"weights": torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])}
    made["moments"] = torch.cat(
        [
            optimizer.state[p][name].flatten()
            for p in optimizer.projected()
            for name in ("exp_avg", "exp_avg_sq")
        ]
    )
    assert engine is None or engine.calls == 7 * 4  # three matrices, and three biases together
    assert optimizer.cost() == optimizer.state_bytes()
    return made


def whole_run(cls: type, options: dict, clip: float | None) -> torch.Tensor:
    model = odd_mlp()
    optimizer = cls(model, **SMALL | options)
    optimizer.step_in_backward(clip=clip)
    for step in range(7):
        run_batches(optimizer, model, [data(8, seed=step)])
    return weights(model)


SHARDED = {
    "fsdp2": (GaLoreAdamW, {"weight_decay": 0.1}, False, None),
    "fsdp2-hooked": (GaLoreAdamW, {}, True, None),
    "fsdp2-two-sided-clipped": (GaLoreAdamW, {"sides": "two"}, True, 0.05),
    "fsdp2-all-but-int8-weights": (QGaLoreAdamW, {"weights": "keep"}, True, None),
    "fsdp2-fira": (Fira, {}, True, None),
    "fsdp2-apollo-clipped": (Apollo, {}, True, 0.05),
}


@pytest.mark.parametrize("name", SHARDED)
def test_g09_g16_fsdp2_trains_like_one_process(results, name: str):
    first, second = results(name)
    cls, options, _, clip = SHARDED[name]
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["moments"], second["moments"])
    assert torch.allclose(first["weights"], whole_run(cls, options, clip), atol=1e-5)
    assert not torch.equal(first["weights"], weights(odd_mlp()))


def poisoned_run(rank: int):
    """A gradient that is not finite in one process's rows only."""
    model = odd_mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = GaLoreAdamW(model, **SMALL)
    run_batches(optimizer, model, [shard(rank, 0)])
    before = [p.to_local().clone() for p in model.parameters()]
    loss(model, *shard(rank, 1)).backward()
    for p in model.parameters():
        if rank == 1:
            p.grad.to_local().fill_(float("nan"))
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    return all(torch.equal(a, b.to_local()) for a, b in pairs)


def test_g12_all_processes_skip_together(results):
    assert results("poisoned") == [True, True]


def refusing_run(rank: int):
    model = odd_mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(HirankError, match="process_group"):
        GaLoreAdamW(model).step_in_backward(process_group=dist.group.WORLD)
    return True


def test_fsdp2_needs_no_process_group(results):
    assert results("refusing") == [True, True]


def int8_refused(rank: int):
    model = odd_mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(HirankError) as caught:
        QGaLoreAdamW(model, rank=4)
    return str(caught.value)


def test_int8_weights_cannot_be_sharded_and_the_reason_is_said(results):
    for said in results("int8-refused"):
        assert said.startswith("0.weight is sharded by FSDP2") and "weights='keep'" in said
        assert said.count(".") == 2 and said.endswith(".")  # one sentence, and a name with a dot


SCENARIOS = {
    **{name: (hooked_run, *args) for name, args in HOOKED.items()},
    **{name: (ddp_run, *args) for name, args in DDP.items()},
    **{name: (sharded_run, *args) for name, args in SHARDED.items()},
    "int8": (hooked_run, QGaLoreAdamW, INT8, 2, None),
    "bytes": (bytes_reduced, False),
    "bytes-ddp": (bytes_reduced, True),
    "poisoned": (poisoned_run,),
    "refusing": (refusing_run,),
    "int8-refused": (int8_refused,),
}

"""Small things to train, and an independent GaLore in fp64."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hirank.optim.optimizer import LowRankAdamW

GL = {"rank": 4, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def everything(seed: int = 0) -> nn.Sequential:
    """Embedding, norm, linears."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 50)
    )


def data(rows: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 32, generator=draw), torch.randn(rows, 8, generator=draw)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    draw = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))


def grads(
    count: int, *shape: int, seed: int = 5, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(count))
    return [g.to(dtype) for g in made]


def run(optimizer: torch.optim.Optimizer, p: nn.Parameter, gradients: Iterable[Tensor]) -> Tensor:
    """Step through `gradients`; the weights afterwards."""
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
        optimizer.zero_grad()
    return p.detach().clone()


def run_batches(
    optimizer: LowRankAdamW, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Micro-batches of one step: losses are divided by their number."""
    batches = list(batches)
    for x, y in batches:
        (loss(model, x, y) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def snapshot(state: dict) -> dict:
    return copy.deepcopy(state)


def same(a: object, b: object) -> bool:
    """Nested dicts, numbers and tensors, bit by bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def galore_by_definition(
    w: Tensor,
    gradients: Iterable[Tensor],
    *,
    rank: int,
    gap: int,
    lr: float,
    scale: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    basis: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Alg. 2 of the paper in the dtype of `w`, moments stored as Adam stores them."""
    w = w.clone()
    tall = w.shape[0] >= w.shape[1]  # a square one too, as in galore-torch
    trail = []
    for t, g in enumerate(gradients):
        if tall:
            g = g.T
        if t % gap == 0:
            p = basis(g)
            assert p.shape == (g.shape[0], rank)
        r = p.T @ g
        if t == 0:
            m, v = torch.zeros_like(r), torch.zeros_like(r)
        m = betas[0] * m + (1 - betas[0]) * r
        v = betas[1] * v + (1 - betas[1]) * r**2
        n = (m / (1 - betas[0] ** (t + 1))) / ((v / (1 - betas[1] ** (t + 1))).sqrt() + eps)
        update = scale * p @ n
        w = w - lr * weight_decay * w - lr * (update.T if tall else update)
        trail.append(w.clone())
    return trail

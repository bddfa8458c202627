"""The experiments behind docs/claims.md, each a function of its sizes: seeded, on a CPU.

    first_steps         how far the first step moves a weight, by rank, at one alpha
    adam_fits           Adam on a target of rank 8: how near to the best there is, and how it stays
    parameter_counts    what an adapter of a model trains, counted by PEFT
    bf16_distortion     what is left of an increment that was merged into bf16

Nothing of hirank is used here: these are the numbers that its own are held against.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[str, list[str]] = {
    "q, v": ["q_proj", "v_proj"],
    "attention": ATTENTION,
    "all linear": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
}

# How far the first step goes.


def first_steps(
    ranks: Iterable[int], *, rows: int, width: int, alpha: float = 16, seed: int = 0
) -> list[dict[str, Any]]:
    """Frobenius norm of s B A after one step of stock PEFT at learning rate 1, by SGD and Adam.

    The layer maps `width` to `rows`; tokens and what reaches the output backwards are Gaussian.
    """
    found = []
    for rank in ranks:
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"])
        model = get_peft_model(nn.Sequential(nn.Linear(width, rows, bias=False)), config)
        x, dy = torch.randn(512, width), torch.randn(512, rows)
        (model(x) * dy).sum().backward()
        for kind in (torch.optim.SGD, torch.optim.Adam):
            found.append({"optimizer": kind.__name__, "rank": rank, "norm": _stepped(model, kind)})
    return found


def _stepped(model: Any, kind: type[torch.optim.Optimizer]) -> float:
    """|s B A| after a step, and B back to zero."""
    layer = model.base_model.model[0]
    B = layer.lora_B["default"].weight
    kind([B, layer.lora_A["default"].weight], lr=1.0).step()
    norm = float(layer.get_delta_weight("default").detach().norm())
    B.data.zero_()
    return norm


def fall(steps: Iterable[dict[str, Any]], optimizer: str) -> float:
    """The step at the lowest rank over that at the highest."""
    norms = {step["rank"]: step["norm"] for step in steps if step["optimizer"] == optimizer}
    return float(norms[min(norms)] / norms[max(norms)])


# Adam against the best approximation.


def target(size: int, rank: int = 8, decay: float = 0.8, seed: int = 0) -> Tensor:
    """[size, size] in fp64, singular values that fall by `decay`, entries of about 1/8."""
    generator = torch.Generator().manual_seed(seed)

    def basis() -> Tensor:
        return torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q

    values = decay ** torch.arange(rank, dtype=torch.float64)
    return (basis() * (values * size / 8 / values.norm())) @ basis().T


def adam_fits(
    ranks: Iterable[int], *, size: int, steps: int, lr: float = 1e-2, seed: int = 0
) -> list[dict[str, Any]]:
    """|B A - T| / |T| under Adam at a constant rate in fp32, beside the Eckart-Young floor.

    best and best_step: the least that was reached, and when; worst_after: the most after it.
    """
    wanted = target(size, seed=seed)
    values = torch.linalg.svdvals(wanted)
    found = []
    for rank in ranks:
        errors = _fit(wanted.float(), rank, steps, lr, seed)
        best = min(range(steps), key=errors.__getitem__)
        found.append(
            {
                "rank": rank,
                "floor": float(values[rank:].norm() / values.norm()),
                "best": errors[best],
                "best_step": best,
                "worst_after": max(errors[best:]),
                "end": errors[-1],
            }
        )
    return found


def _fit(wanted: Tensor, rank: int, steps: int, lr: float, seed: int) -> list[float]:
    torch.manual_seed(seed)
    A, B = nn.Linear(wanted.shape[1], rank, bias=False).weight, torch.zeros(len(wanted), rank)
    optimizer = torch.optim.Adam([A, B.requires_grad_()], lr=lr)
    errors, length = [], wanted.norm()
    for _ in range(steps):
        off = B @ A - wanted
        errors.append(float((off.norm() / length).detach()))
        optimizer.zero_grad()
        (off.square().sum() / 2).backward()
        optimizer.step()
    return errors


# How many parameters.


def llama_3_8b(layers: int = 32) -> LlamaConfig:
    """The shapes of the published config.json."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def qwen2_5_7b(layers: int = 28, intermediate: int = 18944) -> Qwen2Config:
    """The shapes of the published config.json."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def on_meta(config: Any) -> Any:
    """The model of a configuration, without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def parameter_counts(config: Any, targets: Sequence[str], rank: int, *, dora: bool = False) -> int:
    """Trainable parameters of stock PEFT on the model of `config`."""
    model = on_meta(config)
    settings = LoraConfig(r=rank, target_modules=list(targets), use_dora=dora)
    with torch.device("meta"):
        peft = get_peft_model(model, settings, low_cpu_mem_usage=True)
    return sum(p.numel() for p in peft.parameters() if p.requires_grad)


# What bf16 does to an increment.


def bf16_distortion(
    rank: int, alpha: float, *, size: int, entry: float = 1e-3, seed: int = 0
) -> dict[str, Any]:
    """RMS of (merged - W - s B A) over RMS of s B A, merged in fp32 and rounded once to bf16.

    W is Gaussian with 0.02, A as PEFT initialises it, B Gaussian with `entry`: what ten steps of
    Adam at 1e-4 make of it. `fp32_base` starts from W in fp32, `bf16_base` from W rounded to bf16,
    as checkpoints have it; `swallowed`: elements that merging into that base does not change.
    """
    torch.manual_seed(seed)
    weight = 0.02 * torch.randn(size, size)
    A = nn.Linear(size, rank, bias=False).weight.detach()
    step = (alpha / rank) * (entry * torch.randn(size, rank)) @ A
    rounded = weight.bfloat16().float()
    merged, on_grid = (_to_bf16(base + step) for base in (weight, rounded))
    return {
        "rank": rank,
        "alpha": alpha,
        "rms": float(step.square().mean().sqrt()),
        "fp32_base": float((merged - weight - step).norm() / step.norm()),
        "bf16_base": float((on_grid - rounded - step).norm() / step.norm()),
        "swallowed": float((on_grid == rounded).double().mean()),
    }


def _to_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()

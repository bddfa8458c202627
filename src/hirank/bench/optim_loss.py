"""The loss of a language model without all of its logits, so that a step's peak is elsewhere.

2048 tokens of 32,000 entries are 262 MB in fp32, and a plain loss holds them four times: more than
all of a 7B's activations with checkpointing. Here they exist for CHUNK tokens at a time, and both
gradients are made on the way, as trainers' fused losses do. Every arm has it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hirank.optim.away import kept_on_host

__all__ = ["CHUNK", "next_token_loss"]

CHUNK = 256


def next_token_loss(model: nn.Module, ids: Tensor, *, offload: bool = False) -> Tensor:
    """Mean cross-entropy of the next token over ids [rows, seq]; `model` is a causal LM with a head
    without bias. `offload`: what its decoder keeps waits on the host."""
    whole: Any = model
    with kept_on_host() if offload else nullcontext():
        hidden = whole.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    head = whole.get_output_embeddings().weight
    before = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    loss: Tensor = _HeadLoss.apply(before, head, ids[:, 1:].reshape(-1))  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    """hidden [n, h], weight [v, h], target [n] -> the mean loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, len(target), CHUNK):
            part = slice(at, at + CHUNK)
            total += _chunk(hidden[part], weight, target[part], d_hidden[part], d_weight)
        for gradient in (d_hidden, d_weight):
            gradient.div_(len(target))
        ctx.save_for_backward(d_hidden, d_weight)
        return total / len(target)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(d_loss), d_weight.mul_(d_loss), None


def _chunk(
    hidden: Tensor, weight: Tensor, target: Tensor, d_hidden: Tensor, d_weight: Tensor
) -> Tensor:
    """The summed loss; its gradients are written, and added."""
    logp = torch.log_softmax((hidden @ weight.T).float(), -1)
    loss = -logp.gather(1, target[:, None]).sum()
    slope = logp.exp_()
    slope.scatter_add_(1, target[:, None], slope.new_full((len(target), 1), -1.0))
    narrow = slope.to(weight.dtype)
    torch.mm(narrow, weight, out=d_hidden)
    d_weight.addmm_(narrow.T, hidden)
    return loss

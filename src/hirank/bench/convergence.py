"""Suite `convergence`: the same training by stock PEFT and by hirank; how far do the losses part?

Same start, same batches in the same order, same optimizer. `loss_difference` is the mean over all
steps of |loss - stock's loss| on the same batch, `eval_difference` the same for the held-out loss
after the last step.

Two trainings part by themselves once anything rounds differently. How far is shown by a third:
`peft-dora-ulp` is stock PEFT from a start whose weights are all larger by the last bit of fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.adapters.peft import accelerate, explain
from hirank.bench import arms as arms_
from hirank.bench.session import Result, Session
from hirank.bench.settings import Convergence
from hirank.errors import HirankError

__all__ = ["ARMS", "run"]

REFERENCE = "peft-dora"
ARMS = (REFERENCE, "peft-dora-ulp", "hirank-dora")
_EVAL_BATCHES = 16
_PRETRAIN_LR = 1e-3


@dataclass(frozen=True)
class _Run:
    """One training under way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of the next token over ids [batch, seq]."""
        with arms_.autocast(self.device):
            logits = self.model(input_ids=ids, use_cache=False).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def step(self, ids: Tensor) -> Tensor:
        """The loss before this optimizer step, not waited for."""
        loss = self.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Mean loss over held-out batches."""
        return sum(float(self.loss(ids)) for ids in batches) / len(batches)


def run(settings: Convergence, session: Session) -> list[Result]:
    """Train all arms, batch by batch in turn. Stock PEFT is always among them."""
    base = session.base(settings.model)
    train, held_out = _batches(settings, base, session.device)
    learnt = [train[step % len(train)] for step in range(settings.pretrain)]
    base = _pretrained(base, learnt, session.device)
    names = list(dict.fromkeys([REFERENCE, *session.chosen(ARMS)]))
    runs = {name: _start(base, name, settings, session.device) for name in names}
    _same_start(runs)
    kept: dict[str, list[Tensor]] = {name: [] for name in runs}
    for step in range(settings.steps):
        for name, one in runs.items():
            kept[name].append(one.step(train[(settings.pretrain + step) % len(train)]))
        if (step + 1) % 50 == 0:
            latest = ", ".join(f"{name} {float(kept[name][-1]):.4f}" for name in kept)
            session.say(f"step {step + 1}: {latest}")
    losses = {name: torch.stack(found).tolist() for name, found in kept.items()}
    final = {name: one.evaluate(held_out) for name, one in runs.items()}
    routes = {
        name: {"route": explain(one.model).summary()}
        for name, one in runs.items()
        if name.startswith("hirank")
    }
    return [Result(n, _metrics(n, losses, final) | routes.get(n, {})) for n in runs]


def _pretrained(base: nn.Module, batches: Sequence[Tensor], device: torch.device) -> nn.Module:
    """A frozen copy of `base` that has learnt from `batches`, its weights in fp32 meanwhile."""
    model = copy.deepcopy(base).float().requires_grad_(True).train()
    one = _Run(model, torch.optim.AdamW(model.parameters(), lr=_PRETRAIN_LR), device)
    for ids in batches:
        one.step(ids)
    for parameter in model.parameters():  # not the buffers: positions are in fp32 anywhere
        parameter.data = parameter.data.to(arms_.base_dtype(device))
        parameter.grad = None
    return model.requires_grad_(False)


def _metrics(name: str, losses: dict[str, list[float]], final: dict[str, float]) -> dict[str, Any]:
    pairs = list(zip(losses[name], losses[REFERENCE], strict=True))
    return {
        "first_loss": losses[name][0],
        "last_loss": losses[name][-1],
        "eval_loss": final[name],
        "loss_difference": sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs),
        "eval_difference": abs(final[name] - final[REFERENCE]),
        "losses": losses[name],
    }


def _start(base: nn.Module, name: str, settings: Convergence, device: torch.device) -> _Run:
    torch.manual_seed(0)
    model = arms_.copy_sharing_weights(base)
    with device:
        model = arms_.adapt(model, dora=True, rank=settings.rank, to="all-linear")
    if name.startswith("hirank"):
        accelerate(model)
    weights = arms_.trainable(model).values()
    fused = device.type == "cuda"
    return _Run(model.train(), torch.optim.AdamW(weights, lr=settings.lr, fused=fused), device)


@torch.no_grad()
def _same_start(runs: dict[str, _Run]) -> None:
    """All runs begin with the same values, m as an fp32 norm: stock PEFT rounds it to the base."""
    models = {name: arms_.trainable(one.model) for name, one in runs.items()}
    first = models.get("hirank-dora", models[REFERENCE])
    for name, weights in models.items():
        for key, parameter in weights.items():
            parameter.copy_(first[key])
            if name.endswith("-ulp"):
                parameter.copy_(torch.nextafter(parameter, parameter + 1))


def _batches(
    settings: Convergence, base: nn.Module, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Batches [batch, seq] in the order of the text; the last tenth is held out."""
    ids = torch.tensor(_token_ids(settings))
    rows = ids.numel() // settings.seq
    count = rows // settings.batch
    if count < 10:
        raise HirankError(
            f"--text {settings.text} has {ids.numel()} tokens: give a text of at least "
            f"{10 * settings.batch * settings.seq}, or a smaller --seq or --batch."
        )
    used = ids[: count * settings.batch * settings.seq].to(device)
    batches = list(used.view(count, settings.batch, settings.seq))
    cut = count - max(1, min(_EVAL_BATCHES, count // 10))
    return batches[:cut], batches[cut:]


def _token_ids(settings: Convergence) -> list[int]:
    path = Path(settings.text)
    if not settings.text or not path.is_file():
        raise HirankError(f"--text got {settings.text!r}: give a text file to learn from.")
    if not Path(settings.model).is_dir():
        return list(path.read_bytes())
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
    found: list[int] = tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return found

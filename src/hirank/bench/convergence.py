"""Suite `convergence`: the same training by stock PEFT and by hirank; how far do the losses part?

Same start, same batches in the same order, same optimizer. `loss_difference` is the mean over all
steps of |loss - stock's loss| on the same batch, `eval_difference` the same for the held-out loss
after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.adapters.peft import accelerate
from hirank.bench import arms as arms_
from hirank.bench.session import Result, Session
from hirank.bench.settings import Convergence
from hirank.errors import HirankError

__all__ = ["ARMS", "run"]

ARMS = ("peft-dora", "hirank-dora")
_EVAL_BATCHES = 16


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

    def step(self, ids: Tensor) -> float:
        """The loss before this optimizer step."""
        loss = self.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Tensor]) -> float:
        """Mean loss over held-out batches."""
        return sum(float(self.loss(ids)) for ids in batches) / len(batches)


def run(settings: Convergence, session: Session) -> list[Result]:
    """Train both, batch by batch in turn."""
    base = session.base(settings.model)
    train, held_out = _batches(settings, base, session.device)
    runs = {name: _start(base, name, settings, session.device) for name in ARMS}
    _same_start(runs)
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(settings.steps):
        ids = train[step % len(train)]
        for name, one in runs.items():
            losses[name].append(one.step(ids))
        if (step + 1) % 50 == 0:
            latest = ", ".join(f"{name} {losses[name][-1]:.4f}" for name in losses)
            session.say(f"step {step + 1}: {latest}")
    final = {name: one.evaluate(held_out) for name, one in runs.items()}
    return [Result(name, _metrics(name, losses, final)) for name in runs]


def _metrics(name: str, losses: dict[str, list[float]], final: dict[str, float]) -> dict[str, Any]:
    pairs = list(zip(losses[name], losses[ARMS[0]], strict=True))
    return {
        "first_loss": losses[name][0],
        "last_loss": losses[name][-1],
        "eval_loss": final[name],
        "loss_difference": sum(abs(ours - theirs) for ours, theirs in pairs) / len(pairs),
        "eval_difference": abs(final[name] - final[ARMS[0]]),
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
    """All runs begin with hirank's values: stock PEFT rounds m to the base dtype."""
    first = arms_.trainable(runs[ARMS[-1]].model)
    for one in runs.values():
        for name, parameter in arms_.trainable(one.model).items():
            parameter.copy_(first[name])


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

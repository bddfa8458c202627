"""Suite `pretrain`: a small Llama learns a text from nothing, once with each optimiser.

Same start, same batches in the same order, same schedule (a warmup, then a cosine down to a tenth).
AdamW has a learning rate of its own; every other arm has `lr`, multiplied by `scale` where a weight
is projected, as in the papers. A two-sided arm has the largest rank whose state is not larger than
that of the one-sided arm with the same bases. Weights are in fp32, on a GPU under bf16 autocast, so
that what differs is the optimiser; Q-GaLore's are int8.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hirank.bench import arms as arms_
from hirank.bench.optim_rivals import galore_torch
from hirank.bench.session import Result, Session
from hirank.bench.settings import Pretrain
from hirank.errors import HirankError
from hirank.optim.optimizer import LowRankAdamW
from hirank.optim.presets import Apollo, Fira, GaLoreAdamW, QGaLoreAdamW

__all__ = ["ARMS", "run"]

_EVAL_ROWS, _CURVE, _SAID = 256, 100, 100
_LOWEST, _WARMUP = 0.1, 0.1

Make = Callable[[nn.Module, Pretrain], torch.optim.Optimizer]


# Optimisers.


def _shared(settings: Pretrain) -> dict[str, Any]:
    return {"lr": settings.lr, "rank": settings.rank, "gap": settings.gap, "seed": settings.seed}


def _preset(cls: type[LowRankAdamW], **more: Any) -> Make:
    def make(model: nn.Module, settings: Pretrain) -> LowRankAdamW:
        return cls(model, **_shared(settings), **{"scale": settings.scale} | more)

    return make


def _two_sided(**more: Any) -> Make:
    def make(model: nn.Module, settings: Pretrain) -> LowRankAdamW:
        allowed = GaLoreAdamW(model, **_shared(settings), **more).cost()
        rank = settings.rank
        while _two(model, settings, rank + 1, **more).cost() <= allowed and rank < settings.hidden:
            rank += 1
        return _two(model, settings, rank, **more)

    return make


def _two(model: nn.Module, settings: Pretrain, rank: int, **more: Any) -> LowRankAdamW:
    options = _shared(settings) | {"rank": rank} | more
    return GaLoreAdamW(model, **options, scale=settings.scale, sides="two")


def _adamw(model: nn.Module, settings: Pretrain) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=settings.adamw_lr, weight_decay=0.0)


def _galore_torch(model: nn.Module, settings: Pretrain) -> torch.optim.Optimizer:
    return galore_torch(
        model, rank=settings.rank, gap=settings.gap, scale=settings.scale, lr=settings.lr
    )


_MAKERS: dict[str, Make] = {
    "adamw": _adamw,
    "galore-torch": _galore_torch,
    "hirank-galore": _preset(GaLoreAdamW),
    "hirank-galore-two": _two_sided(),
    "hirank-galore-int4": _preset(GaLoreAdamW, basis_store="int4"),
    "hirank-galore-two-int4": _two_sided(basis_store="int4"),
    "hirank-qgalore": _preset(QGaLoreAdamW),
    "hirank-fira": _preset(Fira),
    "hirank-apollo": _preset(Apollo, scale=1.0),
}
ARMS = tuple(_MAKERS)


# Training.


def run(settings: Pretrain, session: Session) -> list[Result]:
    """Train all arms, one after the other."""
    tokens = _tokens(settings)
    cut = len(tokens) - _held_out_tokens(settings, len(tokens))
    found = []
    for name in session.chosen(ARMS):
        session.say(f"{name} ...")
        found.append(Result(name, _trained(name, settings, session, tokens[:cut], tokens[cut:])))
        said = found[-1].metrics
        session.say(f"{name}: held-out loss {said['eval_loss']:.4f} in {said['train_s']:.0f} s")
        session.tidy()
    return found


def _trained(
    name: str, settings: Pretrain, session: Session, train: Tensor, held_out: Tensor
) -> dict[str, Any]:
    model = _model(settings, session.device)
    optimizer = _MAKERS[name](model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, settings))
    losses, start = [], time.perf_counter()
    for ids in _batches(settings, train):
        loss = _loss(model, ids.to(session.device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) % _SAID == 0:
            session.say(f"{name} {len(losses)}/{settings.steps}: loss {float(losses[-1]):.3f}")
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start
    return _facts(optimizer) | {
        "eval_loss": _evaluated(model.eval(), held_out, settings, session.device),
        "first_loss": curve[0],
        "train_s": seconds,
        "losses": curve[:: max(1, len(curve) // _CURVE)],
    }


def _model(settings: Pretrain, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    if settings.heads < 1 or settings.hidden % (2 * settings.heads):
        raise HirankError(
            f"--hidden {settings.hidden} does not divide into {settings.heads} heads of an even "
            "width: choose other --heads."
        )
    config: Any = LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=32 * math.ceil(settings.hidden * 8 / 3 / 32),
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.seq,
        tie_word_embeddings=False,
    )
    torch.manual_seed(settings.seed)
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(device).train()


def _factor(step: int, settings: Pretrain) -> float:
    """Of the learning rate after `step` steps."""
    warm = max(1, round(_WARMUP * settings.steps))
    if step < warm:
        return (step + 1) / warm
    share = min(1.0, (step - warm) / max(1, settings.steps - warm))
    return _LOWEST + (1 - _LOWEST) * (1 + math.cos(math.pi * share)) / 2


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token over ids [rows, seq]."""
    with arms_.autocast(ids.device):
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def _evaluated(model: nn.Module, tokens: Tensor, settings: Pretrain, device: torch.device) -> float:
    rows = tokens[: len(tokens) // settings.seq * settings.seq].view(-1, settings.seq)
    parts = torch.split(rows[:_EVAL_ROWS], settings.batch)
    summed = sum(float(_loss(model, ids.to(device))) * len(ids) for ids in parts)
    return summed / sum(map(len, parts))


def _facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bytes of the state, and what an optimiser of ours says of itself."""
    if isinstance(optimizer, LowRankAdamW):
        ranks = [group["rank"] for group in optimizer.param_groups if group["rank"]]
        return {
            "state_bytes": optimizer.state_bytes(),
            "rank": max(ranks),
            "optimizer": optimizer.describe(),
        }
    return {"state_bytes": sum(map(_bytes, optimizer.state.values()))}


def _bytes(state: dict[str, Any]) -> int:
    kept = [*state.values(), getattr(state.get("projector"), "ortho_matrix", None)]
    return sum(t.numel() * t.element_size() for t in kept if isinstance(t, Tensor) and t.dim())


# Text.


def _held_out_tokens(settings: Pretrain, count: int) -> int:
    wanted = min(_EVAL_ROWS * settings.seq, count // 10)
    if wanted < settings.seq:
        raise HirankError(
            f"--text {settings.text} has {count} tokens: give at least {10 * settings.seq}, or a "
            "smaller --seq."
        )
    return wanted


def _batches(settings: Pretrain, tokens: Tensor) -> Iterator[Tensor]:
    """[batch, seq] of every step, at places of the text that the seed draws."""
    draw = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        at = torch.randint(0, len(tokens) - settings.seq, (settings.batch, 1), generator=draw)
        yield tokens[at + torch.arange(settings.seq)]


def _tokens(settings: Pretrain) -> Tensor:
    path = Path(settings.text)
    if not settings.text or not path.is_file():
        raise HirankError(f"--text got {settings.text!r}: give a text file to learn from.")
    if settings.vocab == 256:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    return _once(path, settings.vocab)


def _once(path: Path, vocab: int) -> Tensor:
    """The tokens, from the temporary folder if an earlier run of the same text left them there:
    arms are best run one a command, so that a run that is killed loses one."""
    key = hashlib.sha256(path.read_bytes() + f"{vocab} {version('tokenizers')}".encode())
    kept = Path(tempfile.gettempdir()) / f"hirank-tokens-{key.hexdigest()[:20]}.pt"
    if kept.is_file():
        found: Tensor = torch.load(kept, weights_only=True)
        return found.long()
    made = torch.tensor(_learnt_tokens(path, vocab), dtype=torch.int32)
    draft = kept.with_suffix(f".{os.getpid()}")
    torch.save(made, draft)
    draft.replace(kept)
    return made.long()


def _learnt_tokens(path: Path, vocab: int) -> Sequence[int]:
    """Byte pairs learnt from the text itself, so that nothing has to be downloaded."""
    from tokenizers import ByteLevelBPETokenizer

    if vocab < 256:
        raise HirankError(f"--vocab got {vocab}: give at least 256, which is bytes.")
    tokenizer: Any = ByteLevelBPETokenizer()
    tokenizer.train([str(path)], vocab_size=vocab, show_progress=False)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [number for one in tokenizer.encode_batch(lines) for number in one.ids]

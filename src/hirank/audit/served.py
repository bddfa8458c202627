"""What an exported folder says, against what it was made from: an adapter, or a whole model.

    base, unmerged, merged    log-probability of a token, mean over the scored tokens of all prompts
    gain     unmerged - base: what the training is worth on these prompts
    shift    mean over the prompts of |merged - unmerged|, each as often as it has scored tokens
    distance ||merged - unmerged|| / ||unmerged - base||, of the logits

Plain Transformers reads the folder, as whoever serves it would. On a CPU all three compute in fp32,
so that the weights alone make the difference; on a GPU in the dtype they are stored in.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hirank.adapters.export import CONFIG_FILE, load_adapter
from hirank.adapters.few_bits import as_trained, quantised_layers
from hirank.errors import HirankError

__all__ = ["Prompt", "Served", "probe", "served"]

EATEN, NIBBLED = 1.0, 0.1
"""Shift over gain from which the merge is no good, and from which it is not fully good."""


class Prompt(NamedTuple):
    """Tokens, and which of them are scored (the first never is)."""

    input_ids: list[int]
    scored: list[bool]


@dataclass(frozen=True)
class Served:
    """Log-probabilities in nats."""

    prompts: int
    tokens: int
    """Scored ones."""
    base: float
    unmerged: float
    merged: float
    shift: float
    distance: float

    @property
    def gain(self) -> float:
        return self.unmerged - self.base

    @property
    def good(self) -> bool:
        """Whether the merge keeps what the adapter gained; False, too, where it gained nothing."""
        almost = EATEN * (1 - 1e-6)  # sums that are equal but for their rounding
        return self.gain > 0 and self.shift < almost * self.gain

    @property
    def told(self) -> str:
        """One sentence."""
        numbers = (
            f"log-probability a token: base {self.base:.4f}, adapter {self.unmerged:.4f}, merged "
            f"{self.merged:.4f}"
        )
        if self.gain <= 0:
            return f"The adapter gains nothing on these prompts: they judge no merge ({numbers})."
        share = f"the merge shifts {100 * self.shift / self.gain:.2g} % of the adapter's gain"
        if not self.good:
            return f"Not good: {share} ({numbers}); serve the adapter unmerged."
        word = "Good" if self.shift < NIBBLED * self.gain else "Partly good"
        return f"{word}: {share} ({numbers})."

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"gain": self.gain, "good": self.good, "told": self.told}


def probe(vocabulary: int, *, rows: int = 2, length: int = 24) -> list[Prompt]:
    """Tokens that any model takes, for where there are no prompts. Seeded."""
    dice = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (rows, length), generator=dice).tolist()
    return [Prompt(ids, [True] * length) for ids in drawn]


class _Said(NamedTuple):
    totals: list[float]  # of each prompt, over its scored tokens
    logits: list[Tensor]  # of each prompt, fp32, on the CPU


def served(
    base: Path,
    source: Path,
    export: Path,
    prompts: Sequence[Prompt],
    *,
    trained_on: str | None = None,
) -> Served:
    """Load the three one after another and let each score the prompts.

    `source` is what was trained and `export` what was made of it; each may be an adapter of `base`
    or a model. `trained_on` names the few bits that the base was held in beside the adapter, see
    `hirank.adapters.few_bits`.

    Raises:
        HirankError: a folder that plain Transformers does not load whole; nothing to score.
    """
    count = sum(sum(prompt.scored[1:]) for prompt in prompts)
    if not count:
        raise HirankError("The prompts hold no token to score: give them answers.")
    plain = _scores(base, _loaded(base, trained_on), prompts)
    unmerged = _scores(source, _opened(source, base, trained_on), prompts)
    joined = _scores(export, _opened(export, base, trained_on), prompts)
    pairs = zip(joined.totals, unmerged.totals, strict=True)
    return Served(
        prompts=len(prompts),
        tokens=count,
        base=sum(plain.totals) / count,
        unmerged=sum(unmerged.totals) / count,
        merged=sum(joined.totals) / count,
        shift=sum(abs(a - b) for a, b in pairs) / count,
        distance=_distance(joined, unmerged, plain),
    )


def _opened(folder: Path, base: Path, trained_on: str | None) -> Any:
    """A model, or the base with an adapter on it."""
    gc.collect()  # the one before
    if (folder / CONFIG_FILE).is_file():
        return load_adapter(_loaded(base, trained_on), folder)
    return _loaded(folder)


def _loaded(folder: Path, trained_on: str | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HirankError(f"{folder} does not load as a language model ({reason}).") from None
    model, loading = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            raise HirankError(
                f"{folder} has {kind.replace('_', ' ')}, {sorted(loading[kind])[0]} first: it is "
                "no whole model."
            )
    if trained_on is not None:
        for name in quantised_layers(model):
            weight = model.get_submodule(name).weight
            weight.data = as_trained(weight.data, trained_on)
    return model.eval().cuda() if torch.cuda.is_available() else model.eval().float()


@torch.no_grad()
def _scores(folder: Path, model: Any, prompts: Sequence[Prompt]) -> _Said:
    totals, kept = [], []
    for prompt in prompts:
        tokens = torch.tensor([prompt.input_ids], device=model.device)
        logits = model(tokens).logits[0].float().cpu()
        if logits.isnan().any():
            raise HirankError(f"{folder} computes logits that are no numbers: it is broken.")
        chances = logits[:-1].log_softmax(-1)
        chosen = chances.gather(1, tokens[0, 1:, None].cpu())[:, 0]
        scored = chosen[torch.tensor(prompt.scored[1:])].double()
        totals.append(float(scored.sum()))
        kept.append(logits)
    return _Said(totals, kept)


def _distance(merged: _Said, unmerged: _Said, base: _Said) -> float:
    moved = _norm(merged.logits, unmerged.logits)
    effect = _norm(unmerged.logits, base.logits)
    return moved / effect if effect else (math.inf if moved else 0.0)


def _norm(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    squares = (
        float(torch.linalg.vector_norm(a - b, dtype=torch.float64)) ** 2
        for a, b in zip(left, right, strict=True)
    )
    return math.sqrt(sum(squares))

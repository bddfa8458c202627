"""How a model is measured: the loss on held-out rows, and whether its answers are right.

Generation is greedy, in batches padded on the left, with a key-value cache. Measuring never
disturbs training: random states and training flags are put back afterwards, so a run with more
measuring in it learns the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from hirank.errors import HirankError
from hirank.train.strict import Strict

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from hirank.train.formats import Example

__all__ = [
    "EvalConfig",
    "Question",
    "Told",
    "exact_match",
    "generate",
    "greedy",
    "need_questions",
    "questions",
    "undisturbed",
]


class EvalConfig(Strict):
    """What is measured, and when."""

    every: NonNegativeFloat = 0.1
    """Steps between evaluations; below 1 a share of the run, 0 only before and after."""

    before: bool = True
    """Evaluate before the first step too."""

    batch_size: PositiveInt = 8
    """Rows at once, in evaluation and generation."""

    exact_match: bool = False
    """Generate answers before and after training and count those equal to the expected ones."""

    exact_match_every_eval: bool = False
    """Do so at every evaluation; the best adapter is then chosen by exact match, not by loss."""

    exact_match_rows: PositiveInt = 100
    """How many held-out rows are answered."""

    max_new_tokens: PositiveInt = Field(default=128)
    """Longest answer that is generated."""

    samples: NonNegativeInt = 3
    """Answers written down before and after training, to be read."""


@dataclass(frozen=True)
class Question:
    """A prompt as the model sees it, and the answer that counts as right."""

    prompt: str
    expected: str


def questions(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    skip_bad: bool = False,
) -> list[Question]:
    """The first `limit` rows that have an answer; rows of plain text have none.

    Raises HirankError for a row that the chat template refuses, unless those are skipped.
    """
    from hirank.train.tokens import prompt_and_answer

    found: list[Question] = []
    for example in examples:
        if len(found) == limit:
            break
        if example.text is not None:
            continue
        try:
            found.append(Question(*prompt_and_answer(example, tokenizer)))
        except HirankError:
            if not skip_bad:
                raise
    return found


def need_questions(found: Sequence[Question], config: EvalConfig) -> None:
    """Raise HirankError if exact match is asked for and nothing can be answered."""
    if (config.exact_match or config.exact_match_every_eval) and not found:
        raise HirankError(
            "eval.exact_match needs held-out rows with an answer; "
            "set data.eval or data.eval_fraction, or turn it off."
        )


def exact_match(outputs: Sequence[str], asked: Sequence[Question]) -> float:
    """Share of outputs equal to what was expected, both without surrounding white space."""
    right = sum(o.strip() == q.expected.strip() for o, q in zip(outputs, asked, strict=True))
    return right / len(asked)


# Generation.


Told = Callable[[int, int], None]
"""Is told of how many answers there are, and of how many there will be."""


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int,
    told: Told | None = None,
) -> list[str]:
    """Greedy answers to rendered prompts, in their order. Special tokens are left out.

    Prompts of similar length share a batch, so that little is spent on padding. `told` hears how
    many there are before each batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, str] = {}
    with undisturbed(model):
        for start in range(0, len(order), batch_size):
            if told is not None:
                told(start, len(order))
            batch = order[start : start + batch_size]
            texts = _generate_batch(model, tokenizer, [prompts[i] for i in batch], max_new_tokens)
            answers.update(zip(batch, texts, strict=True))
    return [answers[i] for i in range(len(prompts))]


def _generate_batch(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_new_tokens: int
) -> list[str]:
    ids, mask = _left_padded(tokenizer, prompts)
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=greedy(model, tokenizer, max_new_tokens),
    )
    return list(
        tokenizer.batch_decode(
            out[:, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


def _left_padded(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> tuple[Tensor, Tensor]:  # ids, mask: [prompts, longest], int64
    import torch

    special = tokenizer.chat_template is None  # a template writes its special tokens itself
    rows = [tokenizer.encode(prompt, add_special_tokens=special) for prompt in prompts]
    width = max(len(row) for row in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def greedy(model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int) -> Any:
    """Generation settings: no sampling, stop at the model's or the tokenizer's end tokens."""
    from transformers import GenerationConfig

    settings: Any = GenerationConfig
    known = model.generation_config.eos_token_id if model.generation_config else None
    ends = set(known if isinstance(known, list) else [known]) | {tokenizer.eos_token_id}
    return settings(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end for end in ends if end is not None) or None,
    )


# Leaving no trace.


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every flag and random state is as before."""
    import numpy as np
    import torch

    training = [module for module in model.modules() if module.training]
    states = random.getstate(), np.random.get_state()
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module in training:
            module.training = True


def _cuda_devices() -> list[int]:
    import torch

    cuda: Any = torch.cuda
    return list(range(cuda.device_count())) if cuda.is_initialized() else []

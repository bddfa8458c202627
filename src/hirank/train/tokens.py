"""From examples to token ids and labels, with the loss where it belongs.

A conversation is rendered once as a whole. Where an answer starts and ends in that text is
found by rendering the conversation up to it, which works for every chat template, marked with
{% generation %} or not, and is checked: each shorter rendering must be a prefix of the whole.
Character spans become token masks through the tokenizer's offsets, so the tokens are exactly
those of the whole text.

Labels are not shifted. -100 marks no loss; the first token of every example is -100, since
nothing predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from datasets import Dataset
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from hirank.errors import HirankError
from hirank.train.data import DataConfig
from hirank.train.formats import Example
from hirank.train.messages import Message
from hirank.train.packing import IGNORED, pack

__all__ = ["Encoded", "encode", "prompt_and_answer"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Tokens:
    """One example: ids and labels, both [S]."""

    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """How many tokens the loss counts."""
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True)
class Encoded:
    """What the trainer takes, and what became of the examples.

    `dataset` has the columns input_ids and labels (and seq_lengths when packed), one list of
    int a row. `lengths` are the tokens of each kept example, before packing.
    """

    dataset: Dataset
    lengths: tuple[int, ...]
    n_trained: int
    n_dropped: int
    n_truncated: int
    n_refused: int
    packed: bool

    @property
    def n_tokens(self) -> int:
        """Tokens of all kept examples."""
        return sum(self.lengths)

    def histogram(self, bins: int = 10) -> list[tuple[int, int, int]]:
        """Lengths as (low, high, count) with low <= length < high, in equal steps."""
        step = max(1, -(-(max(self.lengths, default=0) + 1) // bins))
        counts = [0] * bins
        for length in self.lengths:
            counts[length // step] += 1
        return [(i * step, (i + 1) * step, count) for i, count in enumerate(counts)]


def encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    packing: bool | None = None,
) -> Encoded:
    """Tokenise `examples` by the rules of `cfg`; `packing` overrides `cfg.packing`.

    Raises `HirankError` for a tokenizer that cannot do it, for an example longer than
    `max_length` when `overflow` is error, and when no example or no trained token is left.
    """
    kept: list[Tokens] = []
    lengths: list[int] = []
    refused: list[str] = []
    truncated = 0
    for example in examples:
        try:
            tokens = _tokens(example, tokenizer, cfg.train_on_prompt)
        except _Refused as reason:
            refused.append(f"{example.source}: {reason}")
            if not cfg.skip_bad_rows:
                raise HirankError(refused[0]) from reason
            continue
        lengths.append(len(tokens.input_ids))
        fitted = _fit(tokens, example.source, cfg)
        if fitted is not None:
            kept.append(fitted)
            truncated += lengths[-1] > cfg.max_length
    if not kept:
        raise HirankError(_nothing_left(refused, lengths, cfg))
    packed = cfg.packing if packing is None else packing
    return Encoded(
        dataset=_dataset(kept, cfg.max_length if packed else None),
        lengths=tuple(len(tokens.input_ids) for tokens in kept),
        n_trained=sum(tokens.trained for tokens in kept),
        n_dropped=len(lengths) - len(kept),
        n_truncated=truncated,
        n_refused=len(refused),
        packed=packed,
    )


def prompt_and_answer(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text to generate from, and the last answer as the data give it.

    The prompt holds its special tokens: tokenise it with add_special_tokens=False.
    """
    if example.text is not None:
        raise HirankError(
            f"{example.source}: a text row has no answer to compare with; "
            "use rows with a prompt and an answer, or switch exact match off."
        )
    *context, answer = example.messages
    if tokenizer.chat_template is None:
        _need_template(example)
        return _opened(context[0].content, tokenizer), answer.content
    try:
        return _render(tokenizer, context, prompt=True), answer.content
    except _Refused as reason:
        raise HirankError(f"{example.source}: {reason}") from reason


class _Refused(ValueError):
    """Why the tokenizer's template cannot take one example."""


# Length.


def _fit(tokens: Tokens, source: str, cfg: DataConfig) -> Tokens | None:
    """The example within `max_length`, or None where it is to be left out."""
    length = len(tokens.input_ids)
    if length <= cfg.max_length:
        return tokens
    if cfg.overflow == "error":
        raise HirankError(
            f"{source}: the example has {length} tokens, but data.max_length is "
            f"{cfg.max_length}; raise it, or set data.overflow to drop or truncate."
        )
    if cfg.overflow == "drop":
        return None
    cut = Tokens(tokens.input_ids[: cfg.max_length], tokens.labels[: cfg.max_length])
    return cut if cut.trained else None  # a prompt alone teaches nothing


def _nothing_left(refused: list[str], lengths: list[int], cfg: DataConfig) -> str:
    if not lengths and not refused:
        return "There are no examples to encode; check data.train and data.eval."
    if not lengths:
        return f"None of the {len(refused)} examples fits the tokenizer; the first is {refused[0]}"
    return (
        f"All {len(lengths)} examples are longer than data.max_length={cfg.max_length} tokens "
        f"(the shortest has {min(lengths)}); raise data.max_length."
    )


def _dataset(kept: list[Tokens], capacity: int | None) -> Dataset:
    if capacity is None:
        rows = [[index] for index in range(len(kept))]
    else:
        rows = pack([len(tokens.input_ids) for tokens in kept], capacity)
    columns = {
        "input_ids": [[i for index in row for i in kept[index].input_ids] for row in rows],
        "labels": [[i for index in row for i in kept[index].labels] for row in rows],
    }
    if capacity is not None:
        columns["seq_lengths"] = [[len(kept[index].input_ids) for index in row] for row in rows]
    return Dataset.from_dict(columns)


# Tokens and labels of one example.


def _tokens(example: Example, tokenizer: PreTrainedTokenizerBase, everything: bool) -> Tokens:
    if example.text is not None:
        ids = _ended(tokenizer(example.text)["input_ids"], tokenizer)
        return _labelled(ids, [True] * len(ids))
    if tokenizer.chat_template is None:
        _need_template(example)
        return _joined(example, tokenizer, everything)
    text, spans = _spans(example.messages, tokenizer)
    if everything:
        spans = [(0, len(text))]
    return _masked(text, spans, tokenizer, special=False)


def _labelled(ids: list[int], mask: Sequence[bool]) -> Tokens:
    """Labels from a mask; an example without any trained token is refused."""
    labels = [token if keep else IGNORED for token, keep in zip(ids, mask, strict=True)]
    labels[:1] = [IGNORED]
    tokens = Tokens(ids, labels)
    if not tokens.trained:
        raise _Refused("no token of this example would be trained; check its content.")
    return tokens


def _masked(
    text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase, *, special: bool
) -> Tokens:
    """Tokens of `text`, of which those that overlap a span are trained."""
    if not tokenizer.is_fast:
        raise HirankError(
            "The model's tokenizer gives no character offsets, which the loss mask needs; "
            "use a model with a fast tokenizer (tokenizer.json)."
        )
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    return _labelled(encoded["input_ids"], _overlap(encoded["offset_mapping"], spans))


def _overlap(offsets: Sequence[Span], spans: list[Span]) -> list[bool]:
    """Which tokens, given as [start, end) in characters, share a character with a span.

    Some tokenizers trim spaces off their offsets, and a token of spaces is left with none:
    it stands for the gap between its neighbours.
    """
    mask, before = [], 0
    for start, end in offsets:
        begin = min(start, before) if start == end else start
        mask.append(any(begin < stop and end > first for first, stop in spans))
        before = max(before, end)
    return mask


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """`ids` with the end-of-text token, which tells the model to stop."""
    end = tokenizer.eos_token_id
    return list(ids) if end is None or ids[-1:] == [end] else [*ids, end]


# Without a chat template.


def _need_template(example: Example) -> None:
    if not example.plain:
        raise HirankError(
            f"{example.source} is a conversation, but the model's tokenizer has no chat "
            "template; use an instruct model, or rows of the form prompt/completion or text."
        )
    if example.messages[0].role == "system":
        raise HirankError(
            f"{example.source} has a system text, but the model's tokenizer has no chat "
            "template to put it in; remove data.system, or use an instruct model."
        )


def _opened(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` behind the start-of-text token, where the tokenizer would put one."""
    start = tokenizer.bos_token
    opens = start is not None and tokenizer(text)["input_ids"][:1] == [tokenizer.bos_token_id]
    return f"{start}{text}" if opens and not text.startswith(str(start)) else text


def _joined(example: Example, tokenizer: PreTrainedTokenizerBase, everything: bool) -> Tokens:
    """Prompt and completion as one text, of which the completion and the end are learnt."""
    prompt, completion = (message.content for message in example.messages)
    text = prompt + completion
    span = (0 if everything else len(prompt), len(text))
    tokens = _masked(text, [span], tokenizer, special=True)
    ids = _ended(tokens.input_ids, tokenizer)
    labels = tokens.labels + ids[len(tokens.labels) :]
    if ids[-1] == tokenizer.eos_token_id:
        labels[-1] = ids[-1]  # also where the tokenizer itself put it
    return Tokens(ids, labels)


# With a chat template.


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, prompt: bool = False
) -> str:
    """The conversation as text; with `prompt`, up to where the assistant is to speak."""
    plain = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise _Refused(f"the chat template refuses this conversation: {error}.") from error
    return str(text)


def _spans(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[Span]]:
    """The whole conversation and where its trained turns stand in it, ends of turns included."""
    text = _render(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message.trained:
            start = _start(text, messages, index, tokenizer)
            spans.append((start, _end(text, messages, index, start, tokenizer)))
    return _with_end(text, spans, messages, tokenizer)


def _start(
    text: str, messages: Sequence[Message], index: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Where turn `index` starts; an answer starts behind the prompt that asks for it.

    A template may end that prompt with more than it writes before a given answer (an opening
    thought, say), so the common part counts; what comes before the turn has to agree in full.
    """
    if not index:
        return 0
    answer = messages[index].role == "assistant"
    asked = _render(tokenizer, messages[:index], prompt=answer)
    if text.startswith(asked):
        return len(asked)
    before = _render(tokenizer, messages[:index])
    _check_prefix(text, before)
    return max(len(before), len(commonprefix([text, asked])))


def _end(
    text: str,
    messages: Sequence[Message],
    index: int,
    start: int,
    tokenizer: PreTrainedTokenizerBase,
) -> int:
    """Where turn `index` ends: behind its end-of-turn mark, before the line break after that."""
    upto = text if index == len(messages) - 1 else _render(tokenizer, messages[: index + 1])
    _check_prefix(text, upto)
    turn = upto[start:]
    if _is_bare(turn, messages[index]):
        return len(upto)  # white space is all the mark there is
    return start + len(turn.rstrip())


def _is_bare(turn: str, message: Message) -> bool:
    """Whether nothing but white space follows the content in the rendered turn."""
    _, found, mark = turn.partition(message.content.strip())
    return bool(found) and not mark.strip()


def _check_prefix(text: str, part: str) -> None:
    if not text.startswith(part):
        raise _Refused(
            "the chat template writes earlier turns differently once later ones follow, so an "
            "answer cannot be found in the text; use one row per answer, with the earlier "
            'answers flagged "train": false.'
        )


def _with_end(
    text: str,
    spans: list[Span],
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[str, list[Span]]:
    """Add the end-of-text token where the template marks the end of the last answer by nothing."""
    end = tokenizer.eos_token
    if end is None or not messages[-1].trained or not _is_bare(text[spans[-1][0] :], messages[-1]):
        return text, spans
    return text + end, [*spans[:-1], (spans[-1][0], len(text + end))]

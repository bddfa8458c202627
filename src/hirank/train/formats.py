"""The shapes a training row may have, and how each becomes one conversation.

`FORMATS` is a table of small parsers, asked in its order: the first whose required keys are
in the row reads it. Keys are compared in lower case. A parser raises `BadRow` with a reason;
the file and line are added where the file is read (`data.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hirank.train.messages import (
    BadRow,
    Message,
    Role,
    Row,
    checked,
    filled,
    first,
    need,
    sequence,
    string,
    turns,
)

__all__ = [
    "FORMATS",
    "Example",
    "Format",
    "detect",
    "known_keys",
    "read",
]

QUERY = ("query", "question", "prompt", "input", "instruction", "problem")
RESPONSE = (
    *("response", "answer", "output", "completion", "targets", "target"),
    *("answer_key", "answers", "solution", "text", "content"),
)
ALPACA_OUTPUT = ("output", "response", "answer", "completion")
ALPACA_INPUT = ("input", "context")
SYSTEM = ("system", "system_prompt")
CONVERSATION = ("conversations", "conversation")
UNSUPPORTED_ROW_KEYS = (
    "tools",
    "functions",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
)


@dataclass(frozen=True)
class Example:
    """One training row: a conversation in `messages`, or a bare `text` learnt as a whole.

    `plain` marks a prompt and completion given as strings: a tokenizer without a chat
    template may join them as they are. `source` is "file:line".
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    plain: bool = False
    source: str = ""

    @property
    def content(self) -> tuple[tuple[str, str], ...]:
        """What makes two rows the same row, wherever they stand."""
        if self.text is not None:
            return (("text", self.text),)
        return tuple((message.role, message.content) for message in self.messages)


@dataclass(frozen=True)
class Format:
    """One accepted shape: how to recognise it by its keys, how to read it, how to show it."""

    name: str
    shape: str
    matches: Callable[[Row], bool]
    parse: Callable[[Row], Example]


def detect(row: Row) -> Format | None:
    """The first format of the table whose required keys the row has."""
    return next((form for form in FORMATS.values() if form.matches(row)), None)


# The parsers, one per format.


def conversation(row: Row, messages: Iterator[Message], *, plain: bool = False) -> Example:
    """Put the row's own system text in front, if it has one, and check the whole."""
    key = first(row, SYSTEM)
    system = string(row[key], repr(key)) if key and row[key] is not None else ""
    said = tuple(messages)
    if said and said[0].role == "system" and not said[0].content.strip():
        said = said[1:]  # an empty system turn says nothing
    if system.strip():
        if any(message.role == "system" for message in said):
            raise BadRow(f"has a system text twice: in {key!r} and as a message")
        said = (Message("system", system), *said)
    return Example(checked(said), plain=plain)


def _messages(row: Row) -> Example:
    return conversation(row, turns(row["messages"], "'messages'"))


def _sharegpt(row: Row) -> Example:
    key = need(row, CONVERSATION)
    return conversation(row, turns(row[key], repr(key)))


def _alpaca(row: Row) -> Example:
    key = need(row, ALPACA_OUTPUT)
    more = first(row, ALPACA_INPUT)
    said = [string(row["instruction"], "'instruction'")]
    if more and row[more] is not None:
        said.append(string(row[more], repr(more)))
    prompt = "\n".join(part for part in said if part.strip())
    return conversation(row, _rounds(row, prompt, filled(row[key], repr(key)), "'instruction'"))


def _prompt_completion(row: Row) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    plain = isinstance(prompt, str) and isinstance(completion, str)
    asked = [*_said(prompt, "prompt", "user")]
    context = [replace(turn, train=bool(turn.train)) for turn in asked]
    return conversation(
        row, iter([*context, *_said(completion, "completion", "assistant")]), plain=plain
    )


def _said(value: object, key: str, role: Role) -> Iterator[Message]:
    if isinstance(value, str):
        yield Message(role, filled(value, repr(key)))
    else:
        yield from turns(value, repr(key))


def _query_response(row: Row) -> Example:
    ask, answer = need(row, QUERY), need(row, RESPONSE)
    value = row[answer]
    if isinstance(value, list) and value:  # alternatives: the first counts
        value = value[0]
    prompt = filled(row[ask], repr(ask))
    return conversation(row, _rounds(row, prompt, filled(value, repr(answer)), repr(ask)))


def _rounds(row: Row, prompt: str, answer: str, name: str) -> Iterator[Message]:
    """Earlier rounds of `history`, then this one."""
    history = row.get("history")
    for number, pair in enumerate([] if not history else sequence(history, "'history'"), 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"round {number} of 'history' is not a pair [query, response]")
        yield Message("user", filled(pair[0], f"the query of round {number} of 'history'"))
        yield Message("assistant", filled(pair[1], f"the response of round {number} of 'history'"))
    yield Message("user", filled(prompt, name))
    yield Message("assistant", answer)


def _text(row: Row) -> Example:
    return Example(text=filled(row["text"], "'text'"))


def _has(*groups: tuple[str, ...]) -> Callable[[Row], bool]:
    return lambda row: all(first(row, group) is not None for group in groups)


def read(form: Format, row: Row) -> Example:
    """Read one row, refusing what would silently be left out of the training text."""
    for key in UNSUPPORTED_ROW_KEYS:
        if row.get(key):
            raise BadRow(f"has {key!r}, which is not supported: only text can be trained on")
    return form.parse(row)


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(
            "messages",
            '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}',
            _has(("messages",)),
            _messages,
        ),
        Format(
            "sharegpt",
            '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}',
            _has(CONVERSATION),
            _sharegpt,
        ),
        Format(
            "alpaca",
            '{"instruction": ..., "input": ..., "output": ...}',
            _has(("instruction",), ALPACA_OUTPUT),
            _alpaca,
        ),
        Format(
            "prompt-completion",
            '{"prompt": ..., "completion": ...}',
            _has(("prompt",), ("completion",)),
            _prompt_completion,
        ),
        Format(
            "query-response",
            '{"query": ..., "response": ...}',
            _has(QUERY, RESPONSE),
            _query_response,
        ),
        Format("text", '{"text": ...}', _has(("text",)), _text),
    )
}


def known_keys() -> tuple[str, ...]:
    """Every key that a format reads, for messages about unknown ones."""
    keys = ("messages", *CONVERSATION, "history", *SYSTEM, *ALPACA_INPUT, *QUERY, *RESPONSE)
    return tuple(dict.fromkeys(keys))

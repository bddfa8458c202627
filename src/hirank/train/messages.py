"""Messages: who speaks, what is said, and whether it is learnt.

Reads lists of messages in the styles that are about, and refuses what cannot be learnt from
by raising `BadRow` with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BadRow",
    "Message",
    "Role",
    "Row",
    "checked",
    "filled",
    "first",
    "kind",
    "lowered",
    "need",
    "sequence",
    "string",
    "turns",
]

Role = Literal["system", "user", "assistant"]
Row = Mapping[str, object]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}
TOOL_ROLES = (
    "tool",
    "function",
    "tool_call",
    "function_call",
    "tool_response",
    "function_response",
    "observation",
    "observations",
)
FLAGS = ("train", "loss", "training", "weight")
UNSUPPORTED_MESSAGE_KEYS = ("tool_calls", "function_call", "reasoning_content", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")


class BadRow(ValueError):
    """Why one row cannot be used, without the place."""


@dataclass(frozen=True)
class Message:
    """One turn. `train` None means: the answers of the assistant are learnt, nothing else."""

    role: Role
    content: str
    train: bool | None = None

    @property
    def trained(self) -> bool:
        """Whether the loss counts this turn."""
        return self.role == "assistant" if self.train is None else self.train


def lowered(row: Row) -> dict[str, object]:
    """The row with keys stripped and in lower case; of two equal keys the first stays."""
    result: dict[str, object] = {}
    for key, value in row.items():
        result.setdefault(str(key).strip().lower(), value)
    return result


# Values.


def kind(value: object) -> str:
    """The JSON name of a value's type, with its article."""
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no JSON value")


def first(row: Row, keys: tuple[str, ...]) -> str | None:
    """The first of `keys` that the row has."""
    return next((key for key in keys if key in row), None)


def need(row: Row, keys: tuple[str, ...]) -> str:
    """As `first`, for a parser whose `matches` has seen the key."""
    key = first(row, keys)
    if key is None:
        raise BadRow(f"has none of the keys {', '.join(keys)}")
    return key


def string(value: object, name: str) -> str:
    """`value` if it is text that can be encoded, else a `BadRow` that names it."""
    if isinstance(value, list):
        return "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise BadRow(f"{name} is {kind(value)}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{name} holds half of a surrogate pair, which is no valid text") from error
    return value


def _part(part: object, name: str) -> str:
    """One element of an OpenAI content list; only text can be trained on."""
    if isinstance(part, str):
        return string(part, name)
    if not isinstance(part, dict):
        raise BadRow(f"{name} lists {kind(part)}, not a content part")
    if part.get("type", "text") not in TEXT_PARTS:
        raise BadRow(f"{name} has a part of type {part.get('type')!r}; only text can be trained on")
    return string(part.get("text"), f"a text part of {name}")


def filled(value: object, name: str) -> str:
    """As `string`, and not blank."""
    text = string(value, name)
    if not text.strip():
        raise BadRow(f"{name} is empty")
    return text


def sequence(value: object, name: str) -> list[object]:
    """A list, or a list written as JSON in a string, as csv files hold it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{name} starts like a JSON list but is not valid JSON") from error
    if not isinstance(value, list):
        raise BadRow(f"{name} is {kind(value)}, not a list")
    return value


# Messages.


def turns(value: object, name: str) -> Iterator[Message]:
    """Read a list of messages in either style, `role`/`content` or `from`/`value`."""
    items = sequence(value, name)
    if not items:
        raise BadRow(f"{name} is an empty list")
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise BadRow(f"message {number} is {kind(item)}, not an object")
        yield from _turn(lowered(item), f"message {number}")


def _turn(item: Row, name: str) -> Iterator[Message]:
    for key in UNSUPPORTED_MESSAGE_KEYS:
        if item.get(key):
            raise BadRow(f"{name} has {key!r}, which is not supported")
    role_key, content_key = first(item, ("role", "from")), first(item, ("content", "value"))
    if role_key is None:
        yield from _pair(item, name)
        return
    role = _role(item[role_key], name)
    if content_key is None:
        raise BadRow(f"{name} has no content (keys seen: {_names(item)})")
    yield Message(role, string(item[content_key], f"content of {name}"), _flag(item, name))


def _pair(item: Row, name: str) -> Iterator[Message]:
    """The older sharegpt style, one object a round: `{"human": ..., "assistant": ...}`."""
    spoken = [(role, key) for key, role in ROLES.items() if key in item]
    if not spoken:
        raise BadRow(f"{name} has no role (keys seen: {_names(item)})")
    order = ("system", "user", "assistant")
    for role, key in sorted(spoken, key=lambda pair: order.index(pair[0])):
        if role == "system" and not item[key]:
            continue
        flag = _flag(item, name) if role == "assistant" else None
        yield Message(role, string(item[key], f"{key!r} of {name}"), flag)


def _role(value: object, name: str) -> Role:
    role = value.strip().lower() if isinstance(value, str) else value
    if role in TOOL_ROLES:
        raise BadRow(f"{name} has the role {value!r}; tool messages are not supported")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"{name} has the unknown role {value!r} (known: {', '.join(ROLES)})")
    return ROLES[role]


def _flag(item: Row, name: str) -> bool | None:
    key = first(item, FLAGS)
    if key is None or item[key] is None:
        return None
    value = item[key]
    if value not in (0, 1):
        raise BadRow(f"{key!r} of {name} is {value!r}, not true or false")
    return bool(value)


def _names(row: Row) -> str:
    return ", ".join(repr(key) for key in row) or "none"


def checked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation if it can be learnt from, else a `BadRow` that says why not."""
    spoken = messages[1:] if messages and messages[0].role == "system" else messages
    for number, message in enumerate(messages, 1):
        _check_message(message, number)
    if not any(message.role == "user" for message in spoken):
        raise BadRow("has no user turn")
    if spoken[0].role != "user":
        raise BadRow("starts with an answer; a user turn must come before it")
    if spoken[-1].role != "assistant":
        raise BadRow("ends with a user turn; the last message must be the assistant's answer")
    if not any(message.trained for message in messages):
        raise BadRow("has no turn to learn: every answer is flagged as not trained")
    return messages


def _check_message(message: Message, number: int) -> None:
    if message.role == "system" and number > 1:
        raise BadRow(f"message {number} is a system message; only the first may be one")
    if message.role != "system" and not message.content.strip():
        raise BadRow(f"content of message {number} ({message.role}) is empty")

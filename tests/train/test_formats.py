"""Every shape and synonym becomes the same conversation; every flaw has its reason."""

import json

import pytest

from hirank.train.formats import FORMATS, Example, detect, known_keys, read
from hirank.train.messages import BadRow, Message, lowered

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PLAIN = (Message("user", "q"), Message("assistant", "a"))


def parse(row: dict) -> Example:
    row = lowered(row)
    form = detect(row)
    assert form is not None, row
    return read(form, row)


def chat(*messages: dict) -> dict:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("messages", chat(USER, ASSISTANT)),
        ("messages", {"Messages": [USER, ASSISTANT], "id": 7}),
        ("messages", {"messages": json.dumps([USER, ASSISTANT])}),
        ("messages", chat({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"})),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        ),
        ("sharegpt", {"conversations": [USER, ASSISTANT]}),
        ("sharegpt", {"conversation": [{"human": "q", "assistant": "a"}]}),
        ("sharegpt", {"conversation": [{"assistant": "a", "user": "q"}]}),
        ("alpaca", {"instruction": "q", "output": "a"}),
        ("alpaca", {"instruction": "q", "input": "", "output": "a", "text": "all"}),
        ("alpaca", {"instruction": "q", "input": None, "output": "a", "history": None}),
        ("alpaca", {"instruction": "q", "context": "", "response": "a", "category": "x"}),
        ("prompt-completion", {"prompt": [USER], "completion": [ASSISTANT]}),
        ("prompt-completion", {"prompt": [USER], "completion": "a"}),
        ("query-response", {"query": "q", "response": "a"}),
        ("query-response", {"Question": "q", "Answer": "a"}),
        ("query-response", {"prompt": "q", "response": "a"}),
        ("query-response", {"input": "q", "output": "a"}),
        ("query-response", {"problem": "q", "solution": "a"}),
        ("query-response", {"instruction": "q", "target": "a"}),
        ("query-response", {"query": "q", "answers": ["a", "other"]}),
        ("query-response", {"question": "q", "text": "a"}),
    ],
    ids=str,
)
def test_synonyms_give_the_same_conversation(name: str, row: dict) -> None:
    assert detect(lowered(row)).name == name
    parsed = parse(row)
    assert [(m.role, m.content, m.trained) for m in parsed.messages] == [
        ("user", "q", False),
        ("assistant", "a", True),
    ]
    assert not parsed.plain and parsed.text is None


def test_prompt_and_completion_strings_are_plain() -> None:
    assert parse({"prompt": "q", "completion": "a"}) == Example(
        (Message("user", "q", train=False), Message("assistant", "a")), plain=True
    )


def test_text_is_text() -> None:
    assert parse({"text": "once"}) == Example(text="once")


@pytest.mark.parametrize("role", ["assistant", "gpt", "bot", "model", "chatgpt", " Assistant "])
def test_assistant_synonyms(role: str) -> None:
    assert parse(chat(USER, {"role": role, "content": "a"})).messages == PLAIN


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_synonyms(role: str) -> None:
    parsed = parse(chat({"role": role, "content": "s"}, USER, ASSISTANT))
    assert parsed.messages == (Message("system", "s"), *PLAIN)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "output": "a", "system": "s"},
        {"query": "q", "response": "a", "system_prompt": "s"},
        {"messages": [USER, ASSISTANT], "system": "s"},
        {"conversations": [{"system": "s", "human": "q", "gpt": "a"}]},
        {"messages": [{"role": "system", "content": " "}, USER, ASSISTANT], "system": "s"},
    ],
    ids=str,
)
def test_system_text_of_the_row(row: dict) -> None:
    assert parse(row).messages == (Message("system", "s"), *PLAIN)


@pytest.mark.parametrize("empty", ["", "  ", None])
def test_empty_system_text_is_none(empty: str | None) -> None:
    assert parse({"query": "q", "response": "a", "system": empty}).messages == PLAIN


@pytest.mark.parametrize("key", ["instruction", "query"])
def test_history_comes_first(key: str) -> None:
    answer = "output" if key == "instruction" else "response"
    row = {key: "q", answer: "a", "history": [["q1", "a1"], ["q2", "a2"]], "system": "s"}
    parsed = parse(row)
    assert [m.content for m in parsed.messages] == ["s", "q1", "a1", "q2", "a2", "q", "a"]
    assert [m.trained for m in parsed.messages] == [False, False, True, False, True, False, True]


def test_history_as_json_text_as_in_csv() -> None:
    parsed = parse({"query": "q", "response": "a", "history": '[["q1", "a1"]]'})
    assert [m.content for m in parsed.messages] == ["q1", "a1", "q", "a"]


def test_alpaca_joins_instruction_and_input_with_a_newline() -> None:
    parsed = parse({"instruction": "add", "input": "1 2", "output": "3"})
    assert parsed.messages[0].content == "add\n1 2"
    assert parse({"instruction": "", "input": "1 2", "output": "3"}).messages[0].content == "1 2"


@pytest.mark.parametrize("key", ["train", "loss", "training", "weight"])
@pytest.mark.parametrize("value", [True, False, 1, 0, None])
def test_flags_are_honoured(key: str, value: object) -> None:
    first = {"role": "assistant", "content": "a", key: value}
    parsed = parse(chat(USER, first, USER, ASSISTANT))
    assert parsed.messages[1].train == (None if value is None else bool(value))
    assert parsed.messages[1].trained is (value is None or bool(value))


def test_a_user_turn_can_be_flagged() -> None:
    assert parse(chat({**USER, "train": True}, ASSISTANT)).messages[0].trained


def test_answers_in_the_prompt_are_context() -> None:
    parsed = parse({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert [m.trained for m in parsed.messages] == [False, False, False, True]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "input_text", "text": "two"}, " three"]
    parsed = parse(chat({"role": "user", "content": parts}, ASSISTANT))
    assert parsed.messages[0].content == "one two three"


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat(), "'messages' is an empty list"),
        ({"messages": "hello"}, "'messages' is a string, not a list"),
        ({"messages": "[broken"}, "not valid JSON"),
        ({"messages": None}, "'messages' is null, not a list"),
        ({"messages": {"role": "user"}}, "'messages' is an object, not a list"),
        (chat(USER, "hi"), "message 2 is a string, not an object"),
        (chat(USER), "ends with a user turn"),
        (chat(USER, ASSISTANT, USER), "ends with a user turn"),
        (chat(ASSISTANT), "no user turn"),
        (chat({"role": "system", "content": "s"}), "no user turn"),
        (chat({"role": "system", "content": "s"}, ASSISTANT), "no user turn"),
        (chat(ASSISTANT, USER, ASSISTANT), "starts with an answer"),
        (chat(USER, {"role": "assistant", "content": ""}), "message 2 (assistant) is empty"),
        (chat(USER, {"role": "assistant", "content": " \n"}), "message 2 (assistant) is empty"),
        (chat({"role": "user", "content": ""}, ASSISTANT), "message 1 (user) is empty"),
        (chat({"role": "wizard", "content": "x"}, ASSISTANT), "unknown role 'wizard' (known: "),
        (chat({"role": None, "content": "x"}, ASSISTANT), "unknown role None"),
        (chat({"role": ["user"], "content": "x"}, ASSISTANT), "unknown role ['user']"),
        (chat(USER, {"role": "tool", "content": "x"}), "tool messages are not supported"),
        (chat(USER, {"role": "assistant", "tool_calls": [{}]}), "'tool_calls', which is not"),
        (chat(USER, {**ASSISTANT, "reasoning_content": "hm"}), "'reasoning_content', which"),
        (chat(USER, {"role": "assistant", "content": 4}), "message 2 is a number, not a string"),
        (chat(USER, {"role": "assistant", "content": True}), "is a boolean, not a string"),
        (chat(USER, {"role": "assistant", "content": None}), "is null, not a string"),
        (chat(USER, {"role": "assistant"}), "message 2 has no content (keys seen: 'role')"),
        (chat(USER, {"text": "x"}), "message 2 has no role (keys seen: 'text')"),
        (chat({"role": "user", "content": [IMAGE]}, ASSISTANT), "part of type 'image_url'; only"),
        (chat({"role": "user", "content": [3]}, ASSISTANT), "lists a number, not a content part"),
        (chat({"role": "user", "content": [{"type": "text"}]}, ASSISTANT), "is null, not a str"),
        (chat(USER, {"role": "assistant", "content": "\ud800"}), "half of a surrogate pair"),
        (chat(USER, {**ASSISTANT, "train": "yes"}), "'train' of message 2 is 'yes', not true or"),
        (chat(USER, {**ASSISTANT, "weight": 0.5}), "'weight' of message 2 is 0.5"),
        (chat(USER, {**ASSISTANT, "train": False}), "no turn to learn"),
        (chat(USER, {"role": "system", "content": "s"}, ASSISTANT), "message 2 is a system"),
        (
            {**chat({"role": "system", "content": "s"}, USER, ASSISTANT), "system": "t"},
            "system text twice",
        ),
        ({**chat(USER, ASSISTANT), "tools": [{}]}, "has 'tools', which is not supported"),
        ({**chat(USER, ASSISTANT), "images": ["x.png"]}, "has 'images'"),
        ({"instruction": "q", "output": ""}, "'output' is empty"),
        ({"instruction": "", "output": "a"}, "'instruction' is empty"),
        ({"instruction": 1, "output": "a"}, "'instruction' is a number, not a string"),
        ({"prompt": "", "completion": "a"}, "'prompt' is empty"),
        ({"prompt": "q", "completion": None}, "'completion' is null, not a list"),
        ({"prompt": [USER], "completion": [USER]}, "ends with a user turn"),
        ({"query": "q", "response": 4}, "'response' is a number, not a string"),
        ({"query": "q", "response": []}, "'response' is empty"),
        ({"query": "q", "response": "a", "history": "x"}, "'history' is a string, not a list"),
        ({"query": "q", "response": "a", "history": [["x"]]}, "round 1 of 'history' is not a pair"),
        (
            {"query": "q", "response": "a", "history": [["x", ""]]},
            "the response of round 1 of 'history' is empty",
        ),
        ({"text": " "}, "'text' is empty"),
        ({"text": 3}, "'text' is a number"),
    ],
    ids=str,
)
def test_flaws_have_reasons(row: dict, reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        parse(row)
    assert reason in str(caught.value)


@pytest.mark.parametrize("row", [{}, {"a": 1}, {"prompt": "q"}, {"response": "a"}], ids=str)
def test_unknown_keys_are_no_format(row: dict) -> None:
    assert detect(row) is None


def test_the_table_shows_shapes_that_it_reads() -> None:
    for name, form in FORMATS.items():
        assert form.name == name
        keys = {key: None for key in known_keys() if f'"{key}"' in form.shape}
        assert form.matches(keys), form.shape


def test_of_two_equal_keys_the_first_stays() -> None:
    assert lowered({"Text": "one", "text ": "two"}) == {"text": "one"}

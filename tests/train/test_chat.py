"""Talking to what lies in a folder, whatever else lies there."""

import pytest

from helpers import tiny_llama, tiny_tokenizer
from hirank.errors import HirankError
from hirank.train.chat import Chat, find

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ messages[0]['content'] }}"
)


@pytest.mark.parametrize(
    "text", [b"{: [", b"data:\n- path: x\n", b"hello", b"data:\n", b"\xff\xfe", b"2020-13-45"]
)
def test_a_config_of_somebody_else_beside_the_model_does_not_matter(tmp_path, text):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_bytes(text)
    assert find(tmp_path).system is None


@pytest.mark.parametrize(
    ("template", "text", "said"),
    [
        (NO_SYSTEM, "hi", "refuses this conversation: no system"),
        (None, "", "nothing to answer"),
        (None, "a\udcff", "not text in UTF-8"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_forgotten(template, text, said):
    chat = Chat(tiny_llama(), tiny_tokenizer(template), max_new_tokens=2, system="be nice")
    with pytest.raises(HirankError, match=said):
        chat.answer(text)
    assert chat.turns == []

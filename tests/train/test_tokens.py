"""The loss falls on the answers and their ends, token by token, whatever the chat template."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from helpers import CHATML, tiny_llama, tiny_tokenizer
from hirank.errors import HirankError
from hirank.train.data import DataConfig, Example, Message
from hirank.train.packing import IGNORED, collator_for
from hirank.train.tokens import Encoded, encode, prompt_and_answer

DEFAULT_SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
NO_END = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
EXTRA = [
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
]


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_tokens(EXTRA, special_tokens=True)
    return tokenizer


def config(**settings: Any) -> DataConfig:
    return DataConfig(train="unused.jsonl", **settings)


def chat(
    *contents: str, system: str | None = None, flags: dict[int, bool] | None = None
) -> Example:
    """User and assistant in turn; `flags` by position among them."""
    roles = ("user", "assistant")
    said = [Message(roles[i % 2], c, (flags or {}).get(i)) for i, c in enumerate(contents)]
    first = [Message("system", system)] if system is not None else []
    return Example((*first, *said), source="a.jsonl:1")


def plain(prompt: str, completion: str) -> Example:
    said = (Message("user", prompt, train=False), Message("assistant", completion))
    return Example(said, plain=True, source="a.jsonl:1")


def one(example: Example, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> dict[str, Any]:
    return encode([example], tokenizer, config(**settings)).dataset[0]


def pieces(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[tuple[bool, str]]:
    """The text in runs of trained and untrained tokens; labels are checked on the way."""
    pairs = list(zip(row["input_ids"], row["labels"], strict=True))
    assert all(label in (token, IGNORED) for token, label in pairs)
    runs = groupby(pairs, lambda pair: pair[1] != IGNORED)
    return [(trained, tokenizer.decode([token for token, _ in run])) for trained, run in runs]


def trained(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [text for is_trained, text in pieces(row, tokenizer) if is_trained]


# With a chat template.

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "default-system": (DEFAULT_SYSTEM, "<|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "no-system": (NO_SYSTEM, "<end_of_turn>"),
}
ANSWERS = [
    "yes",
    "über 日本 🙂",
    '{"name": "value"}\n\n  two  words',
    "user",
    "<think>",
    ">",  # how the end-of-turn marks end
    "end|>",
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("turns", [1, 3])
def test_answers_and_their_ends_are_trained(name: str, answer: str, turns: int) -> None:
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    example = chat(*["what?", answer] * turns)
    row = one(example, tokenizer)
    assert trained(row, tokenizer) == [answer + end] * turns
    messages = [{"role": m.role, "content": m.content} for m in example.messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert row["input_ids"] == whole["input_ids"]


@pytest.mark.parametrize("name", ["chatml", "default-system", "marked", "llama3"])
def test_system_texts_are_not_trained(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    row = one(chat("q", "a", "q", "b", system="be brief"), tokenizer)
    assert trained(row, tokenizer) == ["a" + end, "b" + end]


def test_every_token_of_a_small_example() -> None:
    tokenizer = tokenizer_with(DEFAULT_SYSTEM)
    assert pieces(one(chat("hi", "yes", "more", "no"), tokenizer), tokenizer) == [
        (
            False,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (True, "yes<|im_end|>"),
        (False, "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
        (True, "no<|im_end|>"),
        (False, "\n"),
    ]


def test_the_mask_is_that_of_generation_marks() -> None:
    tokenizer = tokenizer_with(MARKED)
    example = chat("q", "one two", "q", "three")
    messages = [{"role": m.role, "content": m.content} for m in example.messages]
    marked = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = one(example, tokenizer)
    assert [int(label != IGNORED) for label in row["labels"]] == marked["assistant_masks"]


def test_flags_choose_turns() -> None:
    tokenizer = tokenizer_with(CHATML)
    example = chat("q", "a", "r", "b", flags={1: False, 2: True})
    assert trained(one(example, tokenizer), tokenizer) == [
        "<|im_start|>user\nr<|im_end|>",
        "b<|im_end|>",
    ]


def test_train_on_prompt_trains_all_but_the_first_token() -> None:
    tokenizer = tokenizer_with(CHATML)
    row = one(chat("q", "a"), tokenizer, train_on_prompt=True)
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


def test_a_template_that_trims_answers() -> None:
    tokenizer = tokenizer_with(LLAMA3)
    assert trained(one(chat("q", "  a \n"), tokenizer), tokenizer) == ["a<|eot_id|>"]


def test_white_space_around_answers_is_trained_where_the_template_keeps_it() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert trained(one(chat("q", " a \n"), tokenizer), tokenizer) == [" a \n<|im_end|>"]


def test_a_token_over_the_border_is_trained() -> None:
    tokenizer = tiny_tokenizer(NO_END)
    tokenizer.add_tokens([": y"])  # the template writes ": ", the answer begins with y
    row = one(chat("q", "yes"), tokenizer)
    assert trained(row, tokenizer) == [": yes\n<|im_end|>"]


def test_a_template_without_marks_gets_the_end_of_text() -> None:
    tokenizer = tokenizer_with(NO_END)
    assert pieces(one(chat("q", "a", "r", "b"), tokenizer), tokenizer) == [
        (False, "User: q\nAssistant:"),
        (True, " a\n"),
        (False, "User: r\nAssistant:"),
        (True, " b\n<|im_end|>"),
    ]


def test_a_generation_prompt_that_opens_a_thought() -> None:
    tokenizer = tokenizer_with(THINKING)
    assert trained(one(chat("q", "a"), tokenizer), tokenizer) == ["a<|im_end|>"]
    row = one(chat("q", "<think>\nhm</think>a"), tokenizer)
    assert trained(row, tokenizer) == ["hm</think>a<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_where_they_are_trained() -> None:
    tokenizer = tokenizer_with(THINKING)
    turns = ("q", "hm</think>a", "r", "b")
    with pytest.raises(HirankError, match=r"^a.jsonl:1: the chat template writes earlier turns"):
        one(chat(*turns), tokenizer)
    row = one(chat(*turns, flags={1: False}), tokenizer)
    assert trained(row, tokenizer) == ["b<|im_end|>"]


def test_what_the_template_refuses() -> None:
    tokenizer = tokenizer_with(NO_SYSTEM)
    bad, good = chat("q", "a", system="s"), chat("q", "a")
    with pytest.raises(HirankError, match=r"^a.jsonl:1: .* System role not supported\.$"):
        encode([good, bad], tokenizer, config())
    found = encode([good, bad], tokenizer, config(skip_bad_rows=True))
    assert (len(found.dataset), found.n_refused) == (1, 1)
    with pytest.raises(HirankError, match="None of the 1 examples fits .* a.jsonl:1: the chat"):
        encode([bad], tokenizer, config(skip_bad_rows=True))


def test_spaces_without_offsets_belong_to_their_gap() -> None:
    """A post-processor that trims offsets leaves a token of spaces with none."""
    from tokenizers import processors

    tokenizer = tokenizer_with(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = one(chat("q  z", "a  b   c "), tokenizer)
    assert trained(row, tokenizer) == ["a  b   c <|im_end|>"]


# Without a chat template.


def test_completions_are_trained_without_a_template() -> None:
    tokenizer = tokenizer_with(None)
    row = one(plain("say: ", "yes"), tokenizer)
    assert pieces(row, tokenizer) == [(False, "say: "), (True, "yes<|im_end|>")]
    row = one(plain("say: ", "yes"), tokenizer, train_on_prompt=True)
    assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


def test_prompt_and_completion_use_a_template_where_there_is_one() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert one(plain("q", "a"), tokenizer) == one(chat("q", "a"), tokenizer)


def wrapped(pattern: str) -> PreTrainedTokenizerFast:
    """A base model's tokenizer that adds special tokens around every text."""
    from tokenizers import processors

    tokenizer = tokenizer_with(None)
    special = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=special
    )
    return tokenizer


@pytest.mark.parametrize("pattern", ["<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
def test_special_tokens_that_the_tokenizer_adds(pattern: str) -> None:
    tokenizer = wrapped(pattern)
    assert pieces(one(plain("say: ", "yes"), tokenizer), tokenizer) == [
        (False, "<|im_start|>say: "),
        (True, "yes<|im_end|>"),
    ]
    assert pieces(one(Example(text="yes"), tokenizer), tokenizer) == [
        (False, "<|im_start|>"),
        (True, "yes<|im_end|>"),
    ]


def test_text_is_trained_as_a_whole() -> None:
    for template in (None, CHATML):
        tokenizer = tokenizer_with(template)
        row = one(Example(text="one two"), tokenizer)
        assert tokenizer.decode(row["input_ids"]) == "one two<|im_end|>"
        assert row["labels"] == [IGNORED, *row["input_ids"][1:]]


def test_text_that_ends_itself_ends_once() -> None:
    tokenizer = tokenizer_with(None)
    row = one(Example(text="one<|im_end|>"), tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "one<|im_end|>"


def test_conversations_need_a_template() -> None:
    tokenizer = tokenizer_with(None)
    with pytest.raises(HirankError, match=r"^a.jsonl:1 is a conversation, but .* no chat templ"):
        one(chat("q", "a"), tokenizer)
    example = plain("q", "a")
    with_system = Example((Message("system", "s"), *example.messages), plain=True, source="b:1")
    with pytest.raises(HirankError, match=r"^b:1 has a system text"):
        one(with_system, tokenizer)


def test_a_tokenizer_without_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(HirankError, match="no character offsets"):
        one(chat("q", "a"), tokenizer_with(CHATML))


def test_an_example_without_anything_to_learn() -> None:
    tokenizer = tokenizer_with(None)
    tokenizer.eos_token = None
    with pytest.raises(HirankError, match="no token of this example would be trained"):
        one(Example(text="a", source="a.jsonl:1"), tokenizer)


# Length.


def lengths(found: Encoded) -> list[int]:
    return [len(ids) for ids in found.dataset["input_ids"]]


LONG = chat("q", "one two three four five six seven eight nine ten " * 3)


def test_long_examples_are_dropped_and_counted() -> None:
    tokenizer = tokenizer_with(CHATML)
    found = encode([chat("q", "a"), LONG], tokenizer, config(max_length=24))
    assert (len(found.dataset), found.n_dropped, found.n_truncated) == (1, 1, 0)


def test_long_examples_are_cut_and_counted() -> None:
    tokenizer = tokenizer_with(CHATML)
    settings = config(max_length=24, overflow="truncate")
    found = encode([chat("q", "a"), LONG], tokenizer, settings)
    assert lengths(found)[1] == 24 and (found.n_dropped, found.n_truncated) == (0, 1)
    whole = one(LONG, tokenizer)
    assert found.dataset[1] == {key: value[:24] for key, value in whole.items()}


def test_a_cut_that_leaves_the_prompt_alone_is_a_drop() -> None:
    tokenizer = tokenizer_with(CHATML)
    settings = config(max_length=24, overflow="truncate")
    found = encode([chat("q", "a"), chat("question " * 30, "a")], tokenizer, settings)
    assert (len(found.dataset), found.n_dropped, found.n_truncated) == (1, 1, 0)


def test_long_examples_stop_if_wished() -> None:
    tokenizer = tokenizer_with(CHATML)
    length = len(one(LONG, tokenizer)["input_ids"])
    with pytest.raises(HirankError, match=f"a.jsonl:1: the example has {length} tokens"):
        encode([LONG], tokenizer, config(max_length=length - 1, overflow="error"))
    assert encode([LONG], tokenizer, config(max_length=length, overflow="error")).n_dropped == 0


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
def test_nothing_short_enough(overflow: str) -> None:
    tokenizer = tokenizer_with(CHATML)
    short, longer = chat("q", "a"), chat("question", "a")
    length = len(one(short, tokenizer)["input_ids"])
    with pytest.raises(HirankError) as caught:
        encode([longer, short], tokenizer, config(max_length=4, overflow=overflow))
    assert str(caught.value) == (
        "All 2 examples are longer than data.max_length=4 tokens "
        f"(the shortest has {length}); raise data.max_length."
    )


def test_nothing_at_all() -> None:
    with pytest.raises(HirankError, match="no examples to encode"):
        encode([], tokenizer_with(CHATML), config())


def test_counts_and_histogram() -> None:
    tokenizer = tokenizer_with(CHATML)
    found = encode([chat("q", "a" * n) for n in range(1, 40)], tokenizer, config())
    assert list(found.lengths) == lengths(found)
    assert found.n_tokens == sum(found.lengths)
    labels = [label for row in found.dataset["labels"] for label in row]
    assert found.n_trained == sum(label != IGNORED for label in labels)
    bins = found.histogram(5)
    assert len(bins) == 5 and sum(count for _, _, count in bins) == 39
    for low, high, count in bins:
        assert count == sum(low <= length < high for length in found.lengths)


# Prompts for generation.


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_and_answer(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    prompt, answer = prompt_and_answer(chat("q", "a", "r", "b"), tokenizer)
    assert answer == "b"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    row = one(chat("q", "a", "r", "b"), tokenizer)
    assert row["input_ids"][: len(ids)] == ids
    assert tokenizer.decode(row["input_ids"][len(ids) :]).rstrip("\n") == "b" + end


def test_prompt_without_a_template() -> None:
    assert prompt_and_answer(plain("q", "a"), tokenizer_with(None)) == ("q", "a")
    opens = wrapped("<|im_start|> $A")
    assert prompt_and_answer(plain("q", "a"), opens) == ("<|im_start|>q", "a")
    with pytest.raises(HirankError, match="no chat template"):
        prompt_and_answer(chat("q", "a"), tokenizer_with(None))


def test_text_has_no_answer() -> None:
    with pytest.raises(HirankError, match="a text row has no answer"):
        prompt_and_answer(Example(text="t", source="a:1"), tokenizer_with(CHATML))


def test_a_prompt_that_the_template_refuses() -> None:
    with pytest.raises(HirankError, match="System role not supported"):
        prompt_and_answer(chat("q", "a", system="s"), tokenizer_with(NO_SYSTEM))


# What the trainer makes of it.

EXAMPLES = [
    chat("q", "yes"),
    chat("the quick brown fox", "no no no"),
    chat("one", "two", "three", "four five six"),
    chat("name", '{"name": "value"}'),
    chat("say seven", "seven", system="lazy dog"),
]


def trainer_on(
    found: Encoded, folder: Path, *, batch: int, attention: str = "sdpa", **settings: Any
) -> SFTTrainer:
    """SFTTrainer as `train` builds it, on the tiny model."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(attn_implementation=attention)
    args = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    return SFTTrainer(
        model=model,
        args=args,
        data_collator=collator_for(model, tokenizer, packing=found.packed),
        train_dataset=found.dataset,
        processing_class=tokenizer,
    )


def by_hand() -> tuple[float, int]:
    """Sum of cross entropies on answer tokens, and their number, from one example at a time."""
    tokenizer, model = tiny_tokenizer(), tiny_llama()
    total, count = 0.0, 0
    for row in encode(EXAMPLES, tokenizer, config()).dataset:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        total += float(cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        count += int((labels != IGNORED).sum())
    return total, count


@pytest.mark.train
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch", [1, 8])
def test_loss_is_the_cross_entropy_of_answer_tokens(
    tmp_path: Path, packing: bool, attention: str, batch: int
) -> None:
    found = encode(EXAMPLES, tiny_tokenizer(), config(packing=packing, max_length=64))
    assert len(found.dataset) < len(EXAMPLES) or not packing
    trainer = trainer_on(found, tmp_path, batch=batch, attention=attention)
    trainer.model.eval()
    total, count = 0.0, 0
    for inputs in trainer.get_train_dataloader():
        tokens = int((inputs["labels"] != IGNORED).sum())
        with torch.no_grad():
            total += float(trainer.compute_loss(trainer.model, inputs)) * tokens
        count += tokens
    expected, tokens = by_hand()
    assert count == tokens == found.n_trained
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.train
def test_a_packed_step_equals_an_unpacked_step(tmp_path: Path) -> None:
    steps = {}
    for packing in (False, True):
        found = encode(EXAMPLES, tiny_tokenizer(), config(packing=packing, max_length=64))
        trainer = trainer_on(
            found,
            tmp_path / str(packing),
            batch=1,
            gradient_accumulation_steps=len(found.dataset),
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
        )
        loss = trainer.train().training_loss
        steps[packing] = (loss, [p.detach().clone() for p in trainer.model.parameters()])
    expected, tokens = by_hand()
    assert steps[False][0] == pytest.approx(expected / tokens, rel=1e-5)
    assert steps[True][0] == pytest.approx(steps[False][0], rel=1e-5)
    for packed, unpacked in zip(steps[True][1], steps[False][1], strict=True):
        torch.testing.assert_close(packed, unpacked, rtol=1e-4, atol=1e-6)

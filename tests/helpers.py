"""Small things that several tests build: a model, its tokenizer, a data file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"

# Plain ChatML, on purpose without {% generation %}: most published templates lack it too.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "system user assistant question answer yes no",
    "one two three four five six seven eight nine ten",
    '{"name": "value", "number": 12}',
)


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens: any text round-trips, nothing is unknown.

    Pass `chat_template=None` for the tokenizer of a base model.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END, TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TURN,
        eos_token=END_OF_TURN,
        pad_token=END,
        chat_template=chat_template,
        model_max_length=512,
    )


def tiny_llama(
    *,
    hidden: int = 32,
    layers: int = 2,
    vocab: int = 320,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention: 4 query heads, 2 key-value heads.

    The global random state is left as it was. `config` overrides any LlamaConfig field.
    """
    settings: dict[str, Any] = dict(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(settings | config))).to(dtype)


def save_tiny_model(folder: Path, *, chat_template: str | None = CHATML, **llama: Any) -> Path:
    """Write `tiny_llama(**llama)` and its tokenizer into `folder`, and return the folder."""
    tokenizer = tiny_tokenizer(chat_template)
    tiny_llama(**{"vocab": len(tokenizer), **llama}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(count: int = 8) -> list[dict[str, Any]]:
    """Distinct, learnable conversations: repeat the number that was asked for."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number}"},
            ]
        }
        for number in range(count)
    ]

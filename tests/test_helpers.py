"""The test helpers keep their promises."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import tiny_llama, tiny_tokenizer


def test_fresh_memory_is_poisoned():
    assert torch.empty(7).isnan().all()


def test_any_text_round_trips():
    tokenizer = tiny_tokenizer()
    text = 'naïve <b> {"n": 12}\n\tend'
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tiny_models_of_one_seed_are_equal_and_leave_the_global_state_alone():
    before = torch.get_rng_state()
    first, second = tiny_llama(seed=3), tiny_llama(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_model_folder_loads_like_a_published_one(tiny_model_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"

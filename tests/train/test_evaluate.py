"""Measuring: batches answer as single prompts do, and training is not disturbed."""

import random

import numpy as np
import pytest
import torch

from helpers import tiny_llama, tiny_tokenizer
from hirank.errors import HirankError
from hirank.train.evaluate import (
    EvalConfig,
    Question,
    exact_match,
    generate,
    greedy,
    need_questions,
    undisturbed,
)

PROMPTS = ["<|im_start|>user\nsay 7", "x", "the quick brown fox jumps over the lazy dog and"]


def answers(batch_size: int, prompts=PROMPTS):
    model, tokenizer = tiny_llama().train(), tiny_tokenizer()
    return generate(model, tokenizer, prompts, max_new_tokens=6, batch_size=batch_size)


def test_a_padded_batch_answers_as_single_prompts_do():
    single = answers(1)
    assert answers(3) == single and answers(2) == single
    assert answers(3, PROMPTS[::-1]) == single[::-1]
    assert len(set(single)) > 1


def test_what_is_done_is_told_before_each_batch():
    told = []
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    settings = {"max_new_tokens": 1, "batch_size": 2}
    generate(model, tokenizer, PROMPTS, told=lambda *counts: told.append(counts), **settings)
    assert told == [(0, 3), (2, 3)]


def test_generation_equals_the_plain_argmax_loop():
    model, tokenizer = tiny_llama().eval(), tiny_tokenizer()
    ids = tokenizer.encode(PROMPTS[0], return_tensors="pt")
    start = ids.shape[1]
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert answers(1)[0] == tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_sampling_settings_of_the_model_are_not_used():
    model = tiny_llama()
    model.generation_config.do_sample, model.generation_config.temperature = True, 2.0
    model.generation_config.eos_token_id = [5, 2]
    settings = greedy(model, tiny_tokenizer(), 7)
    assert settings.do_sample is False and settings.max_new_tokens == 7
    assert settings.eos_token_id == [2, 5]


def test_measuring_leaves_flags_and_random_states_alone():
    model = tiny_llama().train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with undisturbed(model):
        assert not model.training and not torch.is_grad_enabled()
        torch.rand(3), np.random.rand(3), random.random()
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert [module.training for module in model.modules()] == flags


def test_flags_come_back_after_a_failure():
    model = tiny_llama().train()
    with pytest.raises(KeyboardInterrupt), undisturbed(model):
        raise KeyboardInterrupt
    assert all(module.training for module in model.modules())


def test_exact_match_ignores_white_space_around_and_nothing_else():
    asked = [Question("p", text) for text in ("a b", "a b", "a b", "A b")]
    assert exact_match(["a b", " a b\n", "a  b", "a b"], asked) == 0.5


def test_exact_match_without_questions_is_refused():
    need_questions([], EvalConfig())
    need_questions([Question("p", "a")], EvalConfig(exact_match=True))
    with pytest.raises(HirankError, match="held-out rows with an answer"):
        need_questions([], EvalConfig(exact_match=True))

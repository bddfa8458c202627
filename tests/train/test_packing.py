"""Packed rows are full, and documents in them are as if they were alone."""

import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from helpers import tiny_llama
from hirank.errors import HirankError
from hirank.train import packing
from hirank.train.packing import Collator, collator_for, is_isolated, pack

ATTENTION = ["eager", "sdpa"]


def test_pack_fills_rows_and_loses_nothing() -> None:
    lengths = [random.Random(0).randint(1, 100) for _ in range(500)]
    rows = pack(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 100
    assert len(rows) <= 1.05 * sum(lengths) / 100 + 1
    assert rows == pack(lengths, 100)


def test_pack_is_best_fit() -> None:
    assert pack([5, 3, 2, 4, 6], 10) == [[4, 3], [0, 1, 2]]
    assert pack([10, 10], 10) == [[0], [1]]
    assert pack([], 10) == []


def row(*documents: list[int]) -> dict[str, list[int]]:
    ids = [token for document in documents for token in document]
    return {"input_ids": ids, "labels": ids, "seq_lengths": [len(d) for d in documents]}


def test_unpacked_batch() -> None:
    batch = Collator(pad_token_id=9)(
        [
            {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
            {"input_ids": [4], "labels": [-100]},
        ]
    )
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3], [4, 9, 9]],
        "labels": [[-100, 2, 3], [-100, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }


def test_packed_batch() -> None:
    batch = Collator(pad_token_id=9, packed=True)([row([1, 2, 3], [4, 5]), row([6])])
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5], [6, 9, 9, 9, 9]],
        "labels": [[1, 2, 3, 4, 5], [6, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]],
    }


def test_flat_batch() -> None:
    batch = Collator(pad_token_id=9, packed=True, flatten=True)([row([1, 2, 3], [4, 5]), row([6])])
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6]],
        "labels": [[1, 2, 3, 4, 5, 6]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
    }


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("flatten", [False, True])
def test_packed_documents_give_the_logits_they_give_alone(attention: str, flatten: bool) -> None:
    model = tiny_llama(attn_implementation=attention).eval()
    documents = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14], [15, 16, 17, 18, 19]]
    rows = [row(*documents[:2]), row(*documents[2:4]), row(documents[4])]
    packed = logits(model, Collator(0, packed=True, flatten=flatten)(rows))
    places = [(0, 0), (0, 3), (1, 0), (1, 4), (2, 0)]
    if flatten:
        places = [(0, 0), (0, 3), (0, 4), (0, 8), (0, 10)]
    for document, (line, start) in zip(documents, places, strict=True):
        alone = logits(model, Collator(0)([row(document)]))[0]
        torch.testing.assert_close(packed[line, start : start + len(document)], alone)


class Leaky(Collator):
    """A mask of ones tells the model that the row is a single document."""

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        batch = super().__call__(rows)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_isolation_is_tried_out(attention: str, dtype: torch.dtype) -> None:
    model = tiny_llama(attn_implementation=attention, dtype=dtype)
    assert is_isolated(model, Collator(0, packed=True))
    assert not is_isolated(model, Leaky(0, packed=True))


def test_the_trial_leaves_no_trace() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    model.lm_head.eval()
    state = torch.get_rng_state()
    assert is_isolated(model, Collator(0, packed=True))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and model.model.layers[0].training and not model.lm_head.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_collator_for_a_model(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_llama()
    assert collator_for(model, tokenizer, packing=False) == Collator(tokenizer.pad_token_id)
    assert collator_for(model, tokenizer, packing=True) == Collator(
        tokenizer.pad_token_id, packed=True
    )


def test_collator_for_a_model_with_adapters(tokenizer: PreTrainedTokenizerFast) -> None:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear"))
    assert collator_for(model, tokenizer, packing=True).packed


def test_flash_attention_reads_one_flat_row(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    monkeypatch.setattr(packing, "is_isolated", lambda *_: True)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert collator_for(model, tokenizer, packing=True).flatten
    assert not collator_for(model, tokenizer, packing=False).flatten


def test_a_model_that_leaks_is_refused(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "Collator", Leaky)
    with pytest.raises(HirankError, match=r"LlamaForCausalLM with sdpa .* set data.packing=false"):
        collator_for(tiny_llama(), tokenizer, packing=True)
    assert collator_for(tiny_llama(), tokenizer, packing=False)

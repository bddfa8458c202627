"""A whole language model: tied embeddings, checkpointing, and a plain folder at the end."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers import tiny_llama
from hirank import Apollo, Fira, GaLoreAdamW, QGaLoreAdamW
from hirank.bench.compat import checkpoint_blocks
from hirank.optim.weights import Int8Weight, dequantize_weights


def step(model: nn.Module, optimizer, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("cls", [GaLoreAdamW, QGaLoreAdamW, Fira, Apollo])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_llama_learns_a_line_by_heart(cls: type, checkpointing: bool, tmp_path: Path):
    torch.manual_seed(0)
    model = tiny_llama()
    if checkpointing:
        checkpoint_blocks(model)
    model.train()
    optimizer = cls(model, rank=8, gap=10, lr=0.01, scale=1.0)
    optimizer.step_in_backward()
    tokens = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))
    losses = [step(model, optimizer, tokens) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    linears = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    projected = {id(p) for p in optimizer.projected()}
    assert len(projected) == 2 * 7 and id(model.get_output_embeddings().weight) not in projected
    if cls is QGaLoreAdamW:
        assert sum(isinstance(w, Int8Weight) for w in linears) == 2 * 7
    _assert_saves_as_a_plain_model(model.eval(), tokens, tmp_path)


def _assert_saves_as_a_plain_model(model: nn.Module, tokens: torch.Tensor, folder: Path) -> None:
    with torch.no_grad():
        before = model(tokens).logits
    dequantize_weights(model)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, before)


def test_bf16_weights_with_int8_state():
    torch.manual_seed(0)
    model = tiny_llama().to(torch.bfloat16).train()
    optimizer = QGaLoreAdamW(model, rank=8, gap=10, lr=0.01, scale=1.0)
    optimizer.step_in_backward(clip=1.0)
    tokens = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))
    losses = [step(model, optimizer, tokens) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

"""Real quantised layers, where bitsandbytes is installed."""

import pytest
import torch
from torch import nn

from doctor.cases import adamw, named, wrap
from hirank import diagnose

bitsandbytes = pytest.importorskip("bitsandbytes")


class Packed(nn.Module):
    is_loaded_in_4bit = True

    def __init__(self) -> None:
        super().__init__()
        layer = bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
        self.lin = layer.to("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


def test_four_bits_and_a_magnitude_cast_along_with_the_adapter():
    model = wrap(Packed(), target_modules=["lin"], use_dora=True, task_type=None)
    assert not diagnose(model, optimizer=adamw(model), batch={"x": torch.randn(2, 64)})
    for p in named(model, "lora_magnitude_vector"):
        p.data = p.data.bfloat16()
    assert [finding.name for finding in diagnose(model)] == ["half-magnitude-on-quantised-base"]

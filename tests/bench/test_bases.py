"""The suite `layer` over a base in four bits."""

import json

import pytest
import torch
from torch import nn

from hirank.bench.bases import dequantised, quantised
from hirank.bench.options import main
from hirank.errors import HirankError

SMALL = "layer --shape 128x64 --rank 4 --tokens 8 --calls 1 --threads 1 --repeats 1 --warmup 0"


def test_four_bits_are_measured_and_judged_by_their_own_floats(tmp_path):
    pytest.importorskip("bitsandbytes")
    said = []
    arms = "peft-lora,peft-dora,dense-dora,hirank-lora,hirank-dora"
    words = f"{SMALL} --base nf4,plain --arms {arms} --cpu --out {tmp_path}".split()
    assert main(words, said.append) == 0, said
    (file,) = tmp_path.rglob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["settings"]["base"] for row in rows] == ["nf4"] * 5 + ["plain"] * 5
    assert sum("DISAGREES" in line for line in said) == 0


def test_floats_of_four_bits():
    pytest.importorskip("bitsandbytes")
    plain = nn.Linear(64, 32, bias=False)
    made = quantised(plain, "nf4")
    x = torch.randn(3, 64)
    assert torch.allclose(dequantised(made)(x), made(x), atol=1e-5)
    assert dequantised(plain) is quantised(plain, "plain") is plain


def test_unknown_base():
    with pytest.raises(HirankError, match="--base got 'int3': choose from plain, nf4"):
        quantised(nn.Linear(2, 2), "int3")

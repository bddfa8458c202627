"""Four bits to floats: on a GPU, or in Triton's interpreter; bitsandbytes is the truth."""

import pytest
import torch
from torch import nn

from hirank.adapters.dequantise import kind_of
from hirank.adapters.four_bits import weight_4bit
from hirank.kernels._triton import HAS_TRITON, interpreting
from hirank.kernels.nf4 import Nf4, dequantize_nf4, dequantize_nf4_ref, reads_nf4

bits = pytest.importorskip("bitsandbytes")
runs = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or interpreting())),
    reason="needs a GPU, or TRITON_INTERPRET=1 (make test runs both)",
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 64), (96, 128), (37, 320)]


def linear(shape, device, size=64, kind="nf4", nested=True):
    draw = torch.Generator().manual_seed(3)
    made = bits.nn.Linear4bit(shape[1], shape[0], bias=False, compute_dtype=torch.float32)
    weight = torch.randn(shape, generator=draw)
    made.weight = bits.nn.Params4bit(
        weight, requires_grad=False, quant_type=kind, blocksize=size, compress_statistics=nested
    )
    return made.to(device)


def parts(layer):
    state = layer.weight.quant_state
    nested = None
    if state.nested:
        two = state.state2
        nested = (two.absmax, two.code, state.offset, two.blocksize)
    return Nf4(layer.weight.data, state.absmax, state.code, state.blocksize, nested)


@runs
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_bitsandbytes(shape, dtype, nested, device):
    layer = linear(shape, device, nested=nested)
    given = parts(layer)
    assert reads_nf4(given, shape)
    exact = weight_4bit(layer, dtype)
    assert torch.equal(dequantize_nf4_ref(given, shape, dtype), exact)
    found = dequantize_nf4(given, shape, dtype)
    if interpreting() and dtype == torch.bfloat16:  # it rounds towards zero
        exact = (weight_4bit(layer, torch.float32).view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(found, exact.to(dtype)) and found.dtype == dtype


@runs
@pytest.mark.parametrize("size", [128, 256, 1024])
def test_other_block_sizes(size, device):
    layer = linear((16, 2048), device, size=size)
    found = dequantize_nf4(parts(layer), (16, 2048), torch.float32)
    assert torch.equal(found, weight_4bit(layer, torch.float32))


@runs
def test_layers_take_it_where_it_fits(device):
    layer = linear((96, 128), device)
    kind = kind_of(layer)
    assert torch.equal(kind.weight(layer, torch.float16), weight_4bit(layer, torch.float16))
    assert kind.weight(layer, torch.float64).dtype == torch.float64
    other = linear((96, 128), device, kind="fp4")
    assert torch.equal(kind.weight(other, torch.float16), weight_4bit(other, torch.float16))


def test_what_it_does_not_take(device):
    given = parts(linear((96, 128), device))
    assert not reads_nf4(given, (96, 64))
    assert not reads_nf4(given._replace(data=given.data.view(torch.int8)), (96, 128))
    assert not reads_nf4(given._replace(nested=None), (96, 128))
    assert not reads_nf4(given._replace(size=96), (96, 128))


@pytest.mark.gpu
def test_it_is_one_launch_and_never_waits():
    layer = linear((4096, 1024), "cuda")
    assert isinstance(layer, nn.Linear)
    kind = kind_of(layer)
    kind.weight(layer, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = kind.weight(layer, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, weight_4bit(layer, torch.bfloat16))

"""The norm of a grouped convolution with an adapter, against the dense kernel in fp64."""

import pytest
import torch

from hirank.kernels.dora_norm import row_norm
from hirank.kernels.grouped_norm import grouped_norm, grouped_norm_op
from hirank.testing import FLOATS, relative_rms
from recorder import OpLog

SIZES = [  # N, K, R, G
    (8, 18, 4, 2),
    (12, 5, 6, 3),
    (6, 9, 6, 6),
    (4, 7, 3, 1),
]
ERROR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def make(size, dtype=torch.float64):
    n, k, r, groups = size
    weight, A, B = torch.randn(n, k), torch.randn(r, groups * k), torch.randn(n, r // groups)
    return (t.to(dtype) for t in (weight, A, B))


def dense(weight, A, B, scale, groups):
    """Each out channel's kernel over all in channels, written out."""
    n, k = weight.shape[0] // groups, weight.shape[1]
    full = B.new_zeros(weight.shape[0], groups * k)
    for row in range(weight.shape[0]):
        j = row // n
        full[row] = scale * B[row] @ A.chunk(groups)[j]
        full[row, j * k : (j + 1) * k] += weight[row]
    return full.norm(dim=1)


@pytest.mark.parametrize("chunk_bytes", [1, 2**20], ids=["one-group", "all-groups"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_is_the_norm_of_the_dense_kernel(size, dtype, chunk_bytes):
    weight, A, B = make(size, dtype)
    groups = size[-1]
    norm = grouped_norm(weight, A, B, scale=1.5, groups=groups, chunk_bytes=chunk_bytes)
    truth = dense(weight.double(), A.double(), B.double(), 1.5, groups)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_rms(norm, truth) < ERROR[dtype]


def test_cancelling_rows_are_exact():
    weight, A, B = make((8, 18, 4, 2), torch.float32)
    # the other groups' columns zero, the own ones cancel all but a ten-thousandth
    own = torch.zeros_like(A)
    own[:2, :18], own[2:, 18:] = A[:2, :18], A[2:, 18:]
    product = torch.cat([B[:4] @ own[:2, :18], B[4:] @ own[2:, 18:]])
    weight = -2 * product * (1 - 1e-4)
    truth = dense(weight.double(), own.double(), B.double(), 2.0, 2)
    assert relative_rms(grouped_norm(weight, own, B, scale=2.0, groups=2), truth) < 1e-2


@pytest.mark.parametrize("chunk_bytes", [1, 2**20], ids=["one-row", "all-rows"])
def test_ranks_that_cancel_among_themselves(chunk_bytes):
    """With W zero and rows of A alike, there is nothing but what they leave."""
    weight, A, B = torch.zeros(8, 18), torch.randn(1, 36).repeat(8, 1), torch.randn(8, 4)
    A += 1e-5 * torch.randn_like(A)
    B -= B.mean(1, keepdim=True) * (1 - 1e-4)
    truth = dense(weight.double(), A.double(), B.double(), 2.0, 2)
    norm = grouped_norm(weight, A, B, scale=2.0, groups=2, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(norm.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_a_graph_records_does_without_a_look_at_values(size):
    weight, A, B = make(size, torch.float32)
    truth = dense(weight.double(), A.double(), B.double(), 1.5, size[-1])
    with OpLog() as log:
        norm = grouped_norm(weight, A, B, scale=1.5, groups=size[-1], look=False)
    assert not {"aten::nonzero", "aten::item", "aten::_local_scalar_dense"} & {
        op.name for op in log.ops
    }
    assert relative_rms(norm, truth) < ERROR[torch.float32]


def test_the_op_is_sound_and_stays_whole_in_a_graph():
    weight, A, B = make((8, 18, 4, 2), torch.float32)
    torch.library.opcheck(grouped_norm_op, (weight, A, B, 1.5, 2))
    compiled = torch.compile(grouped_norm_op, backend="eager", fullgraph=True)
    expected = grouped_norm(weight, A, B, scale=1.5, groups=2)
    assert torch.equal(compiled(weight, A, B, 1.5, 2), expected)


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_without_an_adapter_it_is_the_norm_of_the_weight(scale):
    weight, A, B = make((12, 5, 6, 3), torch.float32)
    B = B if scale == 0 else torch.zeros_like(B)
    norm = grouped_norm(weight, A, B, scale=scale, groups=3)
    torch.testing.assert_close(norm, row_norm(weight), rtol=1e-6, atol=0)


def test_autocast_does_not_reach_it():
    weight, A, B = make((8, 18, 4, 2), torch.float32)
    expected = grouped_norm(weight, A, B, scale=1.5, groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grouped_norm(weight, A, B, scale=1.5, groups=2), expected)


def test_shapes_that_do_not_fit_are_named():
    weight, A, B = make((8, 18, 4, 2))
    with pytest.raises(ValueError, match=r"A must be \[R, 54\]"):
        grouped_norm(weight, A, B, scale=1.0, groups=3)

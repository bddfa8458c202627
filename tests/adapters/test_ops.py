"""Every op that hirank registers is what PyTorch's compiler and fake tensors believe it to be."""

import importlib
import pkgutil

import pytest
import torch
from torch import Tensor

import hirank
from hirank.adapters.traced_handles import handle_for
from hirank.kernels._triton import interpreting

for found in pkgutil.walk_packages(hirank.__path__, "hirank."):
    if found.name.startswith(("hirank.kernels", "hirank.adapters")):
        importlib.import_module(found.name)  # registers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K, R = 7, 20, 12, 3


def rows(*size: int, grad: bool = True) -> Tensor:
    draw = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=draw).to(DEVICE).requires_grad_(grad)


def positive(count: int, grad: bool = False) -> Tensor:
    return (rows(count, grad=False).abs() + 1).requires_grad_(grad)


def weights(dora: bool, bias: bool, grad: bool = True):
    return (
        rows(N, K, grad=False), rows(R, K, grad=grad), rows(N, R, grad=grad),
        positive(N, grad) if dora else None, rows(N, grad=grad) if bias else None,
    )  # fmt: skip


LIVE = torch.tensor(1.5, dtype=torch.float64)  # a scale that is no constant


def linear(dora: bool, bias: bool, training: bool, shape=(2, M), live=None):
    x = rows(*shape, K, grad=training)
    return (x, *weights(dora, bias, grad=training), live, 1.5, "auto", training)


def linear_backward(dora: bool, bias: bool, needs=(True,) * 5, live=None):
    needs = (*needs[:3], needs[3] and dora, needs[4] and bias)
    dy, x, h = rows(M, N, grad=False), rows(M, K, grad=False), rows(M, R, grad=False)
    y = rows(M, N, grad=False) if needs[3] else None
    return (dy, h, y, x, *weights(dora, bias, grad=False), live, 1.5, "auto", list(needs))


def norm(dtype=torch.float32, live=None):
    W, A, B, *_ = weights(True, False)
    return (W, A, B, live, 1.5, dtype)


def gain_forward(bias: Tensor | None):
    optional = len(torch.ops.hirank.gain_forward_.default._schema.arguments) - 4
    return (rows(M, N, grad=False), rows(N, grad=False), positive(N), bias, *[None] * optional)


def gain_backward(y: bool, need_dm: bool):
    sizes = ((M, K), (M, R), (N, K), (N, R))
    return (
        rows(M, N, grad=False), rows(M, N, grad=False) if y else None, rows(N, grad=False) + 3,
        positive(N), None, *(rows(*size, grad=False) for size in sizes), need_dm,
    )  # fmt: skip


def compose(base: bool, bias: bool, y: bool):
    optional = rows(M, N, grad=False) if base else None
    return (
        optional, rows(M, N, grad=False), rows(N, grad=False), positive(N),
        rows(N, grad=False) if bias else None, rows(M, N, grad=False) if y else None, 1.5,
    )  # fmt: skip


def compose_backward(base: bool, needs: tuple[bool, bool, bool]):
    given = rows(M, N, grad=False)
    tensors = given + 1 if base else None, given + 2, rows(N, grad=False), positive(N), None
    return (given, *tensors, 1.5, *needs)


def plane(base: bool):
    optional = rows(2, N, M, grad=False) if base else None
    row = rows(N, grad=False), positive(N), None
    return (optional, rows(2, N, M, grad=False), *row, optional, 1.5)


def plane_backward(base: bool, needs: tuple[bool, bool, bool]):
    given = rows(2, N, M, grad=False)
    row = rows(N, grad=False), positive(N), None
    return (given, given + 1 if base else None, given + 2, *row, 1.5, *needs)


def grouped(groups: int):
    weight = rows(4 * groups, K, grad=False)
    factors = rows(2 * groups, groups * K, grad=False), rows(4 * groups, 2, grad=False)
    return (weight, *factors, 1.5, groups)


class Scaled:
    """A layer, as far as its scale goes."""

    scaling = {"default": 1.5}


SCALED = Scaled()
CASES = {
    "adapted_linear": [linear(d, b, t) for d in (True, False) for b in (True, False)
                       for t in (True, False)]
    + [linear(True, True, True, ()), linear(True, True, True, live=LIVE)],
    "adapted_linear_backward": [linear_backward(d, b) for d in (True, False)
                                for b in (True, False)]
    + [linear_backward(True, True, (False, True, False, True, False)),
       linear_backward(True, True, live=LIVE)],
    "adapter_norm": [norm(), norm(torch.bfloat16), norm(live=LIVE)],
    "adapter_scale": [(handle_for(SCALED), "default")],
    "gain_forward_": [gain_forward(None), gain_forward(rows(N, grad=False))],
    "gain_backward": [gain_backward(True, True), gain_backward(False, True),
                      gain_backward(False, False)],
    "dora_compose_fwd": [compose(True, False, True), compose(False, True, False)],
    "dora_compose_bwd": [compose_backward(True, (True, True, True)),
                         compose_backward(False, (False, True, False))],
    "grouped_norm": [grouped(2), grouped(3)],
    "plane_compose_fwd": [plane(True), plane(False)],
    "plane_compose_bwd": [plane_backward(True, (True, True, True)),
                          plane_backward(False, (False, True, False))],
}  # fmt: skip


def registered() -> set[str]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("hirank::"))
    return {name.removeprefix("hirank::").partition(".")[0] for name in names}


ELSEWHERE = {  # in test_traced_quantised.py
    "adapted_quantised",
    "adapted_quantised_backward",
    "frozen_quantised",
    "frozen_quantised_backward",
    "quantised_norm",
}


def test_every_registered_op_is_here():
    assert registered() - ELSEWHERE == set(CASES)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name, cases in CASES.items() for arguments in cases],
    ids=[f"{name}-{i}" for name, cases in CASES.items() for i, _ in enumerate(cases)],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck(name, arguments):
    if interpreting() and name.startswith("adapt"):
        pytest.skip("the table of norms is made from addresses, which fake tensors lack")
    torch.library.opcheck(getattr(torch.ops.hirank, name).default, arguments)

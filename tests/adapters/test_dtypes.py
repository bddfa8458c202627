"""D18 and D36: x is never taken through fp32, and any mix of float dtypes works.

The rule for a mix: the output has the dtype that the base layer alone would give. REF is the
definition in fp64 on the very same (already rounded) weights and inputs.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from peft.helpers import disable_input_dtype_casting

from adapters.setups import Lin, layer_of, pair, perturb, reference, stock
from hirank import accelerate
from hirank.testing import relative_rms
from recorder import OpLog

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXES = list(itertools.product(DTYPES, repeat=3))
# Half a rounding, relative: RMS of rounding once is about 0.6 of it, and a layer rounds A, B, h,
# the product and the output.
ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
ROUNDINGS = 4


def short(dtype):
    return str(dtype).removeprefix("torch.")


def autocast(on):
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


# D18


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_d18_x_stays_in_the_compute_dtype(dora, training):
    theirs, ours = pair(Lin(256, 384).bfloat16(), use_dora=dora)
    ours.train(training)
    x = torch.randn(5, 256).bfloat16().requires_grad_(training)
    with autocast(True):
        ours(x)  # what is kept is there
        with OpLog() as log:
            y = ours(x)
    assert not [op for op in log.ops if op.name == "aten::_to_copy" and touches(op, (5, 256))]
    assert not log.copies((5, 256))
    with autocast(True):
        stock_y = theirs.train(training)(x)
    assert y.dtype == stock_y.dtype == torch.bfloat16
    assert relative_rms(y.detach(), stock_y.detach()) < ROUNDINGS * ULP[torch.bfloat16]


@pytest.mark.parametrize("dora", [True, False], ids=["dora", "lora"])
def test_d18_nor_does_the_backward_pass_widen_x_or_its_gradient(dora):
    ours = pair(Lin(256, 384).bfloat16(), use_dora=dora)[1]
    x = torch.randn(5, 256).bfloat16().requires_grad_()
    with autocast(True):
        y = ours(x)
    with OpLog() as log:
        y.backward(torch.ones_like(y))
    assert x.grad.dtype == torch.bfloat16
    assert not [op for op in log.ops if op.name == "aten::_to_copy" and touches(op, (5, 256))]


def touches(op, shape):
    return any(found == shape for _, found in (*op.inputs, *op.outputs))


# D36


def mixed(base, adapter):
    """A converted layer whose base and adapter, m too, have these dtypes, perturbed."""
    model = accelerate(perturb(stock(Lin(48, 40).to(base))))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapter)
    return model


def plain_dtype(base, x):
    """What the base layer alone gives; None if it cannot take x."""
    try:
        return base(x).dtype
    except RuntimeError:
        return None


def coarsest(*dtypes):
    return max(ULP[dtype] for dtype in dtypes)


@pytest.mark.filterwarnings("ignore:lora_magnitude_vector is trained in")  # D03 asks for it
@pytest.mark.parametrize("uncast", [False, True], ids=["peft-casts", "peft-does-not"])
@pytest.mark.parametrize("under", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("x_dtype", "base", "adapter"), MIXES, ids=["-".join(map(short, mix)) for mix in MIXES]
)
def test_d36_any_mix_of_dtypes(x_dtype, base, adapter, under, uncast):
    model = mixed(base, adapter)
    x = torch.randn(7, 48).to(x_dtype)
    with autocast(under):
        wanted = plain_dtype(layer_of(model).base_layer, x)
    if wanted is None:
        pytest.skip("the base layer alone cannot take this x")
    x.requires_grad_()
    with autocast(under), disable_input_dtype_casting(model) if uncast else nullcontext():
        y = model(x)
    assert y.dtype == wanted
    assert y.isfinite().all()
    compute = torch.bfloat16 if under else base
    bound = ROUNDINGS * coarsest(x_dtype, base, adapter, compute)
    assert relative_rms(y.detach(), reference(model, x.detach()).detach()) < bound
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == x_dtype
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.isfinite().all() for g in grads.values())

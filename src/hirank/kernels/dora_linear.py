"""One adapted linear, owned as a whole.

    y = g (x W^T + s (x A^T) B^T) + b        g = m / norm, see `dora_norm.dora_gain`

LoRA is the same without g. Written out, with v = x W^T + s (x A^T) B^T:

    forward     h  = s x A^T                        scaled inside the GEMM
                u  = x W^T + b, then += h B^T       added inside the GEMM (fp32, or no g)
                y  = g (u + h B^T) + (1 - g) b      one pass, see `gain_pass`
            or  y  = g (x W^T + h B^T) + b          one GEMM, see `joined_gemm`
    backward    t  = g dy,  dm = colsum(dy v)/norm  one pass, see `gain_pass`
                tB = s t B
                dx = t W, then += tB A              added inside the GEMM, or one GEMM
                dA = tB^T x,  dB = t^T h,  db = colsum(dy)

No product needs a pass of its own. dm is read off the output, which the layer above mostly keeps
anyway: nothing out-sized is saved but y.

Shapes     x [M, K]; weight [N, K]; lora_A [R, K]; lora_B [N, R]; magnitude, norm, bias [N];
           h [M, R]; tB [M, R]; y [M, N].   M tokens, K in features, N out features, R rank.
Precision  x and weight share the compute dtype; A and B are cast to it; magnitude and norm are
           fp32 and so are g and the sums of dm. GEMMs round to the compute dtype, the gain pass
           widens and rounds once. In fp16 a large s could make h overflow: a power of two of it
           goes on B instead, see `low_rank`. Where b is large beside v, a large |g| loses
           |g| |b| roundings, as u holds b before g meets it.
Saves      x and h, as LoRA does, and (for dm) the output y; the weights by reference.
Paper      DoRA, arXiv 2402.09353, eq. 5; section 4.3: the norm is a constant for autograd.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hirank.kernels._backend import REFERENCE, GainPass, gain_pass_for
from hirank.kernels._low_rank import back_of, hidden_of, low_rank, moved
from hirank.kernels._products import product
from hirank.kernels.cast_windows import LayerCasts
from hirank.kernels.dora_decode import decodes, dora_decode
from hirank.kernels.dora_norm import dora_gain
from hirank.kernels.joined_gemm import joined_gemm

__all__ = ["DoraLinearGrads", "compute_dtype", "dora_linear"]
__all__ += ["GainPass", "dora_linear_bwd_ref", "dora_linear_fwd_ref", "fitted", "owned_linear"]
__all__ += [
    "Weights",
    "activations",
    "by_formula",
    "differentiable_grads",
    "gain_pass_for",
    "join_",
]
__all__ += ["low_rank"]


class DoraLinearGrads(NamedTuple):
    """Gradients; None where none was asked for."""

    x: Tensor | None  # [M, K]
    lora_A: Tensor | None  # [R, K]
    lora_B: Tensor | None  # [N, R]
    magnitude: Tensor | None  # [N]
    bias: Tensor | None  # [N]


def dora_linear_fwd_ref(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    gain_pass: GainPass = REFERENCE,
    casts: LayerCasts | None = None,
) -> tuple[Tensor, Tensor]:
    """y [..., N] and h = s x A^T [M, R]. Without magnitude: plain LoRA.

    `casts`: where the caller has A and B in the dtype of x.
    """
    rows = _rows(x)
    h, B = hidden_of(rows, lora_A, lora_B, scale, casts)
    tile = gain_pass.tile(rows, weight, B, by_column=True)
    if tile is not None:
        y = x.new_empty(*x.shape[:-1], weight.shape[0])
        joined_gemm(
            tile, y, rows, weight, h, B,
            by_column=True, magnitude=magnitude, norm=norm, bias=bias,
        )  # fmt: skip
        return y, h
    return join_(F.linear(x, weight, bias), h, B, magnitude, norm, bias, gain_pass), h


def join_(
    u: Tensor,
    h: Tensor,
    B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    gain_pass: GainPass = REFERENCE,
) -> Tensor:
    """u <- g (u + h B^T) + (1 - g) b in place, where u [..., N] is the base layer's output."""
    results = u.view(-1, u.shape[-1])
    lora = None
    if magnitude is None or u.dtype not in (torch.bfloat16, torch.float16):
        results.addmm_(h, B.t())
    else:
        lora = h @ B.t()  # apart: the sum would be rounded before the gain, and then again
    if magnitude is not None and norm is not None:
        gain_pass.forward_(results, magnitude, norm, bias, lora)
    return u


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def dora_linear_bwd_ref(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    y: Tensor | None,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    needs: Sequence[bool] = (True, True, True, True, True),
    gain_pass: GainPass = REFERENCE,
    casts: LayerCasts | None = None,
) -> DoraLinearGrads:
    """Hand-written backward; x, y and dy with any leading dimensions, dx with those of x.

    `needs` says which of x, A, B, magnitude, bias want a gradient. `y` is the forward's output;
    None (it was overwritten) computes v again.
    """
    need_x, need_A, need_B, need_m, need_b = needs
    rows = _rows(x)
    power = moved(x.dtype, scale)
    if power != 1:  # A and B so that h B^T and tB A stay
        A, B, scale = lora_A.to(x.dtype) * power, lora_B.to(x.dtype) * power, scale / power / power
    else:
        A, B = lora_A, lora_B
    if magnitude is not None and norm is not None:
        t, dm = gain_pass.backward(dy, y, magnitude, norm, bias, rows, h, weight, B, need_m)
    else:
        t, dm = _rows(dy), None
    dx = dA = None
    if need_x or need_A:
        tB, A, owed = back_of(t, A, B, scale, casts)  # [M, R]
        if need_x:
            dx = _input_gradient(x, t, weight, tB, A, gain_pass)
        if need_A:
            tB = tB if owed == 1 else tB.mul_(owed)
            dA = product(tB.t(), rows, lora_A.dtype)
    dB = product(t.t(), h, lora_B.dtype) if need_B else None
    if power != 1:
        dA, dB = (None if grad is None else grad.mul_(power) for grad in (dA, dB))
    db = _rows(dy).sum(0) if need_b and bias is not None else None
    return DoraLinearGrads(dx, dA, dB, dm if need_m else None, db)


def _input_gradient(
    x: Tensor, t: Tensor, weight: Tensor, tB: Tensor, A: Tensor, gain_pass: "GainPass"
) -> Tensor:
    """t W + tB A, of the shape of x."""
    tile = gain_pass.tile(t, weight, A, by_column=False)
    if tile is None:
        return torch.mm(t, weight).addmm_(tB, A).view(x.shape)
    return joined_gemm(tile, t.new_empty(x.shape), t, weight, tB, A, by_column=False)


def _plain(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """The formula as autograd would see it: only for gradients of gradients."""
    v = F.linear(x, weight) + scale * F.linear(F.linear(x, lora_A.to(x.dtype)), lora_B.to(x.dtype))
    if magnitude is not None and norm is not None:
        v = dora_gain(magnitude, norm).to(x.dtype) * v
    return v if bias is None else v + bias


class Weights(NamedTuple):
    """What a call depends on besides activations. Kept by reference: weights need no saving."""

    lora_A: Tensor
    lora_B: Tensor
    magnitude: Tensor | None
    bias: Tensor | None
    weight: Tensor
    norm: Tensor | None

    def versions(self) -> list[int]:
        """Of what code may change in place; the norm has none that counts."""
        A, B, m, b, W, _ = self
        try:
            return [
                A._version, B._version, W._version,
                0 if m is None else m._version, 0 if b is None else b._version,
            ]  # fmt: skip
        except RuntimeError:  # inference tensors have none
            return [0 if t is None or t.is_inference() else t._version for t in self[:5]]


def activations(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, h and y as saved; y comes back as None if later code overwrote it in place."""
    if ctx.versions != ctx.weights.versions():
        raise RuntimeError(
            "A weight of an adapted layer was modified by an inplace operation between its forward "
            "and its backward pass: step the optimizer after backward."
        )
    try:
        x, h, y = ctx.saved_tensors
    except RuntimeError as error:
        *rest, last = ctx._raw_saved_tensors
        if not hasattr(last, "unpack"):  # torch < 2.13
            raise RuntimeError(
                "The output of an adapted layer was modified by an inplace operation before the "
                "backward pass; use torch 2.13, or avoid that."
            ) from error
        x, h = (saved.unpack() for saved in rest)  # if another was overwritten, this raises
        y = None
    return x, h, y


class _DoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        magnitude: Tensor | None,
        bias: Tensor | None,
        weight: Tensor,
        norm: Tensor | None,
        scale: float,
        gain_pass: GainPass,
        casts: LayerCasts | None,
    ) -> Tensor:
        y, h = dora_linear_fwd_ref(
            x, weight, lora_A, lora_B, magnitude, norm, bias, scale, gain_pass, casts
        )
        needs = ctx.needs_input_grad
        if True in needs:
            # each saved tensor costs the host a few calls under checkpointing: only activations
            ctx.save_for_backward(x, h, y if needs[3] else None)
            ctx.weights = Weights(lora_A, lora_B, magnitude, bias, weight, norm)
            ctx.versions = ctx.weights.versions()
            ctx.scale, ctx.gain_pass, ctx.casts = scale, gain_pass, casts
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, h, y = activations(ctx)
        weights: Weights = ctx.weights
        if by_formula(dys[0]):  # rare
            grads = differentiable_grads(weights, ctx.needs_input_grad[:5], ctx.scale, x, dys[0])
            return *grads, None, None, None, None, None
        found = dora_linear_bwd_ref(
            dys[0], x, h, y, weights.weight, weights.lora_A, weights.lora_B, weights.magnitude,
            weights.norm, weights.bias, ctx.scale, ctx.needs_input_grad[:5], ctx.gain_pass,
            ctx.casts,
        )  # fmt: skip
        return *found, None, None, None, None, None


# without the look for functorch's wrappers that PyTorch takes at every argument of every call
_apply: Any = super(torch.autograd.Function, _DoraLinear).apply


def by_formula(dy: Tensor) -> bool:
    """Whether autograd has to derive the gradients from the plain formula.

    They will be differentiated again, or many are asked for at once (`is_grads_batched`).
    """
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy)


@torch.enable_grad()
def differentiable_grads(
    weights: Weights, needs: Sequence[bool], scale: float, x: Tensor, dy: Tensor
) -> list[Tensor | None]:
    """Gradients of x, A, B, magnitude and bias that can be differentiated again."""
    lora_A, lora_B, magnitude, bias, weight, norm = weights
    inputs = [x, lora_A, lora_B, magnitude, bias]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
    y = _plain(x, weight, lora_A, lora_B, magnitude, norm, bias, scale)
    grads = iter(
        torch.autograd.grad(y, [t for t in wanted if t is not None], dy, create_graph=True)
    )
    return [next(grads) if need else None for need in needs]


def fitted(x: Tensor, weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:
    """x and weight in one dtype, cast under autocast.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if _autocast(x.device.type):
        dtype = compute_dtype(x, weight)
        x, weight = x.to(dtype), weight.to(dtype)
    n, k = weight.shape
    r = lora_A.shape[0]
    if x.shape[-1] != k or lora_A.shape[1] != k or tuple(lora_B.shape) != (n, r):
        raise ValueError(
            f"dora_linear got x {tuple(x.shape)}, weight {n}x{k}, A {tuple(lora_A.shape)} and "
            f"B {tuple(lora_B.shape)}: x must end in {k}, A be [R, {k}] and B [{n}, R]."
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"dora_linear got x in {x.dtype} and a weight in {weight.dtype}: cast one of them, or "
            "run under autocast."
        )
    return x, weight


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What a linear layer would compute in: autocast's dtype if it is on, else the weight's."""
    kind = x.device.type
    if _autocast(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


# asked now: torch 2.11 cannot trace the question, and no call need ask again
_AUTOCAST = {kind: torch.amp.is_autocast_available(kind) for kind in ("cuda", "cpu", "xpu")}


def _autocast(kind: str) -> bool:
    available = _AUTOCAST.get(kind)
    if available is None:
        available = torch.amp.is_autocast_available(kind)
    return available and torch.is_autocast_enabled(kind)


def dora_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    *,
    scale: float,
    magnitude: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y = g (x W^T + s (x A^T) B^T) + b, with gradients for x, A, B, magnitude and bias.

    Args:
        x: [..., K], any number of leading dimensions, possibly none or empty.
        weight: [N, K], frozen: it gets no gradient. Under autocast x and weight are cast.
        lora_A, lora_B: [R, K] and [N, R], any float dtype; gradients come in theirs.
        scale: s, a plain number.
        magnitude, norm: [N] fp32 (fp64 for fp64), both or neither; neither means LoRA. The norm
            comes from `dora_norm` and is a constant for autograd.
        bias: [N], or None.
        backend: "torch" for the plain reference, "triton" for the Triton kernels, "auto" for
            whichever pays at this size on this device. fp64 always takes the reference.

    Returns:
        [..., N] in the compute dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, one of magnitude and norm is missing, or
            Triton cannot run here and was asked for.
    """
    if (magnitude is None) != (norm is None):
        raise ValueError(
            "dora_linear got only one of magnitude and norm: pass both for DoRA, none for LoRA."
        )
    x, weight = fitted(x, weight, lora_A, lora_B)
    magnitude, norm, bias = (  # the kernels read these three one after the other
        None if row is None else row.contiguous() for row in (magnitude, norm, bias)
    )
    return owned_linear(x, weight, lora_A, lora_B, magnitude, norm, bias, scale, backend)


def owned_linear(
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    magnitude: Tensor | None,
    norm: Tensor | None,
    bias: Tensor | None,
    scale: float,
    backend: str = "auto",
    casts: LayerCasts | None = None,
) -> Tensor:
    """`dora_linear` without its checks: x and weight are in the compute dtype, shapes fit.

    `casts`: where the caller has A and B in that dtype.
    """
    if bias is not None and bias.dtype != weight.dtype:
        bias = bias.to(weight.dtype)
    if torch.is_grad_enabled():
        gain_pass = gain_pass_for(backend, x, weight.shape[0])
        wrapped = torch._C._are_functorch_transforms_active()
        apply: Any = _DoraLinear.apply if wrapped else _apply
        y: Tensor = apply(x, lora_A, lora_B, magnitude, bias, weight, norm, scale, gain_pass, casts)
        return y
    if backend != "torch" and decodes(x, weight, lora_A, lora_B):
        return dora_decode(x, weight, lora_A, lora_B, magnitude, norm, bias, scale)
    gain_pass = gain_pass_for(backend, x, weight.shape[0])
    y, _ = dora_linear_fwd_ref(
        x, weight, lora_A, lora_B, magnitude, norm, bias, scale, gain_pass, casts
    )
    return y

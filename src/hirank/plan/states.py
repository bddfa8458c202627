"""What is there between two steps: weights, adapters, and what the optimiser remembers.

Sizes of the low-rank optimisers' state come from `optim/costs.py`, where their own `cost()` has
them from. NF4 is 4 bits a weight, fp32 or 8-bit scales for 64 of them, and a code book of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hirank.optim import costs
from hirank.optim.hyper import Hyper
from hirank.optim.published import PUBLISHED
from hirank.plan.block import Part, rest_of
from hirank.plan.inventory import Matrix, Shape
from hirank.plan.setting import BYTES, Setting
from hirank.plan.targets import adapted, adapts_experts, trained_bytes

__all__ = [
    "adapter_numbers",
    "adapter_parts",
    "gradient_parts",
    "hyper_of",
    "largest_trained",
    "nf4_bytes",
    "optimizer_parts",
    "step_parts",
    "trained_numbers",
    "weight_parts",
]


def nf4_bytes(numbers: int) -> int:
    """Of one weight with double quantisation: codes, 8-bit scales, their fp32 scales, an offset and
    two code books (16 and 256 numbers)."""
    blocks = -(-numbers // 64)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // 256) + 4 + 4 * (16 + 256)


def weight_parts(s: Setting, m: Shape) -> Iterator[tuple[str, Part]]:
    """(class, bytes) of the base as it lies on the GPU, buffers aside."""
    packed = {matrix.name for matrix in m.linears} if s.is_quantised else set()
    in_8_bits = _int8_names(s, m)
    whole = [x for x in m.matrices() if x.name not in packed | in_8_bits]
    plain, each = sum(x.size for x in whole), 4 if s.kbit_upcast else trained_bytes(s)
    rest = rest_of(*((x.count, x.each * each) for x in whole))
    yield "weights", Part(plain * each, f"{plain:,} weights x {each} bytes", rest)
    if packed:
        size = sum(x.count * nf4_bytes(x.each) for x in m.linears)
        count = sum(x.size for x in m.linears)
        rest = rest_of(*((x.count, -(-x.each // 2)) for x in m.linears))
        yield "quantised weights", Part(size, f"{count:,} weights in NF4: 4.127 bits each", rest)
    if in_8_bits:
        size = sum(x.count * costs.int8_weight_cost(x.each) for x in m.linears)
        rest = rest_of(*((x.count, x.each) for x in m.linears if x.name in in_8_bits))
        yield "quantised weights", Part(size, "weights of linears in int8: 8.25 bits each", rest)


def _int8_names(s: Setting, m: Shape) -> set[str]:
    return {x.name for x in adapted(s, m)} if s.method == "qgalore" else set()


# Adapters.


def adapter_numbers(s: Setting, m: Shape) -> tuple[int, int]:
    """Numbers in all A and B, and in all magnitudes."""
    layers = adapted(s, m) if s.is_adapter else ()
    low = sum(s.rank * (x.inp + x.out) * x.count for x in layers)
    low += m.layers * sum(_expert_sizes(s, m))
    return low, sum(x.out * x.count for x in layers) if s.has_gains else 0


def _expert_sizes(s: Setting, m: Shape) -> list[int]:
    """Numbers in each A and B of the experts of one block, which PEFT adapts with all-linear: the
    joint gate and up at twice the rank, for each expert, and the router."""
    if not adapts_experts(s, m):
        return []
    r, e, h, i = s.rank, m.experts, m.hidden, m.expert_size
    return [2 * r * e * h, 2 * i * 2 * r * e, r * e * i, h * r * e, r * h, e * r]


def adapter_parts(s: Setting, m: Shape) -> Iterator[tuple[str, Part]]:
    """(class, bytes) of A, B and magnitudes, and of the norms that hirank keeps for them."""
    low, magnitudes = adapter_numbers(s, m)
    if not low:
        return
    each = BYTES[s.adapter_dtype]
    ranks = f"r (in + out) = {low:,} numbers x {each} bytes"
    rest = rest_of(*((n, numbers * width) for n, numbers, width in _trained_sizes(s, m)))
    yield "adapters", Part(low * each, ranks, rest)
    if magnitudes:
        yield "adapters", Part(4 * magnitudes, f"magnitudes: {magnitudes:,} x 4 bytes")
        if s.method != "dora-peft":
            kept = f"norms, live and served, and of W alone: 3 x {magnitudes:,} x 4 bytes"
            yield "method temporaries", Part(12 * magnitudes, kept)


def trained_numbers(s: Setting, m: Shape) -> int:
    """Parameters that are trained."""
    return sum(adapter_numbers(s, m)) if s.is_adapter else m.parameters


# Gradients.


def gradient_parts(s: Setting, m: Shape) -> Part:
    """All gradients at once, each in its parameter's dtype."""
    if s.is_adapter:
        low, magnitudes = adapter_numbers(s, m)
        each = BYTES[s.adapter_dtype]
        text = f"{low:,} x {each} + {magnitudes:,} x 4 bytes"
        rest = rest_of(*((n, numbers * width) for n, numbers, width in _trained_sizes(s, m)))
        return Part(low * each + 4 * magnitudes, text, rest)
    if s.step_in_backward:
        return _largest_alone(s, m)
    each = trained_bytes(s)
    rest = rest_of(*((n, numbers * each) for n, numbers, _ in _trained_sizes(s, m)))
    return Part(m.parameters * each, f"{m.parameters:,} x {each} bytes", rest)


def _largest_alone(s: Setting, m: Shape) -> Part:
    largest = largest_trained(s, m)
    waiting = sum(x.size for x in m.matrices() if x.each < costs.SMALL)
    each = trained_bytes(s)
    text = f"the largest one {largest:,} and small ones {waiting:,}, x {each} bytes"
    return Part((largest + waiting) * each, text)


def largest_trained(s: Setting, m: Shape) -> int:
    """Numbers in the largest parameter that is trained."""
    if s.is_adapter:
        largest = max(s.rank * max(x.inp, x.out) for x in adapted(s, m))
        return max([largest, *_expert_sizes(s, m)])
    return max(x.each for x in m.matrices())


# The optimiser.


def hyper_of(s: Setting) -> Hyper:
    """The low-rank optimiser's settings."""
    hyper = replace(PUBLISHED[s.method], rank=s.rank)
    return hyper if s.state_dtype == "fp32" else replace(hyper, state=s.state_dtype)


def optimizer_parts(s: Setting, m: Shape) -> Part:
    """What the optimiser keeps from step to step."""
    if s.is_low_rank:
        return _low_rank(s, m)
    if s.optimizer == "sgd":
        return Part(0, "sgd keeps nothing")
    sizes = list(_trained_sizes(s, m))
    if s.state_dtype == "int8":
        total = sum(n * _adam8(each) for n, each, _ in sizes)
        return Part(total, "AdamW in 8 bits: 2 x 8.125 bits, fp32 under 4,096 numbers")
    total = sum(n * each * 2 * width for n, each, width in sizes)
    numbers = sum(n * each for n, each, _ in sizes)
    count = f"{numbers:,} x 2 moments, in the parameters' own dtype"
    return Part(total, count, 2 * rest_of(*((n, each * width) for n, each, width in sizes)))


def _trained_sizes(s: Setting, m: Shape) -> Iterator[tuple[int, int, int]]:
    """(how many, numbers in each, bytes of a number) of what is trained."""
    if not s.is_adapter:
        yield from ((x.count, x.each, trained_bytes(s)) for x in _every_tensor(m))
        return
    width = BYTES[s.adapter_dtype]
    for x in adapted(s, m):
        yield x.count, s.rank * x.inp, width
        yield x.count, s.rank * x.out, width
        if s.has_gains:
            yield x.count, x.out, 4
    for numbers in _expert_sizes(s, m):
        yield m.layers, numbers, width


def _every_tensor(m: Shape) -> Iterator[Matrix]:
    """Each parameter with its own size: biases and norms of a kind are joined in the inventory."""
    for x in m.matrices():
        if x.name == "qkv bias":
            yield replace(x, out=m.q_width)
            yield replace(x, out=m.kv_width, count=2 * x.count)
        elif x.name == "mlp bias":
            yield replace(x, out=m.intermediate, count=2 * x.count)
            yield replace(x, out=m.hidden)
        else:
            yield x


def _adam8(numbers: int) -> int:
    return 8 * numbers if numbers < costs.SMALL else 2 * costs.power_bytes(numbers)


def _low_rank(s: Setting, m: Shape) -> Part:
    hyper, plain = hyper_of(s), replace(hyper_of(s), rank=None)
    projected = {x.name for x in adapted(s, m)} | {"experts.gate_up_proj", "experts.down_proj"}
    projected |= {"router"}
    total = seen = 0
    for x in _every_tensor(m):
        inside = x.name in projected
        total += x.count * costs.cost((x.out, x.inp), hyper if inside else plain)
        seen += x.size if inside else 0
    text = f"moments and bases at rank {s.rank} of {seen:,} weights, two moments of the others"
    return Part(total, text)


# One step.


def step_parts(s: Setting, m: Shape) -> tuple[Part, Part]:
    """What a step makes on its way: a usual one, and one that replaces bases."""
    if s.is_low_rank:
        return _low_rank_step(s, m)
    largest, none = largest_trained(s, m), Part(0, "none")
    widest = max(width for _, _, width in _trained_sizes(s, m))
    if s.optimizer == "sgd" or s.step == "fused" or s.state_dtype == "int8":
        return Part(0, "a fused step makes nothing"), none
    if s.step == "loop":
        size = 2 * largest * widest
        return Part(size, f"two roots of the largest parameter: 2 x {largest:,} x {widest}"), none
    total = sum(n * each * width for n, each, width in _trained_sizes(s, m))
    return Part(total, f"foreach: roots of all moments at once, {total:,} bytes"), none


_SPAN, _WIDE_SPAN = 2**22, 2**24  # numbers at a time, with copies in fp32; and by launches


def _low_rank_step(s: Setting, m: Shape) -> tuple[Part, Part]:
    """Moments in spans, then one span of a change at a time, of whichever parameter needs most."""
    plain = _plain_move(s, m)
    moves = [plain, *(_projected_move(s, x) for x in m.linears)]
    usual = max(moves, key=lambda part: part.size)
    rank = hyper_of(s).rank or 0
    basis = max((rank + 10) * (x.inp + 2 * x.out) * 4 for x in m.linears)
    if basis <= usual.size:
        return usual, usual
    return usual, Part(basis, f"a basis of {rank} directions and its iteration")


def _launched(s: Setting) -> bool:
    """Whether weights are moved by a launch: int8 ones, and bf16 ones, which round at random."""
    return s.method == "qgalore" or s.base_dtype == "bf16"


def _plain_move(s: Setting, m: Shape) -> Part:
    """An embedding: its gradient, new moments, what is stored, and the direction in fp32. int8
    moments are moved by a launch that makes the direction alone."""
    state, narrow = hyper_of(s).state, trained_bytes(s) == 2
    each, span = {"int8": (4, _WIDE_SPAN), "bf16": (34, _SPAN), "fp32": (12, _SPAN)}[state]
    if state == "int8" and not _launched(s):
        span = _SPAN
    each += 4 if narrow and state != "int8" else 0
    count = min(span, max(x.each for x in m.matrices()))
    return Part(each * count, f"moments and direction of a span {each} x {count:,}")


def _projected_move(s: Setting, x: Matrix) -> Part:
    """What lies in its subspace, the basis for the product; a span of the change, with the
    gradient's part in fp32 where a method needs that."""
    hyper = hyper_of(s)
    each = 4 if hyper.residual == "none" and hyper.scale_by == "element" else 8
    each += 4 if hyper.residual != "none" else 0
    span = min(_WIDE_SPAN if _launched(s) else _SPAN, x.each)
    if each == 4 and not _launched(s):
        span = 0  # added to the weight as it is multiplied
    rank, inside = min(hyper.rank or 0, x.out, x.inp), _in_subspace(s, hyper)
    short, long = sorted((x.out, x.inp))
    size = rank * (inside * long + _of_basis(s, hyper) * short) + each * span
    text = f"{x.name}: {inside} x {rank} x {long:,} in its subspace, a span {each} x {span:,}"
    return Part(size, text)


def _in_subspace(s: Setting, hyper: Hyper) -> int:
    """Bytes a number: R, the direction and its copy for the product, which a launch makes alone;
    Fira's R where it is finite."""
    if hyper.residual != "none":
        return 14
    made_narrow = hyper.state == "int8" and hyper.scale_by == "element" and trained_bytes(s) == 2
    return 6 if made_narrow else 10


def _of_basis(s: Setting, hyper: Hyper) -> int:
    """Bytes a number of a basis as it is multiplied, beside how it is kept."""
    kept = {"bf16": 2, "fp32": 4, "int4": 0, "seed": 0}[hyper.basis_store]
    return 0 if kept == trained_bytes(s) else trained_bytes(s)

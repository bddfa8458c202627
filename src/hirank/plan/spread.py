"""A run on several GPUs: what each of them still holds, and what it needs to talk to the others.

    ddp      everything on each, and flat buckets as large as all gradients
    zero1    optimiser states in N parts, with an fp32 copy of 16-bit weights in them
    zero2    gradients too
    zero3    weights too; embedding and head are whole from forward to backward, and of the blocks
             one at a time, its successor on its way
    fsdp2    the same, states in the weights' own dtype

DDP and FSDP2 are held against the live bytes of a process, and by `benchmarks/plan_h200.py
--sharded` against GPUs; ZeRO is read off its documents. A plan of several GPUs gives a bound.
"""

from __future__ import annotations

from hirank.plan.block import Part
from hirank.plan.inventory import Shape
from hirank.plan.setting import Setting
from hirank.plan.states import adapter_parts, gradient_parts, trained_numbers
from hirank.plan.targets import trained_bytes, whole_bytes

__all__ = ["buffers", "master_copy", "note_of", "parts_of", "root_bytes", "together"]

_SPLIT: dict[str, tuple[str, ...]] = {
    "none": (),
    "ddp": (),
    "zero1": ("optimizer state",),
    "zero2": ("optimizer state", "gradients"),
    "zero3": ("optimizer state", "gradients", "weights", "quantised weights", "adapters"),
    "fsdp2": ("optimizer state", "gradients", "weights", "quantised weights", "adapters"),
}


def parts_of(setting: Setting, kind: str) -> int:
    """Over how many GPUs a class of bytes is split."""
    return setting.world if kind in _SPLIT[setting.sharding] else 1


def master_copy(s: Setting, m: Shape) -> Part:
    """DeepSpeed's fp32 copy of 16-bit weights that are trained."""
    if not s.sharding.startswith("zero") or s.is_adapter or trained_bytes(s) == 4:
        return Part(0, "no copy")
    return Part(4 * m.parameters, f"fp32 copy: {m.parameters:,} x 4 bytes")


def buffers(s: Setting, m: Shape) -> Part:
    """What is there to send and to receive."""
    if s.sharding == "none":
        return Part(0, "one GPU")
    if s.sharding == "ddp":
        return Part(gradient_parts(s, m).size, "buckets as large as all gradients")
    if s.sharding in ("zero1", "zero2"):
        bucket = 2 * min(trained_numbers(s, m), m.hidden**2) * trained_bytes(s)
        return Part(bucket, f"two buckets of h x h = {m.hidden:,} x {m.hidden:,} numbers")
    return Part(0, "weights come and go")


def together(s: Setting, m: Shape, *, blocks: int, gradients: int) -> Part:
    """Weights that are whole, and gradients before they are split, where all is split.

    `blocks`: how many are whole, or on their way in one piece. `gradients`: of how many blocks.
    """
    if s.shards == 1:
        return Part(0, "nothing is split")
    base = m.block_parameters * whole_bytes(s)
    adapters = sum(part.size for _, part in adapter_parts(s, m)) // m.layers
    learnt = adapters if s.is_adapter else base
    size = root_bytes(s, m) + blocks * (base + adapters) + gradients * learnt
    text = f"embeddings and {blocks} blocks of {m.block_parameters:,} whole"
    return Part(size, f"{text}, gradients of {gradients}" if gradients else text)


def root_bytes(s: Setting, m: Shape) -> int:
    """Embedding, head and last norm, which are one unit."""
    return (m.vocabulary * m.hidden * (1 if m.tied else 2) + m.hidden) * whole_bytes(s)


def note_of(s: Setting) -> str | None:
    """How far a plan for several GPUs can be trusted."""
    if s.sharding == "none":
        return None
    if s.sharding.startswith("zero"):
        how, bound = "its documents and was not measured", "15 %"
    else:
        how, bound = "what it does, and held against processes on a CPU (docs/plan.md)", "5 %"
    return (
        f"{s.sharding} on {s.world} GPUs is computed from {how}: allow {bound}, and about 1 GiB "
        "for NCCL, which no allocator counts"
    )

"""A run on several GPUs: what each of them still holds, and what it needs to talk to the others.

    ddp      everything on each, and flat buckets as large as all gradients
    zero1    optimiser states in N parts, with an fp32 copy of 16-bit weights in them
    zero2    gradients too
    zero3    weights too; one block and its successor are whole at a time
    fsdp2    the same, states in the weights' own dtype

No run on several GPUs has been held against these formulas yet; a plan with one says so.
"""

from __future__ import annotations

from hirank.plan.block import Part
from hirank.plan.inventory import Shape
from hirank.plan.setting import Setting
from hirank.plan.states import gradient_parts, trained_numbers
from hirank.plan.targets import compute_bytes, trained_bytes

__all__ = ["buffers", "master_copy", "note_of", "parts_of"]

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
    c = compute_bytes(s)
    root = (m.vocabulary * m.hidden) * (1 if m.tied else 2)
    whole = (2 * m.block_parameters + root) * c
    text = f"two whole blocks 2 x {m.block_parameters:,} and the embeddings {root:,}, x {c} bytes"
    if s.is_adapter:
        return Part(whole, text)
    return Part(whole + 2 * m.block_parameters * c, f"{text}; gradients of two blocks")


def note_of(s: Setting) -> str | None:
    """How far a plan for several GPUs can be trusted."""
    if s.sharding == "none":
        return None
    bound = "5 %" if s.sharding == "ddp" else "15 %"
    return (
        f"{s.sharding} on {s.world} GPUs is computed from its documents and was not measured: "
        f"allow {bound}, and about 1 GiB for NCCL, which no allocator counts"
    )

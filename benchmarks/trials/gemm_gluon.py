"""The same GEMM as in `gemm_triton`, warp-specialised by hand for Hopper, in Gluon.

One warp only fetches: for every step of every tile it waits for a free slot of the ring in shared
memory and starts the TMA loads into it, of the first pair of factors or of the second. One or two
groups of warps only multiply: they wait for a full slot, start its wgmma, and free the slot before
it. As the fetching warp never looks at results, it is already STAGES steps into the next tile while
the others finish one: the epilogue hides the filling of the pipeline.

With two groups each owns half of a tile's rows and both read the same b; they may drift apart, so
that one multiplies while the other is in its epilogue.

The registers of a multiplying thread hold half an accumulator of 128 x 256, or all of 128 x 128, in
fp32 (128 registers); three groups would have 128 registers a thread at launch, too few for ptxas.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["specialised_kernel"]


@gluon.jit
def _place(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr):
    tiles_m = gl.cdiv(M, BLOCK_M)
    width = GROUP * gl.cdiv(N, BLOCK_N)
    first = tile // width * GROUP
    height = gl.minimum(tiles_m - first, GROUP)
    i_m = first + tile % width % height
    return i_m * BLOCK_M, tile % width // height * BLOCK_N


@gluon.jit
def _fetch(
    a, b, at_m, at_n, k, s_a, s_b, slot, full,
    B_BY_COLUMN: gl.constexpr, PART_M: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    for part in gl.static_range(PARTS):
        row = at_m + part * PART_M
        tma.async_copy_global_to_shared(a, [row, k], full, s_a.index(slot * PARTS + part))
    if B_BY_COLUMN:
        tma.async_copy_global_to_shared(b, [at_n, k], full, s_b.index(slot))
    else:
        tma.async_copy_global_to_shared(b, [k, at_n], full, s_b.index(slot))


@gluon.jit
def _produce(
    a1, b1, a2, b2, s_a, s_b, full, free, M, N, K1, K2,
    B_BY_COLUMN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    first_steps = gl.cdiv(K1, BLOCK_K)
    steps = first_steps + gl.cdiv(K2, BLOCK_K)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    PART_M: gl.constexpr = BLOCK_M // PARTS
    slot = 0
    phase = 1  # of a barrier that nobody has used: all slots are free
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        at_m, at_n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        for step in range(steps):
            mbarrier.wait(free.index(slot), phase)
            mbarrier.expect(full.index(slot), (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            if step < first_steps:
                _fetch(a1, b1, at_m, at_n, step * BLOCK_K, s_a, s_b, slot, full.index(slot),
                       B_BY_COLUMN, PART_M, PARTS)  # fmt: skip
            else:
                k = (step - first_steps) * BLOCK_K
                _fetch(a2, b2, at_m, at_n, k, s_a, s_b, slot, full.index(slot),
                       B_BY_COLUMN, PART_M, PARTS)  # fmt: skip
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _finish(
    b_v, out, magnitude, norm, bias, at_m, at_n, N, s_out,
    HAS_GAIN: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    b_v = gl.convert_layout(b_v, LAYOUT)
    if HAS_GAIN:
        o_n = at_n + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        m_n = o_n < N
        b_norm = gl.load(norm + o_n, mask=m_n, other=1.0)
        b_m = gl.load(magnitude + o_n, mask=m_n, other=1.0)
        b_bias = gl.load(bias + o_n, mask=m_n, other=0.0).to(gl.float32)
        alive = b_norm > 0
        b_g = gl.where(alive, gl.div_rn(b_m, gl.where(alive, b_norm, 1.0)), 1.0)
        b_v = b_v * b_g[None, :] + b_bias[None, :]
    tma.store_wait(0)  # the store before this one has read its shared memory
    s_out.store(b_v.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [at_m, at_n], s_out)


@gluon.jit
def _consume(
    out, magnitude, norm, bias, s_a, s_b, s_out, full, free, M, N, K1, K2,
    PART: gl.constexpr, HAS_GAIN: gl.constexpr, B_BY_COLUMN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    TWO_STORES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    steps = gl.cdiv(K1, BLOCK_K) + gl.cdiv(K2, BLOCK_K)
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    PART_M: gl.constexpr = BLOCK_M // PARTS
    HALF: gl.constexpr = BLOCK_N // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        at_m, at_n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        at_m += PART * PART_M
        b_acc = gl.zeros([PART_M, BLOCK_N], gl.float32, WIDE)
        before = slot
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            b_b = s_b.index(slot)
            if B_BY_COLUMN:
                b_b = b_b.permute((1, 0))
            b_a = s_a.index(slot * PARTS + PART)
            running = warpgroup_mma(b_a, b_b, b_acc, use_acc=step > 0, is_async=True)
            b_acc = warpgroup_mma_wait(1, deps=(running,))
            mbarrier.arrive(free.index(before), count=1, pred=step > 0)
            before = slot
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        b_v = warpgroup_mma_wait(0, deps=(b_acc,))
        mbarrier.arrive(free.index(before), count=1)
        if TWO_STORES:
            b_left, b_right = b_v.reshape([PART_M, 2, HALF]).permute(0, 2, 1).split()
            _finish(b_left, out, magnitude, norm, bias, at_m, at_n, N, s_out.index(PART),
                    HAS_GAIN, HALF, NARROW)  # fmt: skip
            _finish(b_right, out, magnitude, norm, bias, at_m, at_n + HALF, N, s_out.index(PART),
                    HAS_GAIN, HALF, NARROW)  # fmt: skip
        else:
            _finish(b_v, out, magnitude, norm, bias, at_m, at_n, N, s_out.index(PART),
                    HAS_GAIN, BLOCK_N, WIDE)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def specialised_kernel(
    a1, b1, a2, b2, out, magnitude, norm, bias, M, N, K1, K2,
    HAS_GAIN: gl.constexpr, B_BY_COLUMN: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    TWO_STORES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    # num_warps at launch is WARPS, those of one multiplying group
    s_a = gl.allocate_shared_memory(a1.dtype, [STAGES * PARTS] + a1.block_type.shape, a1.layout)
    s_b = gl.allocate_shared_memory(b1.dtype, [STAGES] + b1.block_type.shape, b1.layout)
    s_out = gl.allocate_shared_memory(out.dtype, [PARTS] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=PARTS)
    fence_async_shared()
    # spelled out: a number in a tuple that is put together from others is no constexpr
    if PARTS == 2:
        gl.warp_specialize([
            (_consume, (out, magnitude, norm, bias, s_a, s_b, s_out, full, free, M, N, K1, K2,
                        0, HAS_GAIN, B_BY_COLUMN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PROGRAMS,
                        STAGES, PARTS, TWO_STORES, WARPS)),
            (_consume, (out, magnitude, norm, bias, s_a, s_b, s_out, full, free, M, N, K1, K2,
                        1, HAS_GAIN, B_BY_COLUMN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PROGRAMS,
                        STAGES, PARTS, TWO_STORES, WARPS)),
            (_produce, (a1, b1, a2, b2, s_a, s_b, full, free, M, N, K1, K2, B_BY_COLUMN,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PROGRAMS, STAGES, PARTS)),
        ], [WARPS, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (out, magnitude, norm, bias, s_a, s_b, s_out, full, free, M, N, K1, K2,
                        0, HAS_GAIN, B_BY_COLUMN, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PROGRAMS,
                        STAGES, PARTS, TWO_STORES, WARPS)),
            (_produce, (a1, b1, a2, b2, s_a, s_b, full, free, M, N, K1, K2, B_BY_COLUMN,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PROGRAMS, STAGES, PARTS)),
        ], [1], [24])  # fmt: skip

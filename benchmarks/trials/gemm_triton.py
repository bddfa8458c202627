"""One GEMM over two pairs of factors, gain and bias in its epilogue: persistent Triton kernels.

    out = g (a1 b1 + a2 b2) + bias        g = magnitude / norm, 1 where norm = 0

Both products are one loop of cdiv(K1, BLOCK_K) + cdiv(K2, BLOCK_K) steps into one accumulator;
which pair a step reads is chosen by a select on the pointer or on the descriptor, so that the loop
stays one that the compiler pipelines. (Loads inside a branch are not pipelined, two loops in a row
drain the pipeline between them.)

Shapes     a1 [M, K1]; a2 [M, K2]; out [M, N]; magnitude, norm, bias [N].
           b1 [N, K1], b2 [N, K2] with B_BY_COLUMN (how a linear layer keeps its weight, forward);
           b1 [K1, N], b2 [K2, N] without (backward).
Precision  operands bf16 or fp16, sums and epilogue in fp32, one rounding at the store.
"""

from hirank.kernels._triton import jit, tl

__all__ = ["descriptor_kernel", "pointer_kernel"]


@jit
def _place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    # GROUP rows of tiles go down the columns together, so that what they share stays in L2
    tiles_m = tl.cdiv(M, BLOCK_M)
    width = GROUP * tl.cdiv(N, BLOCK_N)
    first = tile // width * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    i_m = first + tile % width % height
    return i_m * BLOCK_M, tile % width // height * BLOCK_N


@jit
def _stretched(b_acc, magnitude, norm, bias, o_n, N):
    m_n = o_n < N
    b_norm = tl.load(norm + o_n, mask=m_n, other=1.0)
    b_m = tl.load(magnitude + o_n, mask=m_n, other=1.0)
    alive = b_norm > 0
    b_g = tl.where(alive, tl.div_rn(b_m, tl.where(alive, b_norm, 1.0)), 1.0)
    b_bias = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_acc * b_g[None, :] + b_bias[None, :]


@jit
def pointer_kernel(
    a1, b1, a2, b2, out, magnitude, norm, bias, M, N, K1, K2,
    HAS_GAIN: tl.constexpr, B_BY_COLUMN: tl.constexpr, FLATTEN: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    first_steps = tl.cdiv(K1, BLOCK_K)
    steps = first_steps + tl.cdiv(K2, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        at_m, at_n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        o_m = at_m + tl.arange(0, BLOCK_M)
        o_n = at_n + tl.arange(0, BLOCK_N)
        # what is past the end is read from the start again, and not stored
        r_m = (o_m % M).to(tl.int64)
        r_n = (o_n % N).to(tl.int64)
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for step in range(steps):
            second = step >= first_steps
            p_a = tl.where(second, a2, a1)
            p_b = tl.where(second, b2, b1)
            depth = tl.where(second, K2, K1)
            k = tl.where(second, step - first_steps, step) * BLOCK_K + o_k
            m_k = k < depth
            b_a = tl.load(p_a + r_m[:, None] * depth + k[None, :], mask=m_k[None, :], other=0.0)
            if B_BY_COLUMN:
                b_b = tl.load(p_b + r_n[:, None] * depth + k[None, :], mask=m_k[None, :], other=0.0)
                b_b = b_b.T
            else:
                p_rows = p_b + k.to(tl.int64)[:, None] * N + o_n[None, :]
                b_b = tl.load(p_rows, mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)
            b_acc = tl.dot(b_a.to(DOT), b_b.to(DOT), b_acc)
        if HAS_GAIN:
            b_acc = _stretched(b_acc, magnitude, norm, bias, o_n, N)
        p_out = out + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(
            p_out, b_acc.to(out.dtype.element_ty), mask=(o_m[:, None] < M) & (o_n[None, :] < N)
        )


@jit
def descriptor_kernel(
    a1, b1, a2, b2, out, magnitude, norm, bias, M, N, K1, K2,
    HAS_GAIN: tl.constexpr, B_BY_COLUMN: tl.constexpr, FLATTEN: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    TWO_STORES: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_LOOPS: tl.constexpr,
):  # fmt: skip
    # a1, b1, a2, b2, out are tensor descriptors; out's block is half as wide with TWO_STORES
    first_steps = tl.cdiv(K1, BLOCK_K)
    second_steps = tl.cdiv(K2, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
        at_m, at_n = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if TWO_LOOPS:
            for step in range(first_steps):
                b_acc = _step(b_acc, a1, b1, at_m, at_n, step * BLOCK_K, B_BY_COLUMN, DOT)
            for step in range(second_steps):
                b_acc = _step(b_acc, a2, b2, at_m, at_n, step * BLOCK_K, B_BY_COLUMN, DOT)
        else:
            for step in range(first_steps + second_steps):
                k = tl.where(step < first_steps, step, step - first_steps) * BLOCK_K
                if step < first_steps:
                    a = a1
                    b = b1
                else:
                    a = a2
                    b = b2
                b_acc = _step(b_acc, a, b, at_m, at_n, k, B_BY_COLUMN, DOT)
        if TWO_STORES:
            HALF: tl.constexpr = BLOCK_N // 2
            b_halves = tl.permute(tl.reshape(b_acc, (BLOCK_M, 2, HALF)), (0, 2, 1))
            b_left, b_right = tl.split(b_halves)
            _finish(b_left, out, magnitude, norm, bias, at_m, at_n, N, HAS_GAIN, HALF)
            _finish(b_right, out, magnitude, norm, bias, at_m, at_n + HALF, N, HAS_GAIN, HALF)
        else:
            _finish(b_acc, out, magnitude, norm, bias, at_m, at_n, N, HAS_GAIN, BLOCK_N)


@jit
def _step(b_acc, a, b, at_m, at_n, k, B_BY_COLUMN: tl.constexpr, DOT: tl.constexpr):
    b_a = a.load([at_m, k])
    if B_BY_COLUMN:
        b_b = b.load([at_n, k]).T
    else:
        b_b = b.load([k, at_n])
    return tl.dot(b_a.to(DOT), b_b.to(DOT), b_acc)


@jit
def _finish(
    b_acc, out, magnitude, norm, bias, at_m, at_n, N, HAS_GAIN: tl.constexpr, WIDTH: tl.constexpr
):
    if HAS_GAIN:
        b_acc = _stretched(b_acc, magnitude, norm, bias, at_n + tl.arange(0, WIDTH), N)
    out.store([at_m, at_n], b_acc.to(out.dtype))

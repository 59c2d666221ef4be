"""``expert_mlp`` for many pairs of a token and an expert in MXFP4: ``triton_grouped``'s products for tiles of few rows.

A warp has 16 outputs, all inputs and all pairs of a tile, so warps share nothing."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.expert_mlp.hopper.triton_words import REST, across, multiply, sums_layout
from headway.kernels.expert_mlp.triton_parts import activated


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tile_at(counts_ptr, tile, E: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Expert of the ``tile``-th tile, E or more behind the last; its first sorted pair, and how many it has."""
    V: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, LANES, layout=V)
    counts = gl.load(counts_ptr + lane, mask=lane < E, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    expert = gl.sum((gl.associative_scan(tiles, 0, add) <= tile).to(gl.int32), axis=0)
    skipped = (tile - gl.sum(gl.where(lane < expert, tiles, 0), axis=0)) * ROWS
    first = gl.sum(gl.where(lane < expert, counts, 0), axis=0) + skipped
    count = gl.sum(gl.where(lane == expert, counts, 0), axis=0) - skipped
    return expert, first, count


@gluon.jit
def grouped_words_kernel(
    x_ptr,  # FIRST: tokens [T, K]; else sorted rows [pairs, K]
    order_ptr,
    counts_ptr,
    weight_ptr,  # [E, N, K / 2]
    scales_ptr,  # [E, N, K / 32]
    bias_ptr,  # [E, N] or null
    out_ptr,  # FIRST: sorted rows [pairs, OUT]; else rows by pair
    x_stride,
    limit,
    alpha,
    E: gl.constexpr,
    LANES: gl.constexpr,
    OUT: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    UNROLL: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    FIRST: gl.constexpr,
    EARLY: gl.constexpr,
):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, count = tile_at(counts_ptr, gl.program_id(1), E, LANES, ROWS, WARPS)
    if expert >= E:
        return
    S: gl.constexpr = sums_layout(1, WARPS)
    L: gl.constexpr = gl.DotOperandLayout(1, S, 8)
    PAIRED: gl.constexpr = FIRST and GATED
    N: gl.constexpr = 2 * OUT if PAIRED else OUT
    # Columns beyond the tile's pairs are its first one again: nobody looks at what comes of them.
    lane = across(ROWS, 2, L)
    source = begin + gl.where(lane < count, lane, 0)
    if FIRST:
        source = gl.load(order_ptr + source) // TOP_K
    first = gl.program_id(0) * BLOCK_N
    row = expert.to(gl.int64) * N + first
    acc = gl.zeros([1, BLOCK_N, ROWS], gl.float32, layout=S)
    acc, acc2 = multiply(
        acc, acc, (weight_ptr, scales_ptr, row, row + OUT), x_ptr + source.to(gl.int64) * x_stride, lane < ROWS, K, BLOCK_N, 1,
        WARPS, UNROLL, L, PAIRED, False,
    )  # fmt: skip
    n = first + across(BLOCK_N, 1, S)
    y = acc * REST
    up = acc2 * REST
    if bias_ptr is not None:
        bias_at = bias_ptr + expert.to(gl.int64) * N + n
        y += gl.load(bias_at).to(gl.float32)
        if PAIRED:
            up += gl.load(bias_at + OUT).to(gl.float32)
    lane = across(ROWS, 2, S)
    target = begin + lane
    if FIRST:
        y = activated(y, up, limit, alpha, ACT, GATED)
    else:
        target = gl.load(order_ptr + target, mask=lane < count, other=0)
    at = out_ptr + target.to(gl.int64) * OUT + n
    gl.store(at, y.to(out_ptr.dtype.element_ty), mask=lane < count)

"""``expert_mlp`` for many pairs of an expert: the products of ``expert_mlp.triton_grouped`` for weights of 16 bits.

The warps and tiles are those of ``wide_linear.hopper.triton``: a persistent program per SM takes tiles of 128 pairs of one
expert, a producer copies ahead, two warpgroups multiply 64 pairs each, and two more warps write a tile out while the next one
is multiplied. Which expert a row of tiles belongs to, and where its pairs begin, stands in a plan that ``place_pairs_kernel``
writes: on the host nobody knows.

A tile's weights, and of the second product its sorted rows as well, come by the tensor memory accelerator (TMA). Tokens of the
first product lie anywhere, so two warps copy them row by row (cp.async) to where the accelerator would have put them. These
copies count as ordinary writes, which a fence parts from the products that read them.

A tile that is not full copies its last row again where rows are missing, or rows of the next expert: no product of another row
depends on them, and they are not stored. A warpgroup whose 64 rows are all missing lets the other one have the tensor cores.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.expert_mlp.triton_parts import activated
from headway.kernels.wide_linear.hopper.triton import BLOCK_K, BLOCK_M, FINISHERS, ROWS, SHARE, halves, tile_place

COPIERS = gl.constexpr(2)
"""Warps that copy tokens."""


@gluon.jit
def tile_of(plan_ptr, m):
    """Of the ``m``-th row of tiles: its expert, its first sorted pair, how many pairs it has."""
    at = plan_ptr + 4 * (m + 1)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def sources_of(order_ptr, first, rows, lane):
    """Pairs of a tile's rows, the last one's again where it is not full. Of no pairs at all it is pair 0."""
    lane = gl.minimum(lane, rows - 1)
    return gl.load(order_ptr + first + lane, mask=lane >= 0, other=0)


@gluon.jit
def gather_tiles(
    x_ptr, order_ptr, plan_ptr, x_stride, weight_desc, x_smem, w_smem, bars, tiles_n, group, TOP_K: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warps of the first product. What stands in the plan and the order is loaded a tile ahead."""
    ready = bars[0]
    free = bars[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [COPIERS, 1], [1, 0])
    PARTS: gl.constexpr = w_smem.shape[1]
    EACH: gl.constexpr = w_smem.shape[2]
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    tiles = tiles_m * tiles_n
    lane = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    col = gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY)), 0)
    m, n = tile_place(gl.minimum(gl.program_id(0), tiles - 1), tiles_m, tiles_n, group)
    expert, first, rows = tile_of(plan_ptr, m)
    pair = sources_of(order_ptr, first, rows, lane)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = n * EACH
        part = expert * PARTS
        x_at = x_ptr + gl.expand_dims((pair // TOP_K).to(gl.int64) * x_stride, 1) + col
        m, n = tile_place(gl.minimum(tile + gl.num_programs(0), tiles - 1), tiles_m, tiles_n, group)
        expert, first, rows = tile_of(plan_ptr, m)
        pair = sources_of(order_ptr, first, rows, lane)
        for chunk in range(K // BLOCK_K):
            stage = count % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_K * PARTS * EACH)
            tma.async_copy_global_to_shared(weight_desc, [part, row, chunk * BLOCK_K], bar, w_smem.index(stage))
            async_copy.async_copy_global_to_shared(x_smem.index(stage), x_at)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            x_at += BLOCK_K
            count += 1


@gluon.jit
def copy_sorted(
    x_desc, plan_ptr, weight_desc, x_smem, w_smem, bars, tiles_n, group, K: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp of the second product. Inputs beyond K are zeros."""
    ready = bars[0]
    free = bars[1]
    PARTS: gl.constexpr = w_smem.shape[1]
    EACH: gl.constexpr = w_smem.shape[2]
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    tiles = tiles_m * tiles_n
    m, n = tile_place(gl.minimum(gl.program_id(0), tiles - 1), tiles_m, tiles_n, group)
    expert, first, _rows = tile_of(plan_ptr, m)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = n * EACH
        part = expert * PARTS
        begin = first
        m, n = tile_place(gl.minimum(tile + gl.num_programs(0), tiles - 1), tiles_m, tiles_n, group)
        expert, first, _rows = tile_of(plan_ptr, m)
        for chunk in range((K + BLOCK_K - 1) // BLOCK_K):
            stage = count % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_K * (BLOCK_M + PARTS * EACH))
            tma.async_copy_global_to_shared(x_desc, [begin, chunk * BLOCK_K], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(weight_desc, [part, row, chunk * BLOCK_K], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def multiply_half(
    x_smem,
    w_smem,
    ready,
    free,
    count,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
    FIRST: gl.constexpr,
):
    """f32 [ROWS, WIDE]: half of a tile, whose first chunk is the ``count``-th."""
    WIDE: gl.constexpr = w_smem.shape[1] * w_smem.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
    for chunk in range(CHUNKS):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), count // STAGES & 1)
        if FIRST:
            fence_async_shared()
        a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
        b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=chunk > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
        count += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def skip_half(ready, free, count, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Let go of the chunks of a tile."""
    for _ in range(CHUNKS):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), count // STAGES & 1)
        mbarrier.arrive(free.index(stage))
        count += 1


@gluon.jit
def prepared(acc, expert, n, bias_ptr, limit, alpha, KIND: gl.constexpr):
    """What is written out of a product: with its bias, and of the first product activated."""
    OUT: gl.constexpr = KIND[0]
    FIRST: gl.constexpr = KIND[3]
    PARTS: gl.constexpr = 2 if FIRST and KIND[2] else 1
    if KIND[4]:
        WIDE: gl.constexpr = acc.shape[1]
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
        lane = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
        column = n * (WIDE // PARTS) + lane % (WIDE // PARTS)
        at = bias_ptr + expert.to(gl.int64) * (PARTS * OUT) + (lane // (WIDE // PARTS) * OUT + column)
        acc += gl.expand_dims(gl.load(at, mask=column < OUT, other=0.0).to(gl.float32), 0)
    y = acc
    up = acc
    if PARTS == 2:
        y, up = halves(acc, acc.shape[1] // 2)
    if FIRST:
        y = activated(y, up, limit, alpha, KIND[1], KIND[2])
    return y


@gluon.jit
def multiply_tiles(
    x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, limit, alpha, tiles_n, group, KIND: gl.constexpr,
    K: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: rows HALF * ROWS to HALF * ROWS + ROWS of each tile."""
    ready, free, done, taken = bars
    CHUNKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    tiles = tiles_m * tiles_n
    m, n = tile_place(gl.minimum(gl.program_id(0), tiles - 1), tiles_m, tiles_n, group)
    next_expert, _first, next_rows = tile_of(plan_ptr, m)
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert = next_expert
        rows = next_rows
        now = n
        m, n = tile_place(gl.minimum(tile + gl.num_programs(0), tiles - 1), tiles_m, tiles_n, group)
        next_expert, _first, next_rows = tile_of(plan_ptr, m)
        if HALF == 0:
            acc = multiply_half(x_smem, w_smem, ready, free, count, CHUNKS, STAGES, HALF, KIND[3])
            y = prepared(acc, expert, now, bias_ptr, limit, alpha, KIND).to(sums.dtype)
            mbarrier.wait(taken.index(HALF), (turn & 1) ^ 1)
            sums.index(HALF).store(y)
        elif rows > HALF * ROWS:
            acc = multiply_half(x_smem, w_smem, ready, free, count, CHUNKS, STAGES, HALF, KIND[3])
            y = prepared(acc, expert, now, bias_ptr, limit, alpha, KIND).to(sums.dtype)
            mbarrier.wait(taken.index(HALF), (turn & 1) ^ 1)
            sums.index(HALF).store(y)
        else:
            skip_half(ready, free, count, CHUNKS, STAGES)
            mbarrier.wait(taken.index(HALF), (turn & 1) ^ 1)
        gl.thread_barrier()
        mbarrier.arrive(done.index(HALF))
        count += CHUNKS
        turn += 1


@gluon.jit
def finish_tiles(sums, bars, out_ptr, order_ptr, plan_ptr, tiles_n, group, KIND: gl.constexpr, EARLY: gl.constexpr):
    """The warps that write tiles out: to the rows they were sorted to, or to those of their pairs."""
    done = bars[2]
    taken = bars[3]
    OUT: gl.constexpr = KIND[0]
    FIRST: gl.constexpr = KIND[3]
    WIDE: gl.constexpr = sums.shape[2]
    LANES: gl.constexpr = WIDE // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [FINISHERS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * FINISHERS
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, group)
        _expert, first, rows = tile_of(plan_ptr, m)
        col = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
        for half in range(2):
            row = half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
            targets = ()
            for part in gl.static_range(ROWS // PASS):
                target = first + row + part * PASS
                if not FIRST:
                    target = gl.load(order_ptr + target, mask=row + part * PASS < rows, other=0)
                targets += (target,)
            mbarrier.wait(done.index(half), turn & 1)
            for part in gl.static_range(ROWS // PASS):
                y = sums.index(half).slice(part * PASS, PASS).load(COPY)
                at = out_ptr + gl.expand_dims(targets[part].to(gl.int64) * OUT, 1) + gl.expand_dims(col, 0)
                keep = gl.expand_dims(row + part * PASS < rows, 1) & gl.expand_dims(col < OUT, 0)
                gl.store(at, y, mask=keep)
            gl.thread_barrier()
            mbarrier.arrive(taken.index(half))
        turn += 1


@gluon.jit
def make_buffers(weight_desc, WIDE: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """As in ``wide_linear.hopper.triton``; ``WIDE`` sums of a row are written out, ``ARRIVALS`` fill a buffer."""
    dtype: gl.constexpr = weight_desc.dtype
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], FLAT)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    sums = gl.allocate_shared_memory(dtype, [2, ROWS, WIDE], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(done.index(half), count=1)
        mbarrier.init(taken.index(half), count=1)
    fence_async_shared()
    return x_smem, w_smem, sums, (ready, free, done, taken)


@gluon.jit(do_not_specialize=["tiles_n", "group"])
def many_in_kernel(
    x_ptr,  # tokens [T, K]
    order_ptr,  # sorted pairs
    plan_ptr,  # int32 [1 + rows of tiles, 4]: how many rows; of each its expert, first sorted pair, pairs
    weight_desc,  # [E * PARTS, OUT, K]: gates and ups are two parts
    bias_ptr,  # [E, N]
    out_ptr,  # sorted rows [pairs, OUT]
    x_stride,
    limit,
    alpha,
    tiles_n,
    group,  # rows of tiles that go through their weights together
    OUT: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    KIND: gl.constexpr = (OUT, ACT, GATED, True, BIASED)
    WIDE: gl.constexpr = weight_desc.block_shape[1]
    x_smem, w_smem, sums, bars = make_buffers(weight_desc, WIDE, STAGES, 1 + 32 * COPIERS)
    gl.warp_specialize(
        [
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, limit, alpha, tiles_n, group, KIND, K,
                              STAGES, EARLY, 0)),
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, limit, alpha, tiles_n, group, KIND, K,
                              STAGES, EARLY, 1)),
            (finish_tiles, (sums, bars, out_ptr, order_ptr, plan_ptr, tiles_n, group, KIND, EARLY)),
            (gather_tiles, (x_ptr, order_ptr, plan_ptr, x_stride, weight_desc, x_smem, w_smem, bars, tiles_n, group, TOP_K,
                            K, STAGES, EARLY)),
        ],
        [4, FINISHERS, COPIERS],
        [200, 104, 104],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tiles_n", "group"])
def many_out_kernel(
    x_desc,  # sorted rows [pairs, K]
    order_ptr,
    plan_ptr,
    weight_desc,  # [E, OUT, K]
    bias_ptr,  # [E, OUT]
    out_ptr,  # rows by pair [pairs, OUT]
    tiles_n,
    group,  # rows of tiles that go through their weights together
    OUT: gl.constexpr,
    K: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """As ``many_in_kernel``."""
    if EARLY:
        gdc_launch_dependents()
    KIND: gl.constexpr = (OUT, "", False, False, BIASED)
    x_smem, w_smem, sums, bars = make_buffers(weight_desc, weight_desc.block_shape[1], STAGES, 1)
    gl.warp_specialize(
        [
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, 0.0, 0.0, tiles_n, group, KIND, K, STAGES,
                              EARLY, 0)),
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, 0.0, 0.0, tiles_n, group, KIND, K, STAGES,
                              EARLY, 1)),
            (finish_tiles, (sums, bars, out_ptr, order_ptr, plan_ptr, tiles_n, group, KIND, EARLY)),
            (copy_sorted, (x_desc, plan_ptr, weight_desc, x_smem, w_smem, bars, tiles_n, group, K, STAGES, EARLY)),
        ],
        [4, FINISHERS, 1],
        [176, 152, 152],
    )  # fmt: skip

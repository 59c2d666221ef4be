"""``expert_mlp`` for many pairs of an expert: the products out of ``expert_mlp.triton_grouped`` for weights of 16 bits.

The warps and tiles are those of ``wide_linear.hopper.triton``: a persistent program per SM takes tiles of 128 pairs of one
expert, a producer copies ahead, two warpgroups multiply 64 pairs each, and two more warps write a tile out while the next one
is multiplied. Inputs are few, so without that the beginning and the end of a tile would be much of its time. Which expert a row
of tiles belongs to, and where its pairs begin, stands in a plan that the products in have written: on the host nobody knows.

A tile that is not full has rows of the next expert behind its own: no product of another row depends on them, and they are not
stored. A warpgroup whose 64 rows are all missing lets the other one have the tensor cores.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.wide_linear.hopper.triton import BLOCK_K, BLOCK_M, FINISHERS, ROWS, SHARE, tile_place


@gluon.jit
def tile_of(plan_ptr, m):
    """Of the ``m``-th row of tiles: its expert, its first sorted pair, how many pairs the expert has from there on."""
    at = plan_ptr + 4 * (m + 1)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def copy_sorted(
    x_desc, plan_ptr, weight_desc, x_smem, w_smem, bars, tiles_n, OUT: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp. What stands in the plan is loaded a tile ahead. Inputs beyond K are zeros; weights of outputs beyond
    OUT are the next expert's, and what they give is not stored."""
    ready = bars[0]
    free = bars[1]
    WIDE: gl.constexpr = w_smem.shape[1]
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    tiles = tiles_m * tiles_n
    m, n = tile_place(gl.minimum(gl.program_id(0), tiles - 1), tiles_m, tiles_n, GROUP)
    expert, first, _rows = tile_of(plan_ptr, m)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = expert * OUT + n * WIDE
        begin = first
        m, n = tile_place(gl.minimum(tile + gl.num_programs(0), tiles - 1), tiles_m, tiles_n, GROUP)
        expert, first, _rows = tile_of(plan_ptr, m)
        for chunk in range((K + BLOCK_K - 1) // BLOCK_K):
            stage = count % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_K * (BLOCK_M + WIDE))
            tma.async_copy_global_to_shared(x_desc, [begin, chunk * BLOCK_K], bar, x_smem.index(stage))
            tma.async_copy_global_to_shared(weight_desc, [row, chunk * BLOCK_K], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def multiply_half(
    x_smem, w_smem, ready, free, count, CHUNKS: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr
):  # fmt: skip
    """f32 [ROWS, WIDE]: half of a tile, whose first chunk is the ``count``-th."""
    WIDE: gl.constexpr = w_smem.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
    for chunk in range(CHUNKS):
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), count // STAGES & 1)
        a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
        b = w_smem.index(stage).permute((1, 0))
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
def with_bias(acc, bias_ptr, expert, n, OUT: gl.constexpr):
    """Sums of the ``n``-th tile of an expert's outputs with their bias."""
    WIDE: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    column = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
    bias = gl.load(bias_ptr + expert.to(gl.int64) * OUT + column, mask=column < OUT, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def multiply_tiles(
    x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, tiles_n, OUT: gl.constexpr, K: gl.constexpr,
    BIASED: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: rows HALF * ROWS to HALF * ROWS + ROWS of each tile."""
    ready, free, done, taken = bars
    CHUNKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    tiles = tiles_m * tiles_n
    m, n = tile_place(gl.minimum(gl.program_id(0), tiles - 1), tiles_m, tiles_n, GROUP)
    next_expert, _first, next_rows = tile_of(plan_ptr, m)
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert = next_expert
        rows = next_rows
        now = n
        m, n = tile_place(gl.minimum(tile + gl.num_programs(0), tiles - 1), tiles_m, tiles_n, GROUP)
        next_expert, _first, next_rows = tile_of(plan_ptr, m)
        if rows > HALF * ROWS:
            acc = multiply_half(x_smem, w_smem, ready, free, count, CHUNKS, STAGES, HALF)
            if BIASED:
                acc = with_bias(acc, bias_ptr, expert, now, OUT)
            y = acc.to(sums.dtype)
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
def finish_tiles(
    sums, bars, out_ptr, order_ptr, plan_ptr, tiles_n, OUT: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """The warps that write tiles out, to the rows of their pairs."""
    done = bars[2]
    taken = bars[3]
    WIDE: gl.constexpr = sums.shape[2]
    LANES: gl.constexpr = WIDE // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [FINISHERS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * FINISHERS
    if EARLY:
        gdc_wait()
    tiles_m = gl.load(plan_ptr)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        _expert, first, rows = tile_of(plan_ptr, m)
        col = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
        for half in range(2):
            row = half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
            targets = ()
            for part in gl.static_range(ROWS // PASS):
                lane = row + part * PASS
                targets += (gl.load(order_ptr + first + lane, mask=lane < rows, other=0),)
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
def make_buffers(weight_desc, STAGES: gl.constexpr):
    """As in ``wide_linear.hopper.triton``."""
    dtype: gl.constexpr = weight_desc.dtype
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], FLAT)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, FLAT)  # noqa: RUF005
    sums = gl.allocate_shared_memory(dtype, [2, ROWS, weight_desc.block_shape[0]], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(done.index(half), count=1)
        mbarrier.init(taken.index(half), count=1)
    fence_async_shared()
    return x_smem, w_smem, sums, (ready, free, done, taken)


@gluon.jit(do_not_specialize=["tiles_n"])
def many_out_kernel(
    x_desc,  # sorted rows [pairs, K]
    order_ptr,  # sorted pairs
    plan_ptr,  # int32 [1 + rows of tiles, 4]: how many rows; of each its expert, first sorted pair, pairs from there on
    weight_desc,  # [E * OUT, K]
    bias_ptr,  # [E, OUT]
    out_ptr,  # rows by pair [pairs, OUT]
    tiles_n,
    OUT: gl.constexpr,
    K: gl.constexpr,
    BIASED: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,  # rows of tiles that go through their weights together
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, sums, bars = make_buffers(weight_desc, STAGES)
    gl.warp_specialize(
        [
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, tiles_n, OUT, K, BIASED, STAGES, GROUP,
                              EARLY, 0)),
            (multiply_tiles, (x_smem, w_smem, sums, bars, plan_ptr, bias_ptr, tiles_n, OUT, K, BIASED, STAGES, GROUP,
                              EARLY, 1)),
            (finish_tiles, (sums, bars, out_ptr, order_ptr, plan_ptr, tiles_n, OUT, GROUP, EARLY)),
            (copy_sorted, (x_desc, plan_ptr, weight_desc, x_smem, w_smem, bars, tiles_n, OUT, K, STAGES, GROUP, EARLY)),
        ],
        [4, FINISHERS, 1],
        [176, 152, 152],
    )  # fmt: skip

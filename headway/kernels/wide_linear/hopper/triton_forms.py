"""Gluon kernels of ``wide_gelu`` in other forms: GELU by the warps that multiply, and warpgroups that take turns.

Both take the sum before it is rounded. ``bench/ops/wide_gelu.py`` decides which form the op keeps; the others go then.
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

from headway.kernels.wide_linear.hopper.triton import (
    BLOCK_K,
    BLOCK_M,
    FEWER_REGISTERS,
    FINISHERS,
    REGISTERS,
    ROWS,
    SHARE,
    column,
    column_bias,
    copy_tiles,
    gelu,
    out_part,
    run_tiles,
    tile_place,
)


@gluon.jit
def reciprocal(x):
    """1 / x, off by a last place of float32 at most; 0 of an infinity."""
    code: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def two_step_gelu(x):
    """x / (1 + 2^(x q(x^2))): two functions of the slow unit."""
    s = x * x
    q = s * -1.3032075e-05 + 0.0014235622
    q = q * s - 0.10939683
    q = q * s - 2.2976465
    return x * reciprocal(1.0 + gl.exp2(x * q))


@gluon.jit
def prepare_old(y, n, arguments, KIND: gl.constexpr):
    """As it was: the bias is asked for when the products have ended."""
    bias = column_bias(n, arguments, KIND)
    return two_step_gelu(y + gl.expand_dims(bias.to(gl.float32), 0))


@gluon.jit
def prepare_early(y, bias, arguments, KIND: gl.constexpr):
    """By one function of the slow unit, the bias asked for ahead."""
    return gelu(y + gl.expand_dims(bias.to(gl.float32), 0), KIND[1])


@gluon.jit
def finish_stored(m, n, first_half, last_half, phase, sums, bars, arguments, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Store what was prepared."""
    _, _, done, taken = bars
    out_ptr, _, num_tokens = arguments
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * WARPS
    WIDE: gl.constexpr = sums.shape[2]
    col = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    for half in range(first_half, last_half):
        row = m * BLOCK_M + half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
        mbarrier.wait(done.index(half), phase)
        for part in gl.static_range(ROWS // PASS):
            at, keep, _before = out_part(out_ptr, row + part * PASS, col, num_tokens, KIND[0], True)
            gl.store(at, sums.index(half).slice(part * PASS, PASS).load(COPY), mask=keep)
        gl.thread_barrier()
        mbarrier.arrive(taken.index(half))


@gluon.jit(do_not_specialize=["num_tokens", "tiles_m", "tiles_n"])
def early_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    bias_ptr,
    num_tokens,
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    OLD: gl.constexpr,
    EARLY: gl.constexpr,
):
    """GELU by the warps that multiply."""
    arguments = (out_ptr, bias_ptr, num_tokens)
    KIND: gl.constexpr = (N, 3, 1.0, weight_desc.block_shape[1], 2)
    run_tiles(
        x_desc, weight_desc, tiles_m, tiles_n, column if OLD else column_bias, prepare_old if OLD else prepare_early,
        finish_stored, arguments, KIND, K, STAGES, GROUP, EARLY, FINISHERS, REGISTERS if OLD else FEWER_REGISTERS,
    )  # fmt: skip


@gluon.jit
def turn_tiles(
    out_desc, bias_ptr, x_smem, w_smem, y_smem, bars, turns, tiles_m, tiles_n, N: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies every other tile of a program, and finishes it while the other multiplies."""
    ready, free, _, _ = bars
    WIDE: gl.constexpr = w_smem.shape[2]
    CHUNKS: gl.constexpr = K // BLOCK_K
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    if EARLY:
        gdc_wait()
    count = WHO * CHUNKS
    turn = 0
    for tile in range(gl.program_id(0) + WHO * gl.num_programs(0), tiles_m * tiles_n, 2 * gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([BLOCK_M, WIDE], gl.float32, layout=ACC)
        mbarrier.wait(turns.index(WHO), (turn & 1) ^ (1 - WHO))
        for chunk in range(CHUNKS):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(x_smem.index(stage), b, acc, use_acc=chunk > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        mbarrier.arrive(turns.index(1 - WHO))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        at = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
        bias = gl.load(
            bias_ptr + at, mask=at < N, other=0.0
        )  # here, or the assembler lets go of the buffer behind GELU
        y = gelu(acc + gl.expand_dims(bias.to(gl.float32), 0), 3).to(y_smem.dtype)
        tma.store_wait(0)
        gl.thread_barrier()
        y_smem.store(y)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [m * BLOCK_M, n * WIDE], y_smem)
        count += CHUNKS
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n"])
def turns_kernel(
    x_desc,
    weight_desc,
    out_desc,
    bias_ptr,
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Two warpgroups take turns at the matrix units, tile by tile."""
    if EARLY:
        gdc_launch_dependents()
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    y_smem = gl.allocate_shared_memory(dtype, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for who in gl.static_range(2):
        mbarrier.init(turns.index(who), count=1)
    fence_async_shared()
    bars = (ready, free, turns, turns)
    gl.warp_specialize(
        [
            (turn_tiles, (out_desc, bias_ptr, x_smem, w_smem, y_smem.index(0), bars, turns, tiles_m, tiles_n, N, K, STAGES,
                          GROUP, EARLY, 0)),
            (turn_tiles, (out_desc, bias_ptr, x_smem, w_smem, y_smem.index(1), bars, turns, tiles_m, tiles_n, N, K, STAGES,
                          GROUP, EARLY, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, bars, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [224, 40],
    )  # fmt: skip

"""Gluon kernels of the layers' products for many tokens, with what follows them in the epilogue.

A persistent program per SM takes tiles of 128 tokens x 256 or 128 weight rows. A producer warp copies them by the tensor
memory accelerator (TMA), as far ahead as there is shared memory, its first weights before the kernel ahead has ended (see
``triton_early``). Two warpgroups multiply, each 64 of the tokens, leave the product rounded in shared memory and go on to the
next tile; two more warps finish the tile from there. Nothing is lost by that: the separate ops round the product too. A
program's last tile is finished by those who multiplied it, who have nothing else to do.

This is Gluon, Triton's lower-level language: Triton itself has no warps of different kinds on Hopper.
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
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = gl.constexpr(1.4426950408889634)
KEPT = gl.constexpr(PropagateNan.ALL)
BLOCK_M = gl.constexpr(128)
ROWS = gl.constexpr(64)
"""Tokens of a warpgroup: half of a tile."""
BLOCK_K = gl.constexpr(64)
PANEL = gl.constexpr(64)
"""16-bit columns of a swizzled row of shared memory; wider matrices lie there panel by panel."""
FINISHERS, REGISTERS, FEWER_REGISTERS = gl.constexpr(2), gl.constexpr(152), gl.constexpr(112)
"""Warps that finish tiles, and their registers: GELU takes few, and the bias many of the warps that multiply."""
SHARE = gl.constexpr(8)
"""Tokens of a warp in each pass over a tile."""


@gluon.jit
def tile_place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """(row of tiles, column of tiles): GROUP rows share their weights in the L2 cache before the next ones begin."""
    group = tile // (GROUP * tiles_n)
    first = group * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    inside = tile - group * (GROUP * tiles_n)
    return first + inside % rows, inside // rows


@gluon.jit
def copy_tiles(
    x_desc, weight_desc, x_smem, w_smem, bars, tiles_m, tiles_n, K: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    ready, free, _, _ = bars
    CHUNKS: gl.constexpr = K // BLOCK_K
    AHEAD: gl.constexpr = STAGES if STAGES < CHUNKS else CHUNKS
    ROWS_EACH: gl.constexpr = w_smem.shape[2]  # weight rows of each part of a tile
    BYTES: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + w_smem.shape[1] * ROWS_EACH)
    m_first, n_first = tile_place(gl.program_id(0), tiles_m, tiles_n, GROUP)
    for i in gl.static_range(AHEAD):  # what needs nothing of the kernel ahead
        begin = [0, n_first * ROWS_EACH, i * BLOCK_K]
        mbarrier.expect(ready.index(i), BYTES)
        tma.async_copy_global_to_shared(weight_desc, begin, ready.index(i), w_smem.index(i))
    if EARLY:
        gdc_wait()
    for i in gl.static_range(AHEAD):
        begin = [m_first * BLOCK_M, i * BLOCK_K]
        tma.async_copy_global_to_shared(x_desc, begin, ready.index(i), x_smem.index(i))
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        for chunk in range(CHUNKS):
            if count >= AHEAD:
                stage = count % STAGES
                mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
                bar = ready.index(stage)
                mbarrier.expect(bar, BYTES)
                at = chunk * BLOCK_K
                tma.async_copy_global_to_shared(x_desc, [m * BLOCK_M, at], bar, x_smem.index(stage))
                tma.async_copy_global_to_shared(weight_desc, [0, n * ROWS_EACH, at], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def multiply_tiles(
    x_smem, w_smem, sums, bars, tiles_m, tiles_n, ahead: gl.constexpr, prepare: gl.constexpr, finish: gl.constexpr,
    arguments, KIND: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr,
    WARPS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: rows HALF * ROWS to HALF * ROWS + ROWS of each tile. It finishes the last."""
    ready, free, done, taken = bars
    WIDE: gl.constexpr = w_smem.shape[1] * w_smem.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE if WARPS == 2 else 128, 16])
    tiles = tiles_m * tiles_n
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.zeros([ROWS, WIDE], gl.float32, layout=ACC)
        for chunk in range(K // BLOCK_K):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES & 1)
            a = x_smem.index(stage).slice(HALF * ROWS, ROWS)
            b = w_smem.index(stage).reshape([WIDE, BLOCK_K]).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=chunk > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=chunk > 0)
            count += 1
        _, n = tile_place(tile, tiles_m, tiles_n, GROUP)  # beside the last products
        held = ahead(n, arguments, KIND)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        y = prepare(acc, held, arguments, KIND).to(sums.dtype)
        mbarrier.wait(taken.index(HALF), (turn & 1) ^ 1)
        sums.index(HALF).store(y)
        gl.thread_barrier()
        mbarrier.arrive(done.index(HALF))
        turn += 1
    if EARLY:
        gdc_wait()
    last = tiles - 1 - (tiles - 1 - gl.program_id(0)) % gl.num_programs(0)
    m, n = tile_place(last, tiles_m, tiles_n, GROUP)
    finish(m, n, HALF, HALF + 1, (turn - 1) & 1, sums, bars, arguments, KIND, 4)


@gluon.jit
def finish_tiles(
    sums, bars, tiles_m, tiles_n, finish: gl.constexpr, arguments, KIND: gl.constexpr, GROUP: gl.constexpr,
    EARLY: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The warps that finish a program's tiles but the last."""
    if EARLY:
        gdc_wait()
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n - gl.num_programs(0), gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        finish(m, n, 0, 2, turn & 1, sums, bars, arguments, KIND, WARPS)
        turn += 1


@gluon.jit
def make_buffers(x_desc, weight_desc, STAGES: gl.constexpr):
    """(activations, weights, sums of both halves, barriers of: filled buffers, free ones, written sums, read ones)."""
    dtype: gl.constexpr = x_desc.dtype
    WIDE: gl.constexpr = weight_desc.block_shape[0] * weight_desc.block_shape[1]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    sums = gl.allocate_shared_memory(dtype, [2, ROWS, WIDE], LAYOUT)
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


@gluon.jit
def run_tiles(
    x_desc, weight_desc, tiles_m, tiles_n, ahead: gl.constexpr, prepare: gl.constexpr, finish: gl.constexpr, arguments,
    KIND: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A whole kernel of 4 warps; WARPS more, with so many REGISTERS, finish tiles.

    ``ahead(n, arguments, KIND)`` is called before the last products of a tile in column n have ended, and ``prepare(y, held,
    arguments, KIND)`` with what it returned may change the product y, float32 [ROWS, WIDE], while it lies in registers.
    ``finish(m, n, first_half, last_half, phase, sums, bars, arguments, KIND, WARPS)`` takes halves of a tile from ``sums`` when
    their barriers say that they are there, by the end of this phase, and says when it has read them.
    """
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, sums, bars = make_buffers(x_desc, weight_desc, STAGES)
    gl.warp_specialize(
        [
            (multiply_tiles, (x_smem, w_smem, sums, bars, tiles_m, tiles_n, ahead, prepare, finish, arguments, KIND, K,
                              STAGES, GROUP, EARLY, WARPS, 0)),
            (multiply_tiles, (x_smem, w_smem, sums, bars, tiles_m, tiles_n, ahead, prepare, finish, arguments, KIND, K,
                              STAGES, GROUP, EARLY, WARPS, 1)),
            (finish_tiles, (sums, bars, tiles_m, tiles_n, finish, arguments, KIND, GROUP, EARLY, WARPS)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, bars, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, WARPS, 1],
        # Of 512 for a thread of each warpgroup. Four warps that finish make a fourth one, and the assembler then refuses
        # products of 256 columns.
        [(512 - REGISTERS) // 16 * 8, REGISTERS, REGISTERS] if WARPS == 2 else [192, 88, 40],
    )  # fmt: skip


@gluon.jit
def column(n, arguments, KIND: gl.constexpr):
    """What is prepared asks for nothing in memory."""
    return n


@gluon.jit
def leave(y, n, arguments, KIND: gl.constexpr):
    """A product that is finished as it is."""
    return y


@gluon.jit
def halves(x, COLUMNS: gl.constexpr):
    """[ROWS, 2 * COLUMNS] -> its left and its right half; nothing moves between threads."""
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS]), [0, 2, 1]))


@gluon.jit
def widen(x):
    """16-bit floats as float32."""
    if x.dtype == gl.bfloat16:  # the compiler takes three instructions for a pair
        return gl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def panels(sums, PASS: gl.constexpr):
    """The sums as [half x panel x pass, PASS, PANEL]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NUMBER: gl.constexpr = 2 * (ROWS // PASS) * (sums.shape[2] // PANEL)
    return sums._reinterpret(sums.dtype, [NUMBER, PASS, PANEL], LAYOUT)  # noqa: SLF001


@gluon.jit
def gate_mul(gate, up, dtype: gl.constexpr, GATE: gl.constexpr):
    """act(gate) * up, with the rounding of the separate ops; activations as in ``silu_mul.triton.opened``."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    if GATE == 3:
        y = gate * (0.5 + 0.5 * gl.erf(gate * 0.7071067811865476))
    else:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate) if GATE == 2 else 1.0
        y = gate / (1.0 + gl.exp2(-gate * slope * LOG2E))
    return (y.to(dtype).to(gl.float32) * up).to(dtype)


@gluon.jit
def finish_gates(m, n, first_half, last_half, phase, sums, bars, arguments, KIND: gl.constexpr, WARPS: gl.constexpr):
    """act(gate) * up of halves of a tile."""
    _, _, done, taken = bars
    out_ptr, num_tokens = arguments
    N: gl.constexpr = KIND[0]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * WARPS
    PASSES: gl.constexpr = ROWS // PASS
    OUTS: gl.constexpr = sums.shape[2] // PANEL // 2  # panels of outputs
    first_col = n * (OUTS * PANEL) + gl.arange(0, PANEL, layout=gl.SliceLayout(0, COPY))
    first_row = m * BLOCK_M + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
    for number in range(first_half * PASSES, last_half * PASSES):
        half = number // PASSES
        part = number % PASSES
        if part == 0:
            mbarrier.wait(done.index(half), phase)
        row = first_row + number * PASS
        for i in gl.static_range(OUTS):
            at = (half * 2 * OUTS + i) * PASSES + part
            gate = panels(sums, PASS).index(at).load(COPY)
            up = panels(sums, PASS).index(at + OUTS * PASSES).load(COPY)
            col = first_col + i * PANEL
            to = out_ptr + gl.expand_dims(row.to(gl.int64) * N, 1) + gl.expand_dims(col, 0)
            keep = gl.expand_dims(row < num_tokens, 1) & gl.expand_dims(col < N, 0)
            gl.store(to, gate_mul(gate, up, sums.dtype, KIND[1]), mask=keep)
        if part == PASSES - 1:
            gl.thread_barrier()
            mbarrier.arrive(taken.index(half))


@gluon.jit(do_not_specialize=["num_tokens", "tiles_m", "tiles_n"])
def gate_up_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [2, N, K]: gate rows, up rows
    out_ptr,  # [T, N]
    num_tokens,
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GATE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    arguments = (out_ptr, num_tokens)
    KIND: gl.constexpr = (N, GATE)
    run_tiles(
        x_desc, weight_desc, tiles_m, tiles_n, column, leave, finish_gates, arguments, KIND, K, STAGES, GROUP, EARLY,
        FINISHERS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def power(x):
    """2^x; 0 where it is no normal number."""
    code: gl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gelu(x, GELU: gl.constexpr):
    """x * Phi(x) as max(x, 0) - t (1 - Phi(t)), t = |x|: no difference of near numbers, so small results keep their digits.

    The slow unit has one function to compute. log2(1 - Phi(t)) is fitted by the polynomial of least greatest error up to 5.5,
    by tanh (GELU is 2) up to 5: off by .065 and .11 of bfloat16's last place at most, and further down by 4e-11 and 2e-10.
    """
    if GELU == 2:
        t = gl.minimum(gl.abs(x), 8.0)  # 16 is beyond where the polynomial falls
        p = t * 0.000237097496 - 0.00313961478
        p = p * t + 0.00825109479
        p = p * t - 0.0376912624
        p = p * t - 0.480260026
        p = p * t - 1.14202463
        p = p * t - 1.00060041
    else:
        t = gl.minimum(gl.abs(x), 16.0)  # an infinity times nothing would be no number
        p = t * -0.000233251296 + 0.00486977304
        p = p * t - 0.0445990059
        p = p * t - 0.46968111
        p = p * t - 1.14626078
        p = p * t - 1.0003591
    return gl.maximum(x, 0.0, propagate_nan=KEPT) - t * power(p)


@gluon.jit
def column_bias(n, arguments, KIND: gl.constexpr):
    """The bias of a tile's columns."""
    _, bias_ptr, _ = arguments
    N: gl.constexpr = KIND[0]
    WIDE: gl.constexpr = KIND[3]
    if KIND[1]:
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE if KIND[4] == 2 else 128, 16])
        at = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, ACC))
        return gl.load(bias_ptr + at, mask=at < N, other=0.0)
    else:
        return n


@gluon.jit
def prepare_sums(y, bias, arguments, KIND: gl.constexpr):
    """The product and its bias, which the separate ops do not round between."""
    if KIND[1]:
        y = y + gl.expand_dims(bias.to(gl.float32), 0)
    return y


@gluon.jit
def out_part(out_ptr, row, col, num_tokens, N: gl.constexpr, GELU: gl.constexpr):
    """(where PASS tokens' part of a tile lies, which of it exists, what was there, if that counts)."""
    at = out_ptr + gl.expand_dims(row * N, 1) + gl.expand_dims(col, 0)
    keep = gl.expand_dims(row < num_tokens, 1) & gl.expand_dims(col < N, 0)
    return at, keep, keep if GELU else gl.load(at, mask=keep, other=0.0)


@gluon.jit
def finish_sums(m, n, first_half, last_half, phase, sums, bars, arguments, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Add halves of a tile to the residual; activated ones are stored."""
    _, _, done, taken = bars
    out_ptr, _, num_tokens = arguments
    N: gl.constexpr = KIND[0]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * WARPS
    PASSES: gl.constexpr = ROWS // PASS
    WIDE: gl.constexpr = sums.shape[2]
    col = n * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
    for half in range(first_half, last_half):
        row = m * BLOCK_M + half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
        at, keep, before = out_part(out_ptr, row, col, num_tokens, N, KIND[1])
        mbarrier.wait(done.index(half), phase)
        for part in gl.static_range(PASSES):
            at_now = at
            keep_now = keep
            before_now = before
            if part < PASSES - 1:
                at, keep, before = out_part(out_ptr, row + (part + 1) * PASS, col, num_tokens, N, KIND[1])
            y = sums.index(half).slice(part * PASS, PASS).load(COPY)
            if KIND[1]:
                y = gelu(widen(y), KIND[1]).to(sums.dtype)
            else:
                if KIND[2] != 1.0:  # rounded before the sum, as a product by itself would be
                    y = (y.to(gl.float32) * KIND[2]).to(sums.dtype)
                y = (y.to(gl.float32) + before_now.to(gl.float32)).to(sums.dtype)
            gl.store(at_now, y, mask=keep_now)
        gl.thread_barrier()
        mbarrier.arrive(taken.index(half))


@gluon.jit(do_not_specialize=["num_tokens", "tiles_m", "tiles_n"])
def sums_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, N, K]
    out_ptr,  # [T, N]; without GELU the residual
    bias_ptr,  # [N]; without GELU not read
    num_tokens,
    tiles_m,
    tiles_n,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    GELU: gl.constexpr,
    EARLY: gl.constexpr,
    FACTOR: gl.constexpr = 1.0,  # of the product; without GELU
    WARPS: gl.constexpr = FINISHERS,  # that finish
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply. GELU: 0, or as in ``GATES``."""
    arguments = (out_ptr, bias_ptr, num_tokens)
    KIND: gl.constexpr = (N, GELU, FACTOR, weight_desc.block_shape[1], WARPS)
    run_tiles(
        x_desc, weight_desc, tiles_m, tiles_n, column_bias, prepare_sums, finish_sums, arguments, KIND, K, STAGES, GROUP,
        EARLY, WARPS, FEWER_REGISTERS if GELU else REGISTERS,
    )  # fmt: skip

"""The Gluon kernel of the wide projection of queries, keys and values: norms, rotation and the cache in its epilogue.

Its tiles, its copying warp and its products are those of ``triton``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.kernels.wide_linear.triton import (
    BLOCK_K,
    BLOCK_M,
    ROWS,
    copy_tiles,
    finish,
    halves,
    layout_of,
    load_squares,
    make_buffers,
    product,
    row_scale,
    sum_layout,
    tile_place,
)

D = gl.constexpr(128)
"""Size of a head."""


@gluon.jit
def split_heads(x, HEADS: gl.constexpr):
    """[ROWS, HEADS * D] -> one or two of [ROWS, D]."""
    if HEADS == 1:
        return (x,)
    else:
        return halves(x, D)


@gluon.jit
def angles_place(row, dim, positions_ptr, num_tokens, num_positions):
    """Where the cosines [ROWS, D / 2] of tokens ``row`` lie in the table."""
    position = gl.load(positions_ptr + row, mask=row < num_tokens, other=0)
    position = gl.minimum(gl.maximum(position, 0), num_positions - 1)
    return gl.expand_dims(position * D, 1) + gl.expand_dims(dim, 0)


@gluon.jit
def turn(a, b, cos, sin, dim, norm_ptr, eps, dtype: gl.constexpr, NORM: gl.constexpr):
    """Norm and rotate the halves of a head, f32 [ROWS, D / 2] each, with the rounding of ``rope_kv_write`` but the last."""
    if NORM:
        rstd = gl.expand_dims(gl.rsqrt(gl.sum(a * a + b * b, axis=1) / D + eps), 1)
        a = (a * rstd).to(dtype).to(gl.float32) * gl.expand_dims(gl.load(norm_ptr + dim).to(gl.float32), 0)
        b = (b * rstd).to(dtype).to(gl.float32) * gl.expand_dims(gl.load(norm_ptr + D // 2 + dim).to(gl.float32), 0)
        a = a.to(dtype).to(gl.float32)
        b = b.to(dtype).to(gl.float32)
    return a * cos - b * sin, b * cos + a * sin


@gluon.jit
def cache_place(row, kv_slots_ptr, num_tokens, num_slots, block_stride, offset_stride, BS: gl.constexpr):
    """(where the keys of tokens ``row`` begin in the cache, whether they are to be written)."""
    slot = gl.load(kv_slots_ptr + row, mask=row < num_tokens, other=-1)
    write = (slot >= 0) & (slot < num_slots)
    slot = gl.where(write, slot, 0)
    return (slot // BS).to(gl.int64) * block_stride + (slot % BS) * offset_stride, write


@gluon.jit
def write_cache(cache_ptr, place, write, dim, out_smem, LAYOUT: gl.constexpr):
    """Both halves of a head of ROWS tokens to their places in the cache."""
    at = cache_ptr + gl.expand_dims(place, 1) + gl.expand_dims(dim, 0)
    keep = gl.expand_dims(write, 1)
    gl.store(at, out_smem.index(0).load(LAYOUT), mask=keep)
    gl.store(at + D // 2, out_smem.index(1).load(LAYOUT), mask=keep)


@gluon.jit
def qkv_tiles(
    q_desc, squares_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, k_ptr, v_ptr,
    x_smem, w_smem, out_smem, ready, free, eps, num_tokens, num_positions, num_slots,
    block_stride, offset_stride, head_stride, tiles_m, tiles_n, H: gl.constexpr, KH: gl.constexpr,
    BS: gl.constexpr, NORM: gl.constexpr, K: gl.constexpr, SQUARES: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, EARLY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows HALF * ROWS to HALF * ROWS + ROWS of each tile, which is one or two heads wide."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = x_smem.dtype
    WIDE: gl.constexpr = w_smem.shape[2]
    HEADS: gl.constexpr = WIDE // D
    out_dim = gl.arange(0, D // 2, layout=gl.SliceLayout(0, COPY))
    if EARLY:
        gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        if SQUARES > 0:
            squares = load_squares(squares_ptr, m * BLOCK_M + HALF * ROWS, num_tokens, SQUARES)
        acc = product(x_smem, w_smem, ready, free, count, K, STAGES, HALF)
        count += K // BLOCK_K
        if SQUARES > 0:
            scale = row_scale(squares, eps, K, sum_layout(WIDE))
        # What the epilogue reads is asked for while the last products run.
        nothing = gl.zeros([ROWS, WIDE], gl.float32, layout=sum_layout(WIDE))
        LAYOUT: gl.constexpr = layout_of(halves(split_heads(nothing, HEADS)[0], D // 2)[0])
        start = m * BLOCK_M + HALF * ROWS
        dim = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LAYOUT))
        row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        angles = cos_sin_ptr + angles_place(row, dim, positions_ptr, num_tokens, num_positions)
        out_row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
        place, write = cache_place(out_row, kv_slots_ptr, num_tokens, num_slots, block_stride, offset_stride, BS)
        cos = gl.load(angles)
        sin = gl.load(angles + D // 2)
        acc = finish(acc, free, count, STAGES)
        if SQUARES > 0:
            acc *= scale
        heads = split_heads(acc.to(dtype), HEADS)
        for i in gl.static_range(HEADS):
            head = n * HEADS + i
            first, second = halves(heads[i].to(gl.float32), D // 2)
            if head < H:
                first, second = turn(first, second, cos, sin, dim, q_norm_ptr, eps, dtype, NORM)
            elif head < H + KH:
                first, second = turn(first, second, cos, sin, dim, k_norm_ptr, eps, dtype, NORM)
            tma.store_wait(0)
            gl.thread_barrier()  # the head before has left
            out_smem.index(0).store(first.to(dtype))
            out_smem.index(1).store(second.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            if head < H:
                tma.async_copy_shared_to_global(q_desc, [start, head * D], out_smem.index(0))
                tma.async_copy_shared_to_global(q_desc, [start, head * D + D // 2], out_smem.index(1))
            elif head < H + KH:
                write_cache(k_ptr + (head - H) * head_stride, place, write, out_dim, out_smem, COPY)
            else:
                write_cache(v_ptr + (head - H - KH) * head_stride, place, write, out_dim, out_smem, COPY)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["tiles_m", "tiles_n", "num_tokens", "num_positions", "num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_slots_ptr"],
)
def qkv_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, (H + 2 * KH) * D, K]
    q_desc,  # [T, H * D]
    squares_ptr,  # f32 [T, SQUARES]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [L, D]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    kv_slots_ptr,  # [T]
    k_ptr,  # [NB, BS, KH, D]
    v_ptr,
    eps,
    num_tokens,
    num_positions,
    num_slots,  # NB * BS
    block_stride,
    offset_stride,
    head_stride,
    tiles_m,
    tiles_n,
    H: gl.constexpr,
    KH: gl.constexpr,
    BS: gl.constexpr,
    NORM: gl.constexpr,
    K: gl.constexpr,
    SQUARES: gl.constexpr,  # 0 when x is used as it is
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: programs that stay; 4 warps, which are one of the two warpgroups that multiply."""
    if EARLY:
        gdc_launch_dependents()
    x_smem, w_smem, ready, free = make_buffers(x_desc, weight_desc, STAGES)
    left = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, D // 2], q_desc.layout)
    right = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS, D // 2], q_desc.layout)
    gl.warp_specialize(
        [
            (qkv_tiles, (
                q_desc, squares_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, k_ptr, v_ptr,
                x_smem, w_smem, left, ready, free, eps, num_tokens, num_positions, num_slots,
                block_stride, offset_stride, head_stride, tiles_m, tiles_n, H, KH, BS, NORM, K, SQUARES, STAGES,
                GROUP, EARLY, 0)),
            (qkv_tiles, (
                q_desc, squares_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, k_ptr, v_ptr,
                x_smem, w_smem, right, ready, free, eps, num_tokens, num_positions, num_slots,
                block_stride, offset_stride, head_stride, tiles_m, tiles_n, H, KH, BS, NORM, K, SQUARES, STAGES,
                GROUP, EARLY, 1)),
            (copy_tiles, (x_desc, weight_desc, x_smem, w_smem, ready, free, tiles_m, tiles_n, K, STAGES, GROUP, EARLY)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

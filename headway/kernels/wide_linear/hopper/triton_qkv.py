"""The Gluon kernel of the wide projection of queries, keys and values: norms, rotation and the cache in its epilogue.

Its warps, its tiles and its products are those of ``triton``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from headway.kernels.triton_cached import as_cached
from headway.kernels.wide_linear.hopper.triton import (
    BLOCK_M,
    FINISHERS,
    PANEL,
    REGISTERS,
    ROWS,
    SHARE,
    column,
    halves,
    panels,
    run_tiles,
    widen,
)

D = gl.constexpr(128)
"""Size of a head."""


@gluon.jit
def angles_place(row, dim, positions_ptr, num_tokens, num_positions):
    """Where the cosines [ROWS, D / 2] of tokens ``row`` lie in the table."""
    position = gl.load(positions_ptr + row, mask=row < num_tokens, other=0)
    position = gl.minimum(gl.maximum(position, 0), num_positions - 1)
    return gl.expand_dims(position * D, 1) + gl.expand_dims(dim, 0)


@gluon.jit
def times(a, b):
    """The product of 16-bit floats, which is that in float32, rounded."""
    if a.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def scale_head(y, eps, scaled):
    """A head [ROWS, D] over its norm, if it is to be ``scaled``."""
    x = y.to(gl.float32)
    rstd = gl.rsqrt(gl.sum(x * x, axis=1) / D + eps)
    return (x * gl.expand_dims(gl.where(scaled, rstd, 1.0), 1)).to(y.dtype)


@gluon.jit
def scale_heads(y, n, arguments, KIND: gl.constexpr):
    """Queries and keys of a tile over their norms, by the many threads that multiply: those that finish are few."""
    NORM: gl.constexpr = KIND[3]
    if NORM:
        HEADS: gl.constexpr = y.shape[1] // D
        eps = arguments[8]
        scaled = n * HEADS < KIND[0] + KIND[1]
        y = y.to(arguments[0].dtype.element_ty)  # the separate ops round the product
        if HEADS == 1:
            return scale_head(y, eps, scaled)
        else:
            left, right = halves(y, D)
            pair = gl.join(scale_head(left, eps, scaled), scale_head(right, eps, scaled))
            return gl.reshape(gl.permute(pair, [0, 2, 1]), [ROWS, 2 * D])
    else:
        return y


@gluon.jit
def turn_head(a, b, cos, sin, first_norm, second_norm, NORM: gl.constexpr):
    """Weigh and rotate the halves of a head, [PASS, D / 2] each, with the rounding of ``rope_kv_write``."""
    dtype: gl.constexpr = a.dtype
    if NORM:
        first, _ = gl.broadcast(gl.expand_dims(first_norm, 0), a)
        second, _ = gl.broadcast(gl.expand_dims(second_norm, 0), b)
        a = times(a, first)
        b = times(b, second)
    x = widen(a)
    y = widen(b)
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)


@gluon.jit
def store_head(ptr, place, dim, a, b, keep):
    """Both halves of a head of PASS tokens, which begin ``place`` behind ``ptr``."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    at = ptr + gl.expand_dims(place, 1) + gl.expand_dims(dim, 0)
    gl.store(at, as_cached(a, dtype), mask=gl.expand_dims(keep, 1))
    gl.store(at + D // 2, as_cached(b, dtype), mask=gl.expand_dims(keep, 1))


@gluon.jit
def finish_heads(m, n, first_half, last_half, phase, sums, bars, arguments, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Weigh, rotate and store halves of a tile, which is one or two heads wide."""
    _, _, done, taken = bars
    q_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, k_ptr, v_ptr, _, sizes = arguments
    H: gl.constexpr = KIND[0]
    KH: gl.constexpr = KIND[1]
    BS: gl.constexpr = KIND[2]
    NORM: gl.constexpr = KIND[3]
    num_tokens, num_positions, num_slots, block_stride, offset_stride, head_stride = sizes
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PASS: gl.constexpr = SHARE * WARPS
    PASSES: gl.constexpr = ROWS // PASS
    PANELS: gl.constexpr = sums.shape[2] // PANEL
    HEADS: gl.constexpr = sums.shape[2] // D
    dim = gl.arange(0, D // 2, layout=gl.SliceLayout(0, COPY))
    head = n * HEADS
    first_norm = dim
    second_norm = dim
    if NORM:
        norm_ptr = gl.where(head < H, q_norm_ptr, k_norm_ptr)
        first_norm = gl.load(norm_ptr + dim)
        second_norm = gl.load(norm_ptr + D // 2 + dim)
    row = m * BLOCK_M + first_half * ROWS + gl.arange(0, PASS, layout=gl.SliceLayout(1, COPY))
    # One load waits for the other, so positions are asked for two passes ahead and angles one.
    angles = cos_sin_ptr + angles_place(row, dim, positions_ptr, num_tokens, num_positions)
    cos = gl.load(angles)
    sin = gl.load(angles + D // 2)
    place = angles_place(row + PASS, dim, positions_ptr, num_tokens, num_positions)
    slots = gl.load(kv_slots_ptr + row, mask=row < num_tokens, other=-1)
    for number in range(first_half * PASSES, last_half * PASSES):
        half = number // PASSES
        part = number % PASSES
        if part == 0:
            mbarrier.wait(done.index(half), phase)
        next_cos = gl.load(cos_sin_ptr + place)
        next_sin = gl.load(cos_sin_ptr + place + D // 2)
        place = angles_place(row + 2 * PASS, dim, positions_ptr, num_tokens, num_positions)
        next_row = row + PASS
        next_slots = gl.load(kv_slots_ptr + next_row, mask=next_row < num_tokens, other=-1)
        for i in gl.static_range(HEADS):
            at = (half * PANELS + 2 * i) * PASSES + part
            a = panels(sums, PASS).index(at).load(COPY)
            b = panels(sums, PASS).index(at + PASSES).load(COPY)
            if head < H + KH:
                a, b = turn_head(a, b, cos, sin, first_norm, second_norm, NORM)
            if head < H:
                store_head(q_ptr + (head + i) * D, row.to(gl.int64) * (H * D), dim, a, b, row < num_tokens)
            else:
                write = (slots >= 0) & (slots < num_slots)
                slot = gl.where(write, slots, 0)
                to = (slot // BS).to(gl.int64) * block_stride + (slot % BS) * offset_stride
                kv_head = head + i - H
                cache_ptr = gl.where(kv_head < KH, k_ptr, v_ptr)
                store_head(cache_ptr + kv_head % KH * head_stride, to, dim, a, b, write)
        if part == PASSES - 1:
            gl.thread_barrier()
            mbarrier.arrive(taken.index(half))
        cos = next_cos
        sin = next_sin
        slots = next_slots
        row = next_row


@gluon.jit(
    do_not_specialize=["tiles_m", "tiles_n", "num_tokens", "num_positions", "num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "kv_slots_ptr"],
)
def qkv_kernel(
    x_desc,  # [T, K]
    weight_desc,  # [1, (H + 2 * KH) * D, K]
    q_ptr,  # [T, H * D]
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
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Grid: persistent programs; 4 warps, which are one of the two warpgroups that multiply."""
    sizes = (num_tokens, num_positions, num_slots, block_stride, offset_stride, head_stride)
    arguments = (q_ptr, positions_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, kv_slots_ptr, k_ptr, v_ptr, eps, sizes)
    KIND: gl.constexpr = (H, KH, BS, NORM)
    run_tiles(
        x_desc, weight_desc, tiles_m, tiles_n, column, scale_heads, finish_heads, arguments, KIND, K, STAGES, GROUP, EARLY,
        FINISHERS, REGISTERS,
    )  # fmt: skip

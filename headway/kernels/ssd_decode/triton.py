"""Triton kernel of ``ssd_decode``: a program for each row, head and block of channels.

It convolves its own channels of x, and the b and c of its head's group, as the group's other heads do: that is little beside
the state. The window's ring is indexed by position and as long as the window, so no program of the step reads what another one
writes, its token's inputs. One program writes each channel: of b and c the first block of a group's first head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.causal_conv.triton import taps_of
from headway.kernels.ssd_scan.triton import head_weights, one_token
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import fresh_outputs, idle_token, row_of, softplus


@triton.jit
def convolved(x_at, ring_at, c, in_c, taps, bias, start, channels, LENGTH: tl.constexpr, TAPS: tl.constexpr):
    """Channels ``c`` of a token at position ``start``: (what it brings, what ``causal_conv`` makes of it)."""
    own = tl.load(x_at + c, mask=in_c, other=0.0)
    total = own.to(tl.float32) * taps[0]
    for back in tl.static_range(1, TAPS):
        place = (start - back + LENGTH) % LENGTH
        past = tl.load(ring_at + place * channels + c, mask=in_c & (start >= back), other=0.0)
        total += past.to(tl.float32) * taps[back]
    total += bias
    total = total / (1.0 + tl.exp(-total))
    return own, total.to(own.dtype).to(tl.float32)


@triton.jit
def ssd_decode_kernel(
    x_ptr,  # [T, H P + 2 G N]
    weight_ptr,  # [H P + 2 G N, TAPS]
    bias_ptr,  # [H P + 2 G N], or None
    ring_ptr,  # [S, LENGTH, H P + 2 G N]
    dt_ptr,  # [T, H]
    dt_bias_ptr,  # [H]
    a_ptr,  # f32 [H]
    d_ptr,  # [H]
    state_ptr,  # [S, H, P, N]
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    y_ptr,  # [T, H, P] contiguous
    x_stride, ring_stride, dt_stride, state_stride, channels, heads,
    share,  # heads of a group
    num_slots, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    both = in_p[:, None] & in_n[None, :]
    x_c, b_c = head * P + p, heads * P + head // share * N + n
    c_c = b_c + heads // share * N
    x_taps, x_bias = taps_of(weight_ptr, bias_ptr, x_c, in_p, TAPS)
    b_taps, b_bias = taps_of(weight_ptr, bias_ptr, b_c, in_n, TAPS)
    c_taps, c_bias = taps_of(weight_ptr, bias_ptr, c_c, in_n, TAPS)
    a, dt_bias, d = head_weights(a_ptr, dt_bias_ptr, d_ptr, head)
    wait_for_inputs(EARLY)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    if ALONE and not live:
        idle = idle_token(row, first, count, query_start_ptr, tl.num_programs(0))
        nothing = tl.zeros((BLOCK_P,), y_ptr.dtype.element_ty)
        tl.store(y_ptr + (idle * heads + head) * P + p, nothing, mask=in_p & (idle >= 0))
    if live & (count == 1):
        token = first.to(tl.int64)
        at = state_ptr + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)
        x_at, ring_at = x_ptr + token * x_stride, ring_ptr + slot * ring_stride
        own_x, x = convolved(x_at, ring_at, x_c, in_p, x_taps, x_bias, start, channels, LENGTH, TAPS)
        own_b, b = convolved(x_at, ring_at, b_c, in_n, b_taps, b_bias, start, channels, LENGTH, TAPS)
        own_c, c = convolved(x_at, ring_at, c_c, in_n, c_taps, c_bias, start, channels, LENGTH, TAPS)
        raw = tl.load(dt_ptr + token * dt_stride + head + tl.arange(0, 1)).to(tl.float32) + dt_bias
        step = tl.minimum(tl.maximum(softplus(raw), dt_min), dt_max)
        h, y = one_token(h, x, b, c, step, a)
        y += d * x
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)
        tl.store(y_ptr + (token * heads + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=in_p)
        place = ring_at + start % LENGTH * channels
        tl.store(place + x_c, own_x, mask=in_p)
        leads = in_n & (head % share == 0) & (tl.program_id(2) == 0)
        tl.store(place + b_c, own_b, mask=leads)
        tl.store(place + c_c, own_c, mask=leads)


def tile_of(width: int, block_n: int) -> tuple[int, int]:
    """(channels, warps) of a program. Two warps convolve x in fewer copies than four: for 8 rows 5.4 us, not 7.0, on H200."""
    return max(4, min(next_power_of_2(width), 4096 // block_n)), 2


def ssd_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ring: torch.Tensor, dt: torch.Tensor,
    dt_bias: torch.Tensor, a: torch.Tensor, d: torch.Tensor, dt_min: float, dt_max: float, state: torch.Tensor,
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, packed: torch.Tensor,
    max_chunks: int, max_query_len: int, short: int,
) -> torch.Tensor:  # fmt: skip
    (slots, heads, width, size), (_, length, channels), rows = state.shape, ring.shape, len(seq_lens)
    assert max_query_len == 1, "rows of one token"
    assert x.stride(1) == dt.stride(1) == ring.stride(2) == 1 and ring.stride(1) == channels, (
        "channels lie side by side"
    )
    assert length >= weight.shape[1] and state[0].is_contiguous(), "the ring holds the window"
    y, alone = fresh_outputs(x[:, : heads * width].unflatten(1, (heads, width)), rows, max_query_len)
    block_n = max(16, next_power_of_2(size))
    block, warps = tile_of(width, block_n)
    ssd_decode_kernel[(rows, heads, cdiv(width, block))](
        x, weight, bias, ring, dt, dt_bias, a, d, state, query_start, row_slots, seq_lens, y,
        x.stride(0), ring.stride(0), dt.stride(0), state.stride(0), channels, heads,
        heads // ((channels - heads * width) // (2 * size)), slots, dt_min, dt_max,
        P=width, N=size, LENGTH=length, TAPS=weight.shape[1], BLOCK_P=block, BLOCK_N=block_n, ALONE=alone, num_warps=warps,
        **launch_early(x.device),
    )  # fmt: skip
    return y

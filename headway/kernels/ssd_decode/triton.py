"""Triton kernel of ``ssd_decode``: a program for each row, head and block of channels, which takes the tokens in turn with its
part of the state in registers, first those that the stored state has not seen, and then the row's own.

It convolves its own channels of x, and the b and c of its head's group, as the group's other heads do: that is little beside
the state. Windows and rings are indexed by position and have a place for each token, so no program of the step reads what
another one writes, its tokens' inputs. One program writes each channel: of b and c the first block of a group's first head.
What a token needs of memory is loaded while the token before it is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms
from headway.kernels.causal_conv.triton import taps_of
from headway.kernels.ssd_scan.triton import head_weights, time_step, with_token
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_idle, opened_outputs, row_of
from headway.kernels.triton_windows import convolved, hold_past, moved_on

FEW_HEADS = 4
"""Heads of all rows for each SM, up to which programs of several tokens take fewer channels each."""


@triton.jit
def loaded(x_at, b_at, dt_at, in_x, in_b, there):
    """x, b, and dt as [1], of a token, as they lie there."""
    x = tl.load(x_at, mask=in_x & there, other=0.0)
    b = tl.load(b_at, mask=in_b & there, other=0.0)
    one = tl.arange(0, 1)
    return x, b, tl.load(dt_at + one, mask=(one == 0) & there, other=0.0)


@triton.jit
def run_again(
    h, x_at, b_at, dt_at, in_p, in_n, stored, start, places, per_token, a, dt_bias, dt_min, dt_max
):  # fmt: skip
    """The state behind the tokens from position ``stored`` to ``start``. The three: where inputs of the first place lie."""
    at = stored % places * per_token
    x, b, dt = loaded(x_at + at, b_at + at, dt_at + at, in_p, in_n, stored < start)
    for position in range(stored, start):
        last_x, last_b, last_dt = x.to(tl.float32), b.to(tl.float32), dt.to(tl.float32)
        at = (position + 1) % places * per_token
        x, b, dt = loaded(x_at + at, b_at + at, dt_at + at, in_p, in_n, position + 1 < start)
        h = with_token(h, last_x, last_b, time_step(last_dt + dt_bias, dt_min, dt_max), a)
    return h


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
    inputs_ptr,  # [S', places, H P + G N + H], or None
    stored_at_ptr, store_at_ptr,
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    y_ptr,  # [T, H, P] contiguous
    x_stride, ring_stride, dt_stride, state_stride, channels, heads,
    share,  # heads of a group
    num_slots, places, num_tokens, dt_min, dt_max,
    P: tl.constexpr, N: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SPREAD: tl.constexpr,
    ONE: tl.constexpr,  # rows have a token at most
    WIDTH: tl.constexpr,  # see ``clear_idle``; 0: outputs are zeros
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    both = in_p[:, None] & in_n[None, :]
    # What is convolved stands in vectors of at least as many numbers as there are threads, x before zeros, b and c side by
    # side: of fewer numbers each thread would load and convolve all that it meets in the state.
    spread, pair = tl.arange(0, SPREAD * BLOCK_P), tl.arange(0, 2 * BLOCK_N)
    in_x = (spread < BLOCK_P) & (block * BLOCK_P + spread < P)
    in_pair = pair % BLOCK_N < N
    x_c = head * P + block * BLOCK_P + spread
    pair_c = heads * P + (pair // BLOCK_N * (heads // share) + head // share) * N + pair % BLOCK_N
    x_taps, x_bias = taps_of(weight_ptr, bias_ptr, x_c, in_x, TAPS)
    pair_taps, pair_bias = taps_of(weight_ptr, bias_ptr, pair_c, in_pair, TAPS)
    a, dt_bias, d = head_weights(a_ptr, dt_bias_ptr, d_ptr, head)
    wait_for_inputs(EARLY)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    of_head, rows = y_ptr + head * P + p, tl.num_programs(0)
    if WIDTH > 0:
        clear_idle(of_head, heads * P, in_p, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    if live:
        stored, store = start, start + count
        if inputs_ptr is not None:
            stored, store = tl.load(stored_at_ptr + row), tl.load(store_at_ptr + row)
        at = state_ptr + slot * state_stride + (head * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=both & (stored > 0), other=0.0).to(tl.float32)
        ring = ring_ptr + slot * ring_stride
        x_past = hold_past(ring + x_c, start, channels, in_x, LENGTH, TAPS)
        pair_past = hold_past(ring + pair_c, start, channels, in_pair, LENGTH, TAPS)
        leads = (head % share == 0) & (block == 0)
        per_token = heads * P + heads // share * N + heads
        x_own, b_own, dt_own = inputs_ptr, inputs_ptr, inputs_ptr
        if inputs_ptr is not None:
            own = inputs_ptr + slot * places * per_token
            x_own, b_own = own + head * P + p, own + heads * P + head // share * N + n
            dt_own = own + heads * P + heads // share * N + head
            h = run_again(
                h, x_own, b_own, dt_own, in_p, in_n, stored, start, places, per_token, a, dt_bias, dt_min, dt_max
            )  # fmt: skip
        tokens = 1 if ONE else count
        token = first.to(tl.int64)
        x_at, pair_at = x_ptr + token * x_stride + x_c, x_ptr + token * x_stride + pair_c
        dt_at = dt_ptr + token * dt_stride + head
        new = loaded(x_at, pair_at, dt_at, in_x, in_pair, live)
        for t in range(0, tokens):
            new_x, new_pair, dt = new
            x_at, pair_at, dt_at = x_at + x_stride, pair_at + x_stride, dt_at + dt_stride
            new = loaded(x_at, pair_at, dt_at, in_x, in_pair, t + 1 < tokens)
            x = tl.sum(tl.reshape(convolved(new_x, x_past, x_taps, x_bias, TAPS), (SPREAD, BLOCK_P)), 0)
            both_n = tl.reshape(convolved(new_pair, pair_past, pair_taps, pair_bias, TAPS), (2, BLOCK_N))
            b, c = tl.split(tl.trans(both_n))
            h = with_token(h, x, b, time_step(dt.to(tl.float32) + dt_bias, dt_min, dt_max), a)
            y = tl.sum(h * c[None, :], 1) + d * x
            if inputs_ptr is not None:
                if start + t >= store:
                    kept, one = (start + t) % places * per_token, tl.arange(0, 1)
                    tl.store(x_own + kept, x.to(inputs_ptr.dtype.element_ty), mask=in_p)
                    tl.store(b_own + kept, b.to(inputs_ptr.dtype.element_ty), mask=in_n & leads)
                    tl.store(dt_own + kept + one, dt, mask=(one == 0) & (block == 0))
            if start + t + 1 == store:
                tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)
            tl.store(of_head + (token + t) * heads * P, y.to(y_ptr.dtype.element_ty), mask=in_p)
            newest = ring + (start + t) % LENGTH * channels
            tl.store(newest + x_c, new_x, mask=in_x)
            tl.store(newest + pair_c, new_pair, mask=in_pair & leads)
            x_past, pair_past = moved_on(new_x, x_past, TAPS), moved_on(new_pair, pair_past, TAPS)


def tile_of(width: int, block_n: int, heads: int, sms: int, several: bool) -> tuple[int, int]:
    """(channels, warps) of a program, for ``heads`` of all rows. Two warps convolve x in fewer copies than four: for 8 rows
    5.4 us, not 7.0, on H200.

    Where tokens are ``several``, programs hold twice as much, so that b and c of each are convolved half as often; but few
    heads leave processors idle, and end sooner in more programs of more threads (on an H100, with three drafts: 8 rows of 48
    heads 20.0 us, not 22.5; 8 rows of 128 heads 48.3, not 44.6).
    """
    held, warps = 4096, 2
    if several:
        held, warps = 4096 if heads <= FEW_HEADS * sms else 8192, 4
    return max(4, min(next_power_of_2(width), held // block_n)), warps


def ssd_decode(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ring: torch.Tensor, dt: torch.Tensor,
    dt_bias: torch.Tensor, a: torch.Tensor, d: torch.Tensor, dt_min: float, dt_max: float, state: torch.Tensor,
    query_start: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, packed: torch.Tensor,
    max_chunks: int, max_query_len: int, short: int, inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None, store_at: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    (slots, heads, width, size), (_, length, channels), rows = state.shape, ring.shape, len(seq_lens)
    assert max_query_len <= short, "short rows alone"
    assert x.stride(1) == dt.stride(1) == ring.stride(2) == 1 and ring.stride(1) == channels, (
        "channels lie side by side"
    )
    assert length >= weight.shape[1] + max_query_len - 1 and state[0].is_contiguous(), "the ring holds window and row"
    assert inputs is None or inputs.is_contiguous(), "rings lie in memory of their own"
    like = x[:, : heads * width].unflatten(1, (heads, width))
    y, cleared = opened_outputs(like, rows, max_query_len, short)
    block_n = max(16, next_power_of_2(size))
    block, warps = tile_of(width, block_n, rows * heads, num_sms(x.device), inputs is not None)
    ssd_decode_kernel[(rows, heads, cdiv(width, block))](
        x, weight, bias, ring, dt, dt_bias, a, d, state, inputs, stored_at, store_at, query_start, row_slots, seq_lens, y,
        x.stride(0), ring.stride(0), dt.stride(0), state.stride(0), channels, heads,
        heads // ((channels - heads * width) // (2 * size)), slots, 0 if inputs is None else inputs.shape[1], len(x),
        dt_min, dt_max, P=width, N=size, LENGTH=length, TAPS=weight.shape[1], BLOCK_P=block, BLOCK_N=block_n,
        SPREAD=cdiv(32 * warps, block), ONE=max_query_len == 1, WIDTH=cleared, num_warps=warps, **launch_early(x.device),
    )  # fmt: skip
    return y

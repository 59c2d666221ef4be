"""Triton kernel of ``delta_token``: a program for each row and head, which holds the head's whole state.

It convolves its own channels of the values, and of queries and keys those that its head reads, which other heads may read, too:
the first of these writes them to the window. Places that are read and the place that is written are different ones, so no
program waits for another. Whole heads lie in one piece in memory, and programs that run at one time have neighbouring ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import next_power_of_2
from headway.kernels.delta_token.reference import delta_token as three_kernels
from headway.kernels.gated_delta.reference import EPS
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import fresh_outputs, idle_token, row_of, softplus

MOST_HELD = 32768
"""Elements of a head's state that a program's registers can hold; larger ones take the three kernels."""
A_WARPS = 4096
"""Elements of a state for each warp: 128 in registers of a thread."""
AHEAD = False
"""Read states and windows before the wait for the kernel before: no other kernel behind the embedding writes them."""


@triton.jit
def hold_past(ring_at, start, channels, mask, LENGTH: tl.constexpr, TAPS: tl.constexpr):
    """The inputs before position ``start``, the last one first; a tuple."""
    past = ()
    for back in tl.static_range(1, TAPS):
        at = ring_at + (start - back + LENGTH) % LENGTH * channels
        past = past + (tl.load(at, mask=mask & (start >= back), other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return past


@triton.jit
def hold_taps(weight_at, mask, TAPS: tl.constexpr):
    """Weights of the token itself, of the one before it, and so on; a tuple."""
    taps = ()
    for back in tl.static_range(TAPS):
        taps = taps + (tl.load(weight_at + (TAPS - 1 - back), mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return taps


@triton.jit
def convolved(new, past, taps, TAPS: tl.constexpr):
    """f32, as ``causal_conv`` rounds it."""
    total = new.to(tl.float32) * taps[0].to(tl.float32)
    for back in tl.static_range(1, TAPS):
        total += past[back - 1].to(tl.float32) * taps[back].to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    return total.to(new.dtype).to(tl.float32)


@triton.jit
def delta_token_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, TAPS]
    ring_ptr,  # [S, LENGTH, C]
    a_ptr,  # [T, H] or [T, H, K]
    a_log_ptr,  # f32 [H]
    dt_bias_ptr,  # f32 [H] or [H, K]
    b_ptr,  # [T, H]
    state_ptr,  # [S, H, K, V]
    gate_ptr,  # [T, H V]
    norm_ptr,  # [V]
    query_start_ptr, row_slots_ptr, seq_lens_ptr,
    y_ptr,  # [T, H V] contiguous
    x_stride, ring_stride, a_stride, a_head, b_stride, state_stride, gate_stride, channels,
    share,  # value heads of a key head
    num_slots, beta_scale, scale, eps,
    K: tl.constexpr, V: tl.constexpr, LENGTH: tl.constexpr, TAPS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SIGMOID: tl.constexpr, SMALL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALONE: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    head, row = tl.program_id(0), tl.program_id(1)
    heads, rows = tl.num_programs(0), tl.num_programs(1)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_k, in_v = k < K, v < V
    # Queries and keys side by side: alone they are fewer than threads, and each thread would load all it meets in the state.
    pair = tl.arange(0, 2 * BLOCK_K)
    in_pair = pair % BLOCK_K < K
    pair_at = (pair // BLOCK_K * (heads // share) + head // share) * K + pair % BLOCK_K
    v_at = heads // share * 2 * K + head * V + v
    pair_taps = hold_taps(weight_ptr + pair_at * TAPS, in_pair, TAPS)
    v_taps = hold_taps(weight_ptr + v_at * TAPS, in_v, TAPS)
    norm = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    if BY_CHANNEL:
        bias = tl.load(dt_bias_ptr + head * K + k, mask=in_k, other=0.0)
    else:
        bias = tl.load(dt_bias_ptr + head)
    if not AHEAD:
        wait_for_inputs(EARLY)
    ring = ring_ptr + slot * ring_stride
    at = state_ptr + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
    both = in_k[:, None] & in_v[None, :] & live
    h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)  # [K, V]
    pair_past = hold_past(ring + pair_at, start, channels, in_pair & live, LENGTH, TAPS)
    v_past = hold_past(ring + v_at, start, channels, in_v & live, LENGTH, TAPS)
    if AHEAD:
        wait_for_inputs(EARLY)
    if live:
        token = first.to(tl.int64)
        pair_new = tl.load(x_ptr + token * x_stride + pair_at, mask=in_pair, other=0.0)
        v_new = tl.load(x_ptr + token * x_stride + v_at, mask=in_v, other=0.0)
        gate = tl.load(gate_ptr + token * gate_stride + head * V + v, mask=in_v, other=0.0).to(tl.float32)
        pull = tl.load(b_ptr + token * b_stride + head).to(tl.float32)
        if BY_CHANNEL:
            raw = tl.load(a_ptr + token * a_stride + head * a_head + k, mask=in_k, other=0.0).to(tl.float32)
            h = h * tl.exp(-rate * softplus(raw + bias))[:, None]
        else:
            raw = tl.load(a_ptr + token * a_stride + head).to(tl.float32)
            h = h * tl.exp(-rate * softplus(raw + bias))
        query, key = tl.split(tl.trans(tl.reshape(convolved(pair_new, pair_past, pair_taps, TAPS), (2, BLOCK_K))))
        value = convolved(v_new, v_past, v_taps, TAPS)
        query = query * (scale * tl.rsqrt(tl.sum(query * query, 0) + SMALL))
        key = key * tl.rsqrt(tl.sum(key * key, 0) + SMALL)
        u = beta_scale / (1.0 + tl.exp(-pull)) * (value - tl.sum(key[:, None] * h, 0))
        h = h + key[:, None] * u[None, :]
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)
        newest = ring + start % LENGTH * channels
        tl.store(newest + pair_at, pair_new, mask=in_pair & (head % share == 0))
        tl.store(newest + v_at, v_new, mask=in_v)
        kind = y_ptr.dtype.element_ty
        out = tl.sum(query[:, None] * h, 0).to(kind).to(tl.float32)
        opened = 1.0 / (1.0 + tl.exp(-gate))
        if not SIGMOID:
            opened = gate * opened
        normed = (out * tl.rsqrt(tl.sum(out * out, 0) / V + eps)).to(kind)
        y = (normed * norm).to(tl.float32) * opened
        tl.store(y_ptr + (token * heads + head) * V + v, y.to(kind), mask=in_v)
    elif ALONE:
        idle = idle_token(row, first, count, query_start_ptr, rows)
        nothing = tl.zeros((BLOCK_V,), y_ptr.dtype.element_ty)
        tl.store(y_ptr + (idle * heads + head) * V + v, nothing, mask=in_v & (idle >= 0))


def delta_token(
    x: torch.Tensor,
    weight: torch.Tensor,
    ring: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    gate: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    sigmoid: bool,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
) -> torch.Tensor:
    (slots, length, channels), (_, heads, keys, values) = ring.shape, state.shape
    assert max_query_len == 1, "rows of one token each"
    assert x.stride(1) == gate.stride(1) == a.stride(-1) == b.stride(1) == ring.stride(2) == 1
    assert ring.stride(1) == channels and length >= weight.shape[1], (
        "channels lie side by side; the ring holds the window"
    )
    block_k, block_v, rows = max(16, next_power_of_2(keys)), next_power_of_2(values), len(seq_lens)
    if block_k * block_v > MOST_HELD:
        return three_kernels(
            x, weight, ring, a, a_log, dt_bias, b, beta_scale, scale, state, gate, norm, eps, sigmoid,
            query_start, row_slots, seq_lens, packed, max_chunks, max_query_len, short,
        )  # fmt: skip
    y, alone = fresh_outputs(gate, rows, max_query_len)
    delta_token_kernel[(heads, rows)](
        x, weight, ring, a, a_log, dt_bias, b, state, gate, norm, query_start, row_slots, seq_lens, y,
        x.stride(0), ring.stride(0), a.stride(0), a.stride(1), b.stride(0), state.stride(0), gate.stride(0), channels,
        heads * 2 * keys // (channels - heads * values), slots, beta_scale, scale, eps,
        K=keys, V=values, LENGTH=length, TAPS=weight.shape[1], BY_CHANNEL=a.dim() == 3, SIGMOID=sigmoid, SMALL=EPS,
        BLOCK_K=block_k, BLOCK_V=block_v, ALONE=alone, AHEAD=AHEAD,
        num_warps=max(1, block_k * block_v // A_WARPS), **launch_early(x.device),
    )  # fmt: skip
    return y

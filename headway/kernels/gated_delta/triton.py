"""Triton kernels of ``gated_delta``.

``walk`` has a program for each row, head and block of values, and takes one token after the other with the state in
registers, behind those that the stored state has not seen, which it takes 16 at a time: short rows.
``chunks`` takes the longer ones that are not for ``long_rows``, 16 tokens at a time: with g's running sum G,
(I + A) U = beta (V - exp(G) K h) where A is strictly lower triangular, and the inverse of I + A is
(I - A)(I + A^2)(I + A^4)(I + A^8), exactly, because A^16 = 0. Of 16 tokens its powers stay small enough for float32
whatever the keys are; of 64 they would not.

Where decays are by channel, exp(G_i - G_j) belongs inside the sum over channels, and exp(-G_j) may overflow. Any two tokens
j < i lie left and right of one edge between two blocks of 1, 2, 4 or 8 tokens, and the decay is that from j to the edge times
that from the edge to i: both at most 1, however strong they are. So each size of blocks takes one product (``near_products``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.gated_delta.inverse import inverse_of
from headway.kernels.gated_delta.long_rows import delta_long_rows
from headway.kernels.gated_delta.reference import EPS
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_idle, clear_tokens, opened_outputs, row_of, softplus

TOKENS = 16
WALKED, WALK_WARPS = 8192, 4
"""Elements of a state that a program of the walk holds, and its warps. Blocks of one state, which share pages of memory, run
beside each other: the grid counts blocks first, rows last."""


@triton.jit
def delta_walk_kernel(
    q_ptr,  # [T, HK, K]
    k_ptr,  # [T, HK, K]
    v_ptr,  # [T, H, V]
    a_ptr,  # [T, H] or [T, H, K]
    a_log_ptr,  # f32 [H]
    dt_bias_ptr,  # f32 [H] or [H, K]
    b_ptr,  # [T, H]
    state_ptr,  # [S, H, K, V]
    inputs_ptr,  # f32 [S', places, HK K + H V + H (or H K)], or None
    stored_at_ptr,
    store_at_ptr,
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    o_ptr,  # [T, H, V] contiguous
    q_stride, q_head, k_stride, k_head, v_stride, v_head, a_stride, a_head, b_stride, state_stride, places, heads,
    share,  # value heads of a key head
    num_slots, beta_scale, scale,
    most,  # rows of more tokens are not taken
    num_tokens,
    K: tl.constexpr, V: tl.constexpr, BY_CHANNEL: tl.constexpr, SMALL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, L: tl.constexpr,
    WIDTH: tl.constexpr,  # see ``clear_idle``; 0: only the row's own tokens are cleared
    EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    in_k, in_v = k < K, v < V
    both = in_k[:, None] & in_v[None, :]
    rate = tl.exp(tl.load(a_log_ptr + head))
    wait_for_inputs(EARLY)
    if WIDTH > 0:
        of_head, rows = o_ptr + head * V + v, tl.num_programs(2)
        clear_idle(of_head, heads * V, in_v, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    else:
        clear_tokens(o_ptr + head * V + v, heads * V, in_v, first, tl.where(live | (count > most), 0, count))
    if live & (count <= most):
        at = state_ptr + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
        stored = start
        if inputs_ptr is not None:
            stored, store = tl.load(stored_at_ptr + row), tl.load(store_at_ptr + row)
            decays: tl.constexpr = K if BY_CHANNEL else 1
            u_at = heads // share * K + head * V
            g_at = heads // share * K + heads * V + head * decays
            per_token = heads // share * K + heads * (V + decays)
            own = inputs_ptr + slot * places * per_token
        h = tl.load(at, mask=both & (stored > 0), other=0.0).to(tl.float32)  # [K, V]
        if inputs_ptr is not None:
            for t0 in tl.range(stored, start, L, num_stages=1):
                position = t0 + tl.arange(0, L)
                there = position < start
                given = own + (position % places) * per_token  # [L]
                in_keys = there[:, None] & in_k[None, :]
                keys = tl.load(given[:, None] + head // share * K + k[None, :], mask=in_keys, other=0.0)
                us = tl.load(given[:, None] + u_at + v[None, :], mask=there[:, None] & in_v[None, :], other=0.0)
                g_from = given[:, None] + g_at + k[None, :] * BY_CHANNEL
                g = tl.load(g_from, mask=in_keys, other=0.0)
                behind = tl.where(position[None, :] > position[:, None], 1.0, 0.0)
                left = keys * tl.exp(tl.dot(behind, g, input_precision="tf32x3"))
                h = h * tl.exp(tl.sum(g, 0))[:, None] + tl.dot(tl.trans(left), us, input_precision="tf32x3")
        for t in range(0, count):
            token = (first + t).to(tl.int64)
            query = tl.load(q_ptr + token * q_stride + head // share * q_head + k, mask=in_k, other=0.0).to(tl.float32)
            key = tl.load(k_ptr + token * k_stride + head // share * k_head + k, mask=in_k, other=0.0).to(tl.float32)
            value = tl.load(v_ptr + token * v_stride + head * v_head + v, mask=in_v, other=0.0).to(tl.float32)
            query = query * (scale * tl.rsqrt(tl.sum(query * query, 0) + SMALL))
            key = key * tl.rsqrt(tl.sum(key * key, 0) + SMALL)
            if inputs_ptr is not None:
                given = own + ((start + t) % places) * per_token
                kept = start + t >= store
                leads = kept & (block == 0)
                tl.store(given + head // share * K + k, key, mask=in_k & leads & (head % share == 0))
            if BY_CHANNEL:
                raw = tl.load(a_ptr + token * a_stride + head * a_head + k, mask=in_k, other=0.0).to(tl.float32)
                raw += tl.load(dt_bias_ptr + head * K + k, mask=in_k, other=0.0)
                g = -rate * softplus(raw)
                if inputs_ptr is not None:
                    tl.store(given + g_at + k, g, mask=in_k & leads)
                h = h * tl.exp(g)[:, None]
            else:
                raw = tl.load(a_ptr + token * a_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
                g = -rate * softplus(raw)
                if inputs_ptr is not None:
                    tl.store(given + g_at, g, mask=leads)
                h = h * tl.exp(g)
            beta = beta_scale / (1.0 + tl.exp(-tl.load(b_ptr + token * b_stride + head).to(tl.float32)))
            u = beta * (value - tl.sum(key[:, None] * h, 0))
            h = h + key[:, None] * u[None, :]
            if inputs_ptr is not None:
                tl.store(given + u_at + v, u, mask=in_v & kept)
                tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both & (start + t + 1 == store))
            out = tl.sum(query[:, None] * h, 0)
            tl.store(o_ptr + (token * heads + head) * V + v, out.to(o_ptr.dtype.element_ty), mask=in_v)
        if inputs_ptr is None:
            tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)


@triton.jit
def near_products(query, key, g, L: tl.constexpr, LEVELS: tl.constexpr, KIND: tl.constexpr):
    """(k_i . k_j, q_i . k_j) [L, L] for j < i, in the second for j = i, too, and zeros elsewhere: sums over channels with
    decays exp(g_j+1 + ... + g_i) inside. query, key, g f32 [L, K]; products of KIND."""
    i = tl.arange(0, L)
    keys = tl.zeros((L, L), tl.float32)
    scores = tl.where(i[:, None] == i[None, :], tl.sum(query * key, 1)[:, None], 0.0)
    for level in tl.static_range(LEVELS):
        block, right = i >> level, ((i >> level) & 1) == 1
        # Right of an edge decays are summed from it up to the token, left of it behind the token.
        behind = tl.where(right[:, None], i[None, :] <= i[:, None], i[None, :] > i[:, None])
        apart = tl.where(behind & (block[:, None] == block[None, :]), 1.0, 0.0)
        factor = tl.exp(tl.dot(apart, g, input_precision="tf32x3"))
        near = tl.trans((key * factor).to(KIND))
        pairs = right[:, None] & (block[:, None] == block[None, :] + 1)
        keys += tl.where(pairs, tl.dot((key * factor).to(KIND), near, input_precision="ieee"), 0.0)
        scores += tl.where(pairs, tl.dot((query * factor).to(KIND), near, input_precision="ieee"), 0.0)
    return keys, scores


@triton.jit
def unit_rows(at, mask, scale, SMALL: tl.constexpr):
    """f32 [L, K], rows of length ``scale``."""
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return x * (scale * tl.rsqrt(tl.sum(x * x, 1) + SMALL))[:, None]


@triton.jit
def delta_chunks_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, a_log_ptr, dt_bias_ptr, b_ptr, state_ptr,
    query_start_ptr, row_slots_ptr, seq_lens_ptr, o_ptr,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, a_stride, a_head, b_stride, state_stride,
    heads, share, num_slots, beta_scale, scale,
    most,  # rows of so many tokens or fewer are not taken
    K: tl.constexpr, V: tl.constexpr, BY_CHANNEL: tl.constexpr, SMALL: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, L: tl.constexpr,
    LEVELS: tl.constexpr,  # 2^LEVELS = L
):  # fmt: skip
    first, count, slot, start, live = row_of(tl.program_id(0), query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    head = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    i = tl.arange(0, L)
    in_k, in_v = k < K, v < V
    both = in_k[:, None] & in_v[None, :]
    kind = v_ptr.dtype.element_ty
    if live & (count > most):
        at = state_ptr + slot * state_stride + (head * K + k[:, None]) * V + v[None, :]
        h = tl.load(at, mask=both & (start > 0), other=0.0).to(tl.float32)  # [K, V]
        rate = tl.exp(tl.load(a_log_ptr + head))
        bias = tl.load(dt_bias_ptr + head * K + k, mask=in_k, other=0.0) if BY_CHANNEL else tl.load(dt_bias_ptr + head)
        below = i[:, None] > i[None, :]
        causal = i[:, None] >= i[None, :]
        for t0 in range(0, count, L):
            inside = t0 + i < count
            token = (first + t0 + i).to(tl.int64)
            in_keys = inside[:, None] & in_k[None, :]
            query_at = q_ptr + token[:, None] * q_stride + head // share * q_head + k[None, :]
            key_at = k_ptr + token[:, None] * k_stride + head // share * k_head + k[None, :]
            query, key = unit_rows(query_at, in_keys, scale, SMALL), unit_rows(key_at, in_keys, 1.0, SMALL)
            in_values = inside[:, None] & in_v[None, :]
            value = tl.load(v_ptr + token[:, None] * v_stride + head * v_head + v[None, :], mask=in_values, other=0.0)
            pull = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
            beta = tl.where(inside, beta_scale / (1.0 + tl.exp(-pull)), 0.0)
            carried = h.to(kind)
            if BY_CHANNEL:
                a_at = a_ptr + token[:, None] * a_stride + head * a_head + k[None, :]
                raw = tl.load(a_at, mask=in_keys, other=0.0).to(tl.float32) + bias[None, :]
                g = tl.where(inside[:, None], -rate * softplus(raw), 0.0)
                total = tl.cumsum(g, 0)  # [L, K]
                keys, scores = near_products(query, key, g, L, LEVELS, kind)
                known = tl.dot((tl.exp(total) * key).to(kind), carried, input_precision="ieee")
                out = tl.dot((tl.exp(total) * query).to(kind), carried, input_precision="ieee")
                whole = tl.sum(g, 0)
                behind = tl.dot(tl.where(causal, 0.0, 1.0), g, input_precision="tf32x3")
                left = (key * tl.exp(behind)).to(kind)
                passed = tl.exp(whole)[:, None]
            else:
                query, key = query.to(kind), key.to(kind)
                raw = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + bias
                g = tl.where(inside, -rate * softplus(raw), 0.0)
                total = tl.cumsum(g, 0)
                decay = tl.where(causal, tl.exp(tl.where(causal, total[:, None] - total[None, :], 0.0)), 0.0)
                kk = tl.dot(key, tl.trans(key), input_precision="ieee")
                keys = tl.where(below, kk * decay, 0.0)
                known = tl.exp(total)[:, None] * tl.dot(key, carried, input_precision="ieee")
                scores = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
                out = tl.exp(total)[:, None] * tl.dot(query, carried, input_precision="ieee")
                whole = tl.sum(g, 0)
                left = (key.to(tl.float32) * tl.exp(whole - total)[:, None]).to(kind)
                passed = tl.exp(whole)
            inverse = inverse_of(keys * beta[:, None], L, LEVELS)
            u = tl.dot(inverse, beta[:, None] * (value.to(tl.float32) - known), input_precision="ieee")  # [L, V]
            out += tl.dot(scores.to(kind), u.to(kind), input_precision="ieee")
            tl.store(o_ptr + (token[:, None] * heads + head) * V + v[None, :], out.to(kind), mask=in_values)
            h = passed * h + tl.dot(tl.trans(left), u.to(kind), input_precision="ieee")
        tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)


def takes_64_tokens(v: torch.Tensor, keys: int, by_channel: bool) -> bool:
    """Whether long rows are for ``delta_long_rows``: in float32 a chunk of it has no room, in float16 products of keys that are
    not normalised may have no number, and its tiles are for heads of these sizes."""
    return v.dtype == torch.bfloat16 and not by_channel and 64 <= keys <= 128 and v.shape[2] > 32


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    beta_scale: float,
    scale: float,
    state: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
    inputs: torch.Tensor | None = None,
    stored_at: torch.Tensor | None = None,
    store_at: torch.Tensor | None = None,
) -> torch.Tensor:
    slots, heads, keys, values = state.shape
    by_channel = a.dim() == 3
    assert q.stride(2) == k.stride(2) == v.stride(2) == a.stride(-1) == b.stride(1) == 1
    by_64 = takes_64_tokens(v, keys, by_channel)
    o, width = opened_outputs(v, len(seq_lens), max_query_len, short, by_64 and max_query_len > short)
    assert inputs is None or inputs.is_contiguous(), "rings lie in memory of their own"
    tokens: tuple[Any, ...] = (q, k, v, a, a_log, dt_bias, b, state)
    rows_of_step: tuple[Any, ...] = (
        query_start, row_slots, seq_lens, o, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        a.stride(0), a.stride(1), b.stride(0), state.stride(0),
    )  # fmt: skip
    sizes = heads, heads // k.shape[1], slots, beta_scale, scale
    rows, block_k = len(seq_lens), max(16, next_power_of_2(keys))
    block_v = max(4 if inputs is None else 16, min(next_power_of_2(values), WALKED // block_k))
    ring = inputs, stored_at, store_at
    places = 0 if inputs is None else inputs.shape[1]
    delta_walk_kernel[(cdiv(values, block_v), heads, rows)](
        *tokens, *ring, *rows_of_step, places, *sizes, short, len(v), K=keys, V=values, BY_CHANNEL=by_channel, SMALL=EPS,
        BLOCK_K=block_k, BLOCK_V=block_v, L=TOKENS, WIDTH=width, num_warps=WALK_WARPS, **launch_early(v.device),
    )  # fmt: skip
    if max_query_len > short and by_64:
        rows_and_table = query_start, row_slots, seq_lens, packed, max_chunks, short
        delta_long_rows(q, k, v, a, a_log, dt_bias, b, beta_scale, scale, state, *rows_and_table, o)
    elif max_query_len > short:
        block_v = max(16, min(next_power_of_2(values), 8192 // block_k))
        delta_chunks_kernel[(rows, heads, cdiv(values, block_v))](
            *tokens, *rows_of_step, *sizes, short, K=keys, V=values, BY_CHANNEL=by_channel, SMALL=EPS,
            BLOCK_K=block_k, BLOCK_V=block_v, L=TOKENS, LEVELS=TOKENS.bit_length() - 1, num_warps=4,
        )  # fmt: skip
    return o

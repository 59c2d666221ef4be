"""``expert_mlp`` for few pairs of a token and an expert: products of one vector, bound by the bytes of the weights.

Two kernels. A program of the first multiplies a pair's token by some gates and the ups beside them, and leaves what is between
the products. One of the second multiplies what a token's experts left by the same rows of each, one expert after the other, and
adds them up in this order: sums never depend on which program is the first.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from headway.kernels.expert_mlp.triton_parts import (
    activated,
    as_words,
    first_of_word,
    load_scales,
    load_weight,
    unpacked,
)
from headway.kernels.triton_early import start_next, wait_for_inputs


@triton.jit
def times_vector(
    x_at, weight_ptr, scales_ptr, expert, n, keep, factor, WEIGH: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """f32 [BLOCK_N]: rows n of an expert's [N, K] times x [K]."""
    lane = tl.arange(0, BLOCK_K)
    row = expert.to(tl.int64) * N + n
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if FP4:
        words: tl.constexpr = K // 4
        weight_at, scales_at = as_words(weight_ptr) + row[:, None] * words, scales_ptr + row[:, None] * (K // 32)
        for start in tl.static_range(0, words, BLOCK_K):
            col = start + lane
            packed = load_weight(weight_at, col[None, :], keep[:, None], words, BLOCK_K)
            for nth in tl.static_range(4):
                x = tl.load(x_at + first_of_word(col) + 16 * nth, mask=col < words, other=0.0)
                if WEIGH:
                    x = (x.to(tl.float32) * factor).to(x.dtype)
                scales = load_scales(scales_at, start // 16, nth // 2, keep[:, None], K // 64, BLOCK_K // 16)
                weight = unpacked(packed, scales, nth, BLOCK_N, BLOCK_K).to(x.dtype)
                acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    else:
        weight_at = weight_ptr + row[:, None] * K
        for start in tl.static_range(0, K, BLOCK_K):
            col = start + lane
            weight = load_weight(weight_at, col[None, :], keep[:, None], K, BLOCK_K)
            x = tl.load(x_at + col, mask=col < K, other=0.0)
            if WEIGH:
                x = (x.to(tl.float32) * factor).to(x.dtype)
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(acc, axis=1)


@triton.jit
def few_in_kernel(
    x_ptr,  # [T, K]
    ids_ptr,  # [T * TOP_K]
    weights_ptr,  # f32 [T * TOP_K]
    weight_ptr,  # [E, N, K]
    scales_ptr,
    bias_ptr,  # [E, N] or null
    out_ptr,  # [T * TOP_K, INNER]
    x_stride,
    limit,
    alpha,
    E: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    WEIGH: tl.constexpr,
    FP4: tl.constexpr,
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = n < INNER
    N: tl.constexpr = 2 * INNER if GATED else INNER
    wait_for_inputs(EARLY)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= E):
        return
    x_at = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    factor = tl.load(weights_ptr + pair) if WEIGH else 1.0
    gate = times_vector(x_at, weight_ptr, scales_ptr, expert, n, keep, factor, WEIGH, N, K, BLOCK_N, BLOCK_K, FP4)
    up = gate
    if GATED:
        up = times_vector(
            x_at, weight_ptr, scales_ptr, expert, n + INNER, keep, factor, WEIGH, N, K, BLOCK_N, BLOCK_K, FP4
        )
    if bias_ptr is not None:
        bias_at = bias_ptr + expert.to(tl.int64) * N + n
        gate += tl.load(bias_at, mask=keep, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_at + INNER, mask=keep, other=0.0).to(tl.float32)
    y = activated(gate, up, limit, alpha, ACT, GATED)
    tl.store(out_ptr + pair.to(tl.int64) * INNER + n, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def few_out_kernel(
    inner_ptr,  # [T * TOP_K, K]
    ids_ptr,
    weights_ptr,
    weight_ptr,  # [E, N, K]
    scales_ptr,
    bias_ptr,  # [E, N] or null
    out_ptr,  # [T, N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGH: tl.constexpr,
    FP4: tl.constexpr,
    ADD: tl.constexpr,  # to what out_ptr holds
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = n < N
    total = tl.zeros([BLOCK_N], tl.float32)
    wait_for_inputs(EARLY)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids_ptr + pair)
        there = (expert >= 0) & (expert < E)
        own = keep & there
        expert = tl.where(there, expert, 0)
        # Rows of no expert are masked, and what was never written beside them must not count.
        y = times_vector(
            inner_ptr + pair.to(tl.int64) * K, weight_ptr, scales_ptr, expert, n, own, 1.0, False, N, K, BLOCK_N, BLOCK_K,
            FP4,
        )  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=own, other=0.0).to(tl.float32)
        if not WEIGH:
            y = y * tl.load(weights_ptr + pair)
        total += tl.where(there, y, 0.0)
    at = out_ptr + token.to(tl.int64) * N + n
    y = total.to(out_ptr.dtype.element_ty)
    if ADD:
        y = (y.to(tl.float32) + tl.load(at, mask=keep, other=0.0).to(tl.float32)).to(y.dtype)
    tl.store(at, y, mask=keep)

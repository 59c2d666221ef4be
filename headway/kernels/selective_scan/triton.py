"""Triton kernel of ``selective_scan``: a program for each row and block of channels, which keeps its states in
registers and walks the row's tokens, behind those that it runs again. Rows of one token are decode updates; they take the same
kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_idle, opened_outputs, row_of, softplus


@triton.jit
def selective_scan_kernel(
    x_ptr,  # [T, D]
    dt_ptr,  # [T, D]
    dt_bias_ptr,  # [D]
    a_ptr,  # f32 [D, N]
    b_ptr,  # [T, N]
    c_ptr,  # [T, N]
    d_ptr,  # [D]
    z_ptr,  # [T, D], or None
    state_ptr,  # [S, D, N]
    inputs_ptr,  # [S', places, 2 D + N], or None
    stored_at_ptr,
    store_at_ptr,
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    y_ptr,  # [T, D] contiguous
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    state_stride,
    places,
    channels,
    num_slots,
    num_tokens,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,  # see ``clear_idle``; 0: outputs are zeros
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_d, in_n = d < channels, n < N
    both = in_d[:, None] & in_n[None, :]
    a = tl.load(a_ptr + d[:, None] * N + n[None, :], mask=both, other=0.0)
    bias = tl.load(dt_bias_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    skip = tl.load(d_ptr + d, mask=in_d, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    first, count, slot, start, live = row_of(tl.program_id(0), query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    if WIDTH > 0:
        row, rows = tl.program_id(0), tl.num_programs(0)
        clear_idle(y_ptr + d, channels, in_d, row, first, count, live, query_start_ptr, rows, num_tokens, WIDTH)
    if live:
        at = state_ptr + slot * state_stride + d[:, None] * N + n[None, :]
        stored = start
        if inputs_ptr is not None:
            stored = tl.load(stored_at_ptr + tl.program_id(0))
            store = tl.load(store_at_ptr + tl.program_id(0))
            per_token = 2 * channels + N
            own = inputs_ptr + slot * places * per_token
        h = tl.load(at, mask=both & (stored > 0), other=0.0).to(tl.float32)
        if inputs_ptr is not None:
            for p in range(stored, start):
                given = own + (p % places) * per_token
                x = tl.load(given + d, mask=in_d, other=0.0).to(tl.float32)
                step = softplus(tl.load(given + channels + d, mask=in_d, other=0.0).to(tl.float32) + bias)
                b = tl.load(given + 2 * channels + n, mask=in_n, other=0.0).to(tl.float32)
                h = tl.exp(step[:, None] * a) * h + (step * x)[:, None] * b[None, :]
        for t in range(0, count):
            token = (first + t).to(tl.int64)
            x = tl.load(x_ptr + token * x_stride + d, mask=in_d, other=0.0).to(tl.float32)
            raw = tl.load(dt_ptr + token * dt_stride + d, mask=in_d, other=0.0).to(tl.float32)
            step = softplus(raw + bias)
            b = tl.load(b_ptr + token * b_stride + n, mask=in_n, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + token * c_stride + n, mask=in_n, other=0.0).to(tl.float32)
            if inputs_ptr is not None:
                given = own + ((start + t) % places) * per_token
                kept = in_d & (start + t >= store)
                kind = inputs_ptr.dtype.element_ty
                tl.store(given + d, x.to(kind), mask=kept)
                tl.store(given + channels + d, raw.to(kind), mask=kept)
                first_block = in_n & (start + t >= store) & (tl.program_id(1) == 0)
                tl.store(given + 2 * channels + n, b.to(kind), mask=first_block)
            h = tl.exp(step[:, None] * a) * h + (step * x)[:, None] * b[None, :]
            if inputs_ptr is not None:
                tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both & (start + t + 1 == store))
            y = tl.sum(h * c[None, :], 1) + skip * x
            if z_ptr is not None:
                z = tl.load(z_ptr + token * z_stride + d, mask=in_d, other=0.0).to(tl.float32)
                y = y * z / (1.0 + tl.exp(-z))
            tl.store(y_ptr + token * channels + d, y.to(y_ptr.dtype.element_ty), mask=in_d)
        if inputs_ptr is None:
            tl.store(at, h.to(state_ptr.dtype.element_ty), mask=both)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor | None,
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
    slots, channels, size = state.shape
    given = (x, dt, b, c) if z is None else (x, dt, b, c, z)
    assert all(each.stride(1) == 1 for each in given), "channels lie side by side"
    assert inputs is None or inputs.is_contiguous(), "rings lie in memory of their own"
    y, width = opened_outputs(x, len(seq_lens), max_query_len, short)
    block_n = next_power_of_2(size)
    block_d = max(8, min(64, 1024 // block_n, next_power_of_2(channels)))
    selective_scan_kernel[(len(seq_lens), cdiv(channels, block_d))](
        x, dt, dt_bias, a, b, c, d, z, state, inputs, stored_at, store_at, query_start, row_slots,
        seq_lens, y,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), 0 if z is None else z.stride(0), state.stride(0),
        0 if inputs is None else inputs.shape[1], channels, slots, len(x),
        N=size, BLOCK_N=block_n, BLOCK_D=block_d, WIDTH=width, num_warps=2, **launch_early(x.device),
    )  # fmt: skip
    return y

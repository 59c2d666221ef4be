"""Triton kernel of ``causal_conv``: a program for each short row, and for each chunk of the others, by blocks
of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.chunks import CHUNK, CHUNKS_AT
from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs
from headway.kernels.triton_rows import clear_chunk, clear_idle, clear_tokens, opened_outputs, row_of


@triton.jit
def taps_of(weight_ptr, bias_ptr, c, in_c, TAPS: tl.constexpr):
    """Of channels ``c`` the weights in f32, the token's own first, a tuple; and their biases."""
    taps = ()
    for back in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + c * TAPS + (TAPS - 1 - back), mask=in_c, other=0.0).to(tl.float32)
        taps = taps + (weight,)  # type: ignore[assignment]  # noqa: RUF005  Triton knows no unpacking
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)
    return taps, bias


@triton.jit
def causal_conv_kernel(
    x_ptr,  # [T, C]
    weight_ptr,  # [C, TAPS]
    bias_ptr,  # [C], or None
    ring_ptr,  # [S, LENGTH, C]
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    packed_ptr,
    y_ptr,  # [T, C] contiguous
    x_stride,
    ring_stride,
    channels,
    num_rows,
    num_slots,
    short,
    num_tokens,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    TABLE_AT: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,  # see ``clear_idle``
    CHUNKED: tl.constexpr,  # there are programs for chunks; if not, and WIDTH is 0, outputs are zeros
    EARLY: tl.constexpr,
):
    start_next(EARLY)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < channels
    taps, bias = taps_of(weight_ptr, bias_ptr, c, in_c, TAPS)
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    entry = program - num_rows
    listed = entry >= 0
    found = listed & (entry < tl.load(packed_ptr + TABLE_AT + 1, mask=listed, other=0))
    at = packed_ptr + tl.load(packed_ptr + TABLE_AT, mask=found, other=0) + 2 * entry
    row = tl.load(at, mask=found, other=0)
    chunk = tl.load(at + 1, mask=found, other=0)
    row = tl.where(listed, row, program)
    first, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    its_own = tl.where(listed, found & (count > short), count <= short)
    ring = ring_ptr + slot * ring_stride + c[None, :]
    if WIDTH > 0:  # there are no chunks then
        clear_idle(
            y_ptr + c, channels, in_c, row, first, count, live & its_own, query_start_ptr, num_rows, num_tokens, WIDTH
        )
    elif CHUNKED:
        idle = tl.where(
            its_own & (live == 0), tl.where(listed, tl.minimum(CHUNK_TOKENS, count - chunk * CHUNK_TOKENS), count), 0
        )
        if listed:
            behind = tl.load(query_start_ptr + num_rows) + entry * CHUNK_TOKENS
            apart = (tl.num_programs(0) - num_rows) * CHUNK_TOKENS
            begin = first + chunk * CHUNK_TOKENS
            clear_chunk(y_ptr + c, channels, in_c, begin, idle, behind, apart, num_tokens, CHUNK_TOKENS)
        else:
            clear_tokens(y_ptr + c, channels, in_c, first, idle)
    live = live & its_own
    if live:
        begin = chunk * CHUNK_TOKENS
        end = tl.minimum(begin + CHUNK_TOKENS, count)
        for t0 in range(begin, end, BLOCK_T):
            t = t0 + tl.arange(0, BLOCK_T)
            mask = (t < end)[:, None] & in_c[None, :]
            total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
            for back in tl.static_range(TAPS):
                source = t - back
                here = mask & (source >= 0)[:, None]
                value = tl.load(
                    x_ptr + (first + source).to(tl.int64)[:, None] * x_stride + c[None, :], mask=here, other=0.0
                )
                if back > 0:
                    if t0 < TAPS - 1:  # what was before the row's first tokens is in the window
                        position = start + source
                        before = mask & ((source < 0) & (position >= 0))[:, None]
                        place = (position + LENGTH) % LENGTH
                        value += tl.load(ring + place[:, None] * channels, mask=before, other=0.0)
                total += value.to(tl.float32) * taps[back][None, :]
            if bias_ptr is not None:
                total += bias[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            out = y_ptr + (first + t).to(tl.int64)[:, None] * channels + c[None, :]
            tl.store(out, total.to(y_ptr.dtype.element_ty), mask=mask)
        if chunk == 0:
            # The only program that reads what is overwritten here; all of it must have been read.
            tl.debug_barrier()
            m = tl.arange(0, BLOCK_M)
            source = count - 1 - m
            kept = ((m < LENGTH) & (source >= 0))[:, None] & in_c[None, :]
            value = tl.load(
                x_ptr + (first + source).to(tl.int64)[:, None] * x_stride + c[None, :], mask=kept, other=0.0
            )
            tl.store(ring + ((start + source + LENGTH) % LENGTH)[:, None] * channels, value, mask=kept)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ring: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    max_chunks: int,
    max_query_len: int,
    short: int,
    silu: bool,
) -> torch.Tensor:
    (slots, length, channels), taps, rows = ring.shape, weight.shape[1], len(seq_lens)
    assert x.stride(1) == ring.stride(2) == 1 and ring.stride(1) == channels and length >= taps, (
        "channels lie side by side; the ring holds the window"
    )
    y, width = opened_outputs(x, rows, max_query_len, short, max_chunks > 0)
    block_t = min(16, next_power_of_2(max_query_len))
    block_c = min(256 if block_t <= 4 else 128, max(16, next_power_of_2(channels)))
    causal_conv_kernel[(rows + max_chunks, cdiv(channels, block_c))](
        x, weight, bias, ring, query_start, row_slots, seq_lens, packed, y, x.stride(0), ring.stride(0), channels, rows, slots,
        short, len(x), LENGTH=length, TAPS=taps, SILU=silu, TABLE_AT=CHUNKS_AT, CHUNK_TOKENS=CHUNK,
        BLOCK_T=block_t, BLOCK_C=block_c, BLOCK_M=next_power_of_2(length), WIDTH=width, CHUNKED=max_chunks > 0, num_warps=4,
        **launch_early(x.device),
    )  # fmt: skip
    return y

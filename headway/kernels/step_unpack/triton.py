"""``step_unpack`` in Triton: one launch.

Prefill: programs (row, chunk of the row's tokens), then programs that clear the tokens after the last one.
Decode (max_query_len 1): one lane per row, many rows per program, since a program per token would be mostly launch
cost.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_early import launch_early, start_next, wait_for_inputs


@triton.jit
def _row_record(packed, packed_size, row, num_rows, num_slots, length, num_computed, alive, EARLY: tl.constexpr):
    """(real, slot or -1, query_len, first token, start, live) of one or many rows. Waits for the edits of this step."""
    at = tl.load(packed + 4).to(tl.int64) + 4 * row
    real = (row < num_rows) & (row < tl.load(packed + 2)) & (at >= 0) & (at + 3 < packed_size)
    slot = tl.load(packed + at, mask=real, other=-1)
    query_len = tl.load(packed + at + 1, mask=real, other=0)
    first = tl.load(packed + at + 2, mask=real, other=0)
    known = real & (slot >= 0) & (slot < num_slots)
    slot = tl.where(known, slot, -1)
    wait_for_inputs(EARLY)  # the packed step came before the kernel that applies its edits
    start = tl.load(num_computed + slot, mask=known, other=0)
    live = known & (tl.load(alive + slot, mask=known, other=0) != 0) & (query_len > 0)
    live = live & (start >= 0) & (start <= length - query_len)
    return real, slot, query_len, first, start, live


@triton.jit
def _write_tokens(
    token, mask, slot, position, live, history, block_tables, input_ids, positions, kv_slots,
    length, width, num_slots, kv_stride, known, drafts, num_drafts, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the tokens of lanes in ``mask``; lanes that are not ``live`` get (0, 0, -1). ``known``: of the lanes' slots."""
    live = live & mask
    slot = slot.to(tl.int64)
    column = position // BLOCK_SIZE
    token_id = tl.load(history + slot * length + position, mask=live, other=0)
    if drafts is not None:
        ahead = position - known
        drafted = live & (ahead >= 0)
        guess = tl.load(drafts + slot * num_drafts + ahead, mask=drafted & (ahead < num_drafts), other=0)
        token_id = tl.where(drafted, guess, token_id)
    tl.store(input_ids + token, token_id, mask=mask)
    tl.store(positions + token, tl.where(live, position, 0), mask=mask)
    for group in tl.static_range(GROUPS):
        table = block_tables + (group * num_slots + slot) * width
        block = tl.load(table + column, mask=live & (column < width), other=0)
        kv_slot = tl.where(block > 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(kv_slots + group * kv_stride + token, kv_slot, mask=mask)


@triton.jit
def _write_rows(
    row, mask, real, slot, query_len, first, start, live, total, query_start, seq_lens, row_slots, logit_indices,
    max_tokens, max_rows, outcomes, WIDTH: tl.constexpr,
):  # fmt: skip
    last = tl.minimum(tl.maximum(first + query_len - 1, 0), max_tokens - 1)
    tl.store(query_start + row, tl.where(real, first, total), mask=mask)
    tl.store(seq_lens + row, tl.where(live, start + query_len, 0), mask=mask)
    tl.store(row_slots + row, slot, mask=mask)
    if WIDTH == 1:
        tl.store(logit_indices + row, tl.where(real, last, 0), mask=mask)
    else:
        for nth in tl.static_range(WIDTH):
            source = tl.where(outcomes > 1, tl.minimum(tl.maximum(first + nth, 0), last), last)
            tl.store(logit_indices + nth * max_rows + row, tl.where(real, source, 0), mask=mask)


@triton.jit(do_not_specialize=["max_rows", "max_tokens"])
def step_unpack_decode_kernel(
    packed, history, num_computed, alive, block_tables, input_ids, positions, kv_slots, query_start, seq_lens,
    row_slots, logit_indices, packed_size, num_slots, length, width, kv_stride, max_rows, max_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.minimum(tl.maximum(tl.load(packed + 3), 0), max_tokens)
    real, slot, query_len, first, start, live = _row_record(
        packed, packed_size, lane, max_rows, num_slots, length, num_computed, alive, EARLY
    )
    _write_rows(
        lane, lane < max_rows, real, slot, query_len, first, start, live, total, query_start, seq_lens, row_slots,
        logit_indices, max_tokens, max_rows, 1, 1,
    )  # fmt: skip
    tl.store(query_start + lane, total, mask=lane == max_rows)
    mine = real & (query_len > 0) & (first >= 0) & (first < total)
    _write_tokens(
        first, mine, slot, start, live, history, block_tables, input_ids, positions, kv_slots, length, width, num_slots,
        kv_stride, 0, None, 0, BLOCK_SIZE, GROUPS,
    )  # fmt: skip
    _write_tokens(
        lane, (lane >= total) & (lane < max_tokens), slot, start, live & (lane < 0), history, block_tables, input_ids,
        positions, kv_slots, length, width, num_slots, kv_stride, 0, None, 0, BLOCK_SIZE, GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_rows", "max_tokens"])
def step_unpack_kernel(
    packed, history, num_computed, alive, block_tables, input_ids, positions, kv_slots, query_start, seq_lens,
    row_slots, logit_indices, packed_size, num_slots, length, width, kv_stride, max_rows, max_tokens, num_tokens, drafts,
    num_drafts, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    total = tl.minimum(tl.maximum(tl.load(packed + 3), 0), max_tokens)
    lane = tl.arange(0, BLOCK)
    if row < max_rows:
        real, slot, query_len, first, start, live = _row_record(
            packed, packed_size, row, max_rows, num_slots, length, num_computed, alive, False
        )
        known = 0
        outcomes = 1
        if drafts is not None:
            known = tl.load(num_tokens + slot, mask=slot >= 0, other=0)
            outcomes = tl.load(packed + tl.load(packed + 4).to(tl.int64) + 4 * row + 3, mask=real, other=1)
        if chunk == 0:
            _write_rows(
                row, row < max_rows, real, slot, query_len, first, start, live, total, query_start, seq_lens, row_slots,
                logit_indices, max_tokens, max_rows, outcomes, WIDTH,
            )  # fmt: skip
            if row == 0:
                tl.store(query_start + max_rows, total)
        offset = chunk * BLOCK + lane
        token = first + offset
        mine = real & (offset < query_len) & (token >= 0) & (token < total)
        _write_tokens(
            token, mine, slot, start + offset, live, history, block_tables, input_ids, positions, kv_slots, length,
            width, num_slots, kv_stride, known, drafts, num_drafts, BLOCK_SIZE, GROUPS,
        )  # fmt: skip
    else:
        token = ((row - max_rows) * tl.num_programs(1) + chunk) * BLOCK + lane
        tail = (token >= total) & (token < max_tokens)
        _write_tokens(
            token, tail, row, lane, tail & (lane < 0), history, block_tables, input_ids, positions, kv_slots, length,
            width, num_slots, kv_stride, 0, None, 0, BLOCK_SIZE, GROUPS,
        )  # fmt: skip


def step_unpack(
    packed: torch.Tensor,
    history: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    block_tables: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    row_slots: torch.Tensor,
    logit_indices: torch.Tensor,
    block_size: int,
    max_query_len: int,
    num_tokens: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
) -> None:
    num_slots, length = history.shape
    max_rows, max_tokens = seq_lens.numel(), input_ids.numel()
    groups, kv_stride = (1, 0) if kv_slots.dim() == 1 else (kv_slots.shape[0], kv_slots.stride(0))
    width = block_tables.numel() // (groups * num_slots)
    args = (
        packed, history, num_computed, alive, block_tables, input_ids, positions, kv_slots, query_start, seq_lens,
        row_slots, logit_indices, packed.numel(), num_slots, length, width, kv_stride, max_rows, max_tokens,
    )  # fmt: skip
    if max_query_len == 1 and drafts is None:
        block = 128
        grid = (triton.cdiv(max(max_rows + 1, max_tokens), block),)
        step_unpack_decode_kernel[grid](
            *args, BLOCK_SIZE=block_size, BLOCK=block, GROUPS=groups, num_warps=4, **launch_early(packed.device)
        )
        return
    block = 32 if max_query_len <= 32 else 512  # two variants to compile, not one per size
    chunks = triton.cdiv(max_query_len, block)
    tail_rows = triton.cdiv(max_tokens, chunks * block)
    num_drafts = None if drafts is None else drafts.numel() // num_slots
    step_unpack_kernel[(max_rows + tail_rows, chunks)](
        *args, num_tokens if drafts is not None else None, drafts, num_drafts, BLOCK_SIZE=block_size, BLOCK=block,
        GROUPS=groups, WIDTH=logit_indices.numel() // max_rows, num_warps=4,
    )  # fmt: skip

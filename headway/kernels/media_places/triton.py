"""Triton kernel of ``media_places``: a program per token, which looks for its row and for its run by halving."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.media import RUN_WORDS, RUNS_AT


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_slots", "most_runs"])
def places_kernel(
    positions_ptr,
    start_ptr,
    slots_ptr,
    table_ptr,
    rows_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    num_slots,
    most_runs,
    row_steps,
    run_steps,
    SEES: tl.constexpr,
    AT: tl.constexpr,  # RUNS_AT
    WORDS: tl.constexpr,  # RUN_WORDS
):
    token = tl.program_id(0)
    low, high = 0, num_rows  # the first row that ends behind the token
    for _ in range(row_steps):
        middle = (low + high) // 2
        end = tl.load(start_ptr + tl.minimum(middle, num_rows - 1) + 1)
        more = (low < high) & (end <= token)
        fewer = (low < high) & (end > token)
        low = tl.where(more, middle + 1, low)
        high = tl.where(fewer, middle, high)
    slot = tl.load(slots_ptr + tl.minimum(low, num_rows - 1))
    real = (low < num_rows) & (slot >= 0) & (slot < num_slots)
    own = table_ptr + tl.where(real, slot, 0).to(tl.int64) * (AT + WORDS * most_runs)
    position = tl.load(positions_ptr + token)
    count = tl.minimum(tl.maximum(tl.load(own), 0), most_runs)
    prompt = tl.load(own + 1)
    first, past = 0, count  # the first run that begins behind the position
    for _ in range(run_steps):
        middle = (first + past) // 2
        begins = tl.load(own + AT + WORDS * tl.minimum(middle, most_runs - 1))
        more = (first < past) & (begins <= position)
        fewer = (first < past) & (begins > position)
        first = tl.where(more, middle + 1, first)
        past = tl.where(fewer, middle, past)
    number = tl.maximum(first - 1, 0)
    run = own + AT + WORDS * number
    start, end, base = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    columns, behind, late = tl.load(run + 3), tl.load(run + 4), tl.load(run + 5)
    feature = tl.load(rows_ptr + tl.where(real, slot, 0).to(tl.int64) * most_runs + number)
    inside = (first > 0) & (position < end)
    place = tl.where(inside, position - start, 0)
    seen = tl.where(position < prompt, prompt, position + 1)
    if SEES:
        seen = tl.where(inside & (columns > 0), tl.maximum(seen, end), seen)
    columns = tl.maximum(columns, 1)
    plain = position + tl.where(first > 0, behind, 0)
    tl.store(out_ptr + token, tl.where(real & inside, feature + place, -1))
    tl.store(out_ptr + num_tokens + token, tl.where(real, seen, 0))
    tl.store(out_ptr + 2 * num_tokens + token, tl.where(real, tl.where(inside, base + late, plain), 0))
    tl.store(out_ptr + 3 * num_tokens + token, tl.where(real, tl.where(inside, base + place // columns, plain), 0))
    tl.store(out_ptr + 4 * num_tokens + token, tl.where(real, tl.where(inside, base + place % columns, plain), 0))


def media_places(
    positions: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    sees: bool,
) -> torch.Tensor:
    num_tokens, num_rows = positions.shape[0], row_slots.shape[0]
    num_slots, width = table.shape
    runs = (width - RUNS_AT) // RUN_WORDS
    assert table.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()
    out = torch.empty((5, num_tokens), dtype=torch.int32, device=positions.device)
    if num_tokens:
        places_kernel[(num_tokens,)](
            positions, query_start, row_slots, table, rows, out, num_tokens, num_rows, num_slots, runs,
            num_rows.bit_length() + 1, runs.bit_length() + 1, SEES=sees, AT=RUNS_AT, WORDS=RUN_WORDS, num_warps=1,
        )  # fmt: skip
    return out

"""Triton kernel of ``replay_rows``: a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.triton_rows import row_of


@triton.jit
def replay_rows_kernel(
    storage_ptr,  # int32 [S, E]
    packed_ptr,
    query_start_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    stored_at_ptr,
    store_at_ptr,
    storage_stride,
    packed_size,
    num_slots,
    places,
    width,
):
    row = tl.program_id(0)
    _, count, slot, start, live = row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots)
    record = tl.load(packed_ptr + 4).to(tl.int64) + 4 * row + 3
    known = (row < tl.load(packed_ptr + 2)) & (record >= 0) & (record < packed_size)
    outcomes = tl.load(packed_ptr + record, mask=known, other=0)
    continues = known & ((outcomes > 1) | (row < tl.load(packed_ptr + 6)))
    end = start + count
    at = storage_ptr + slot * storage_stride
    stored = tl.load(at, mask=live, other=0)
    stored = tl.maximum(tl.minimum(tl.maximum(stored, end - places), start), 0)
    store = tl.where(continues, tl.where(end + width - stored > places, start + 1, -1), end)
    tl.store(stored_at_ptr + row, tl.where(live, stored, 0))
    tl.store(store_at_ptr + row, tl.where(live, store, -1))
    tl.store(at, store, mask=live & (store >= 0))


def replay_rows(
    storage: torch.Tensor,
    packed: torch.Tensor,
    query_start: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    stored_at: torch.Tensor,
    store_at: torch.Tensor,
    places: int,
    width: int,
) -> None:
    assert storage.stride(1) == stored_at.stride(0) == store_at.stride(0) == 1
    replay_rows_kernel[(len(seq_lens),)](
        storage, packed, query_start, row_slots, seq_lens, stored_at, store_at, storage.stride(0), len(packed), len(storage),
        places, width, num_warps=1,
    )  # fmt: skip

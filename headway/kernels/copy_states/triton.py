"""Triton kernel of ``copy_states``: 16 bytes a thread, pairs by blocks of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv

BLOCK = 4096


@triton.jit
def copy_states_kernel(
    storage_ptr,  # int32 [S, E]
    packed_ptr,
    slots,
    size,
    HEADER_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    real = pair < tl.load(packed_ptr + HEADER_AT + 1)
    at = packed_ptr + tl.load(packed_ptr + HEADER_AT) + 2 * pair
    source = tl.load(at, mask=real, other=-1).to(tl.int64)
    destination = tl.load(at + 1, mask=real, other=-1).to(tl.int64)
    real = real & (source >= 0) & (source < slots) & (destination >= 0) & (destination < slots)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = real & (column < size)
    values = tl.load(storage_ptr + source * size + column, mask=mask, other=0)
    tl.store(storage_ptr + destination * size + column, values, mask=mask)


def copy_states(storage: torch.Tensor, packed: torch.Tensor, header_at: int, max_copies: int) -> None:
    slots, size = storage.shape
    assert storage.is_contiguous()
    if max_copies:
        copy_states_kernel[(max_copies, cdiv(size, BLOCK))](
            storage, packed, slots, size, HEADER_AT=header_at, BLOCK=BLOCK, num_warps=8
        )

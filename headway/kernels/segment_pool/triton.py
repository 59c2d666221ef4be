"""Triton kernel of ``segment_pool``: a program goes over one row's tokens for a block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.core.ints import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_tokens"])
def segment_pool_kernel(
    hidden_ptr,  # [T, C]
    start_ptr,  # [R + 1]
    lens_ptr,  # [R]
    skip_ptr,  # [R]
    out_ptr,  # f32 [R, C]
    num_tokens,
    row_stride,
    C: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    keep = column < C
    start = tl.load(start_ptr + row)
    end = tl.minimum(tl.load(start_ptr + row + 1), num_tokens)
    length = tl.load(lens_ptr + row)
    first = length - (end - start)
    begin = start + tl.maximum(tl.load(skip_ptr + row) - first, 0)
    begin = tl.where(length > 0, begin, end)
    nothing = float("-inf") if KIND == 1 else 0.0
    found = tl.full([BLOCK_T, BLOCK_C], nothing, tl.float32)
    for block in range(begin, end, BLOCK_T):
        token = block + tl.arange(0, BLOCK_T)
        inside = (token < end)[:, None] & keep[None, :]
        at = token.to(tl.int64)[:, None] * row_stride + column[None, :]
        x = tl.load(hidden_ptr + at, mask=inside, other=nothing).to(tl.float32)
        if KIND == 1:
            found = tl.maximum(found, x)
        elif KIND == 2:
            found += x * (first + token - start + 1).to(tl.float32)[:, None]
        else:
            found += x
    result = tl.max(found, axis=0) if KIND == 1 else tl.sum(found, axis=0)
    tl.store(out_ptr + row.to(tl.int64) * C + column, result, mask=keep)


def segment_pool(
    hidden: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, skip: torch.Tensor, kind: int
) -> torch.Tensor:
    assert hidden.stride(1) == 1, "rows must be contiguous"
    num_rows, columns = seq_lens.shape[0], hidden.shape[1]
    out = torch.empty((num_rows, columns), dtype=torch.float32, device=hidden.device)
    block = min(64, next_power_of_2(columns))
    segment_pool_kernel[(num_rows, cdiv(columns, block))](
        hidden, query_start, seq_lens, skip, out, hidden.shape[0], hidden.stride(0),
        C=columns, KIND=kind, BLOCK_T=32, BLOCK_C=block, num_warps=4,
    )  # fmt: skip
    return out

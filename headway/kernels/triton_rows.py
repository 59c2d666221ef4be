"""What the Triton kernels of recurrent operations share: which row a program has, and whether it may touch its state."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_of(row, query_start_ptr, row_slots_ptr, seq_lens_ptr, num_slots):
    """(first token, tokens, slot, position of the first token, whether the row is live) of a row; see ``state_rows``."""
    first = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - first
    slot = tl.load(row_slots_ptr + row).to(tl.int64)
    length = tl.load(seq_lens_ptr + row)
    start = length - count
    live = (slot >= 0) & (slot < num_slots) & (length > 0) & (count > 0) & (start >= 0)
    return first, count, slot, start, live


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow; x itself from 20 on, where the difference is below its rounding."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))

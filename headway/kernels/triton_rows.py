"""What the Triton kernels of recurrent operations share: which row a program has, and whether it may touch its state."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
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
def clear_idle(
    out_at, stride, mask, row, first, count, live, query_start_ptr, num_rows, num_tokens, WIDTH: tl.constexpr
):
    """Zeros for the tokens of a row that is not live, and for those behind all rows as many as a row may have; a step has no
    more than WIDTH tokens a row. ``out_at``: the outputs [N] of token 0 that the program has, one token's ``stride`` apart."""
    behind = tl.load(query_start_ptr + num_rows) + row * WIDTH
    tokens = tl.where(live, 0, count)
    if (tokens > 0) | (behind < num_tokens):
        for t in range(0, WIDTH):
            own, other = (first + t).to(tl.int64) * stride, (behind + t).to(tl.int64) * stride
            tl.store(out_at + own, 0.0, mask=mask & (t < tokens))
            tl.store(out_at + other, 0.0, mask=mask & (behind + t < num_tokens))


@triton.jit
def clear_tokens(out_at, stride, mask, first, tokens):
    """Zeros for so many tokens from ``first`` on; ``out_at``, ``stride`` and ``mask`` as in ``clear_idle``."""
    for t in range(0, tokens):
        tl.store(out_at + (first + t).to(tl.int64) * stride, 0.0, mask=mask)


@triton.jit
def clear_chunk(out_at, stride, mask, first, tokens, behind, apart, num_tokens, CHUNK: tl.constexpr):
    """Zeros for the tokens of a chunk that is of no live row, and for those behind all rows: CHUNK from ``behind`` on, and so
    on ``apart``, the tokens that the programs of all chunks take at once."""
    clear_tokens(out_at, stride, mask, first, tokens)
    for n in range(0, tl.cdiv(tl.maximum(num_tokens - behind, 0), apart)):
        begin = behind + n * apart
        clear_tokens(out_at, stride, mask, begin, tl.minimum(CHUNK, num_tokens - begin))


def opened_outputs(
    like: torch.Tensor, num_rows: int, longest: int, short: int, clears: bool = False
) -> tuple[torch.Tensor, int]:
    """(outputs of the shape [T, ...] and dtype of ``like``, the tokens a row for ``clear_idle`` or 0).

    In steps whose rows have up to ``longest`` tokens, drafts for one, and no more than ``short``, the kernel clears what is
    nobody's: filling the outputs first would be a launch more. In others, too, where it ``clears`` by ``clear_tokens`` and
    ``clear_chunk``; else the outputs are zeros.
    """
    width = longest if longest <= short and len(like) <= num_rows * longest else 0
    make = torch.empty if width or clears else torch.zeros
    return make(like.shape, dtype=like.dtype, device=like.device), width


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow; x itself from 20 on, where the difference is below its rounding."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))

"""``suffix_keep`` in Triton: a program for each row copies its answer, one behind them moves the cursor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _lengths(
    row_slots, seq_lens, scope, alive, prompt_len, num_tokens, rows, num_slots, length, size, ROWS: tl.constexpr
):
    """Tokens that each row of the step appends, its -1 included, int64 [ROWS]; and each row's slot and known tokens."""
    row = tl.arange(0, ROWS)
    slot = tl.load(row_slots + row, mask=row < rows, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    ends = inside & (tl.load(seq_lens + row, mask=inside, other=0) > 0)
    ends = ends & (tl.load(alive + slot, mask=ends, other=1) == 0) & (tl.load(scope + slot, mask=ends, other=0) == 2)
    end = tl.minimum(tl.load(num_tokens + slot, mask=ends, other=0), length)
    number = tl.minimum(end - tl.maximum(tl.load(prompt_len + slot, mask=ends, other=0), 0), size // 2 - 1)
    return tl.where(ends & (number > 0), number + 1, 0).to(tl.int64), slot, end


@triton.jit(do_not_specialize=["rows"])
def suffix_copy_kernel(
    store, cursor, row_slots, seq_lens, scope, alive, history, prompt_len, num_tokens, rows, num_slots, length, size,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    taken, slot, end = _lengths(
        row_slots, seq_lens, scope, alive, prompt_len, num_tokens, rows, num_slots, length, size, ROWS
    )
    row = tl.arange(0, ROWS)
    mine = row == tl.program_id(0)
    number = tl.sum(tl.where(mine, taken, 0), 0)
    if number > 0:
        first = tl.load(cursor) + tl.sum(tl.where(row < tl.program_id(0), taken, 0), 0)
        least = tl.load(cursor) + tl.sum(taken, 0) - size
        source = (
            history + tl.sum(tl.where(mine, slot, 0), 0) * length + tl.sum(tl.where(mine, end, 0), 0) - (number - 1)
        )
        for begin in range(0, number, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            token = tl.load(source + column, mask=column < number - 1, other=-1)
            when = first + column
            tl.store(store + when % size, token, mask=(column < number) & (when >= least))


@triton.jit(do_not_specialize=["rows"])
def suffix_count_kernel(
    cursor, row_slots, seq_lens, scope, alive, prompt_len, num_tokens, rows, num_slots, length, size, kept,
    ROWS: tl.constexpr,
):  # fmt: skip
    taken, _slot, _end = _lengths(
        row_slots, seq_lens, scope, alive, prompt_len, num_tokens, rows, num_slots, length, size, ROWS
    )
    ends = (taken > 0).to(tl.int64)
    written = tl.load(cursor)
    count = tl.load(cursor + 1)
    answer = count + tl.cumsum(ends, 0) - 1
    total = tl.sum(ends, 0)
    begins = written + tl.cumsum(taken, 0) - taken
    tl.store(cursor + 2 + answer % kept, begins, mask=(ends > 0) & (answer >= count + total - kept))
    tl.store(cursor, written + tl.sum(taken, 0))
    tl.store(cursor + 1, count + total)


def suffix_keep(
    store: torch.Tensor,
    cursor: torch.Tensor,
    row_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    scope: torch.Tensor,
    alive: torch.Tensor,
    history: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    (num_slots, length), rows = history.shape, row_slots.numel()
    size, padded = store.numel(), triton.next_power_of_2(max(rows, 1))
    if not rows:
        return
    suffix_copy_kernel[(rows,)](
        store, cursor, row_slots, seq_lens, scope, alive, history, prompt_len, num_tokens, rows, num_slots, length, size,
        ROWS=padded, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    suffix_count_kernel[(1,)](
        cursor, row_slots, seq_lens, scope, alive, prompt_len, num_tokens, rows, num_slots, length, size,
        cursor.numel() - 2, ROWS=padded, num_warps=4,
    )  # fmt: skip

"""``chain_unpack`` in Triton: a program for several rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32


@triton.jit(do_not_specialize=["link", "first"])
def chain_kernel(
    drafts, row_slots, token_ids, history, num_tokens, num_computed, alive, block_table, input_ids, positions, kv_slots,
    seq_lens, rows, num_slots, number, length, columns, block_size, link, first, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(row_slots + row, mask=inside, other=-1).to(tl.int64)
    real = inside & (slot >= 0) & (slot < num_slots)
    token = tl.load(token_ids + row, mask=real & (link > 0), other=0)
    tl.store(drafts + slot * number + link - 1, token, mask=real & (link > 0))
    known = tl.load(num_tokens + slot, mask=real, other=0)
    position = known + first + link
    goes_on = real & (tl.load(alive + slot, mask=real, other=0) != 0) & (position >= 0) & (link < number)
    goes_on = goes_on & (tl.load(num_computed + slot, mask=real, other=-1) == known - 1)
    column = position // block_size
    goes_on = goes_on & (column < columns)
    block = tl.load(block_table + slot * columns + column, mask=goes_on, other=0)
    goes_on = goes_on & (block > 0)
    last = tl.load(history + slot * length + tl.minimum(position, length - 1), mask=goes_on & (link == 0), other=0)
    tl.store(input_ids + row, tl.where(goes_on, tl.where(link > 0, token, last), 0), mask=inside)
    tl.store(positions + row, tl.where(goes_on, position, 0), mask=inside)
    tl.store(kv_slots + row, tl.where(goes_on, block * block_size + position % block_size, -1), mask=inside)
    tl.store(seq_lens + row, tl.where(goes_on, position + 1, 0), mask=inside)


def chain_unpack(
    drafts: torch.Tensor,
    row_slots: torch.Tensor,
    token_ids: torch.Tensor,
    history: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    alive: torch.Tensor,
    block_table: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    link: int,
    first: int,
) -> None:
    (num_slots, number), rows = drafts.shape, row_slots.numel()
    if not rows:
        return
    chain_kernel[(triton.cdiv(rows, ROWS),)](
        drafts, row_slots, token_ids, history, num_tokens, num_computed, alive, block_table, input_ids, positions,
        kv_slots, seq_lens, rows, num_slots, number, history.shape[1], block_table.shape[1], block_size, link, first,
        ROWS=ROWS, num_warps=1,
    )  # fmt: skip

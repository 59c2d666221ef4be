"""What ``chain_unpack`` means, in torch."""

from __future__ import annotations

import torch

from headway.kernels.masked_write import gather_rows, masked_write_


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
    (num_slots, number), columns = drafts.shape, block_table.shape[1]
    real = (row_slots >= 0) & (row_slots < num_slots)
    slot = torch.where(real, row_slots, 0).to(torch.int64)
    if link:
        masked_write_(drafts, slot * number + link - 1, token_ids, real)
    known = num_tokens.index_select(0, slot)
    position = known + (first + link)
    column = position // block_size
    block = gather_rows(block_table, slot, column)
    goes_on = real & (alive.index_select(0, slot) != 0) & (num_computed.index_select(0, slot) == known - 1)
    goes_on &= (position >= 0) & (column < columns) & (block > 0) & (link < number)
    token = token_ids if link else gather_rows(history, slot, position)
    input_ids.copy_(torch.where(goes_on, token, 0))
    positions.copy_(torch.where(goes_on, position, 0))
    kv_slots.copy_(torch.where(goes_on, block * block_size + position % block_size, -1))
    seq_lens.copy_(torch.where(goes_on, position + 1, 0))

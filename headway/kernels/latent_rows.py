"""What the references of latent attention share: which row a token belongs to, and the latents of a row. Reads no device
value on the host."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv


def rows_of(query_start: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [T] each: the row of every token, R for tokens of none, and how many tokens that row has (0 there)."""
    starts = query_start.long()
    tokens = torch.arange(num_tokens, device=starts.device)
    row = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    counts = torch.cat([starts[1:] - starts[:-1], starts.new_zeros(1)])
    return row, counts[row]


def checked_tables(
    latents: torch.Tensor, block_tables: torch.Tensor, row_slots: torch.Tensor, seq_lens: torch.Tensor, bound: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 [R, width] blocks of each row, int64 [R] its length): block 0 for ids outside the cache, length 0 for slots
    outside the tables. ``bound`` covers all lengths."""
    num_slots, table_width = block_tables.shape
    num_blocks, block_size = latents.shape[:2]
    width = min(table_width, cdiv(bound, block_size))
    known = (row_slots >= 0) & (row_slots < num_slots)
    lens = torch.where(known, seq_lens, 0).clamp(max=width * block_size).long()
    tables = block_tables[row_slots.long().clamp(0, num_slots - 1), :width].long()
    return torch.where((tables >= 0) & (tables < num_blocks), tables, 0), lens


def cached(latents: torch.Tensor, block: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """float32 [..., L + Dr] of places in the cache."""
    if latents.itemsize == 1:  # torch does not select among 8-bit floats on every device
        return latents.view(torch.uint8)[block, offset].view(latents.dtype).float()
    return latents[block, offset].float()

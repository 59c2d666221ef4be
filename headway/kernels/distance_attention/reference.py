"""The meaning of ``distance_attention``; shapes in the package docstring. Reads no device value on the host."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv


def distance_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_tokens, num_rows = q.shape[0], row_slots.shape[0]
    num_slots, width = block_tables.shape
    num_blocks, block_size = k_cache.shape[:2]
    width = min(width, cdiv(max_seq_len_bound, block_size))
    token = torch.arange(num_tokens, device=q.device, dtype=torch.int32)
    row = torch.searchsorted(query_start[1:].contiguous(), token, right=True)
    inside = row < num_rows
    row = row.clamp(max=num_rows - 1)
    slot = row_slots.index_select(0, row)
    length = torch.where(inside & (slot >= 0) & (slot < num_slots), seq_lens.index_select(0, row), 0)
    length = length.clamp(max=width * block_size)
    place = length - (query_start[1:].index_select(0, row) - token)  # of the token in its context
    tables = block_tables[slot.long().clamp(0, num_slots - 1), :width].long()
    tables = torch.where((tables >= 0) & (tables < num_blocks), tables, 0)
    keys, values = (cache[tables].flatten(1, 2).float() for cache in (k_cache, v_cache))  # [T, keys, H, D]
    key = torch.arange(keys.shape[1], device=q.device)
    seen = (key <= place[:, None]) & (key < length[:, None])
    values = torch.where(seen[..., None, None], values, 0.0)  # memory past the end may hold anything
    scores = torch.einsum("thd,tkhd->thk", q.float(), keys) * scale
    distance = (place[:, None] - key).clamp(0, bias.shape[1] - 1).long()
    scores = (scores + bias[:, distance].transpose(0, 1)).masked_fill(~seen[:, None], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1)[:, None, None], 0.0)
    return torch.einsum("thk,tkhd->thd", weights, values).to(q.dtype)

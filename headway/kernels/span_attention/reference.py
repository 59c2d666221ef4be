"""The meaning of ``span_attention``; shapes in the package docstring. Row by row; reads no device value on the host."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv


def span_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    max_query_len: int,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_tokens, group = q.shape[0], q.shape[1] // k_cache.shape[2]
    num_slots, table_width = block_tables.shape
    num_blocks, block_size = k_cache.shape[:2]
    used = min(table_width, cdiv(max_seq_len_bound, block_size))
    known = (row_slots >= 0) & (row_slots < num_slots)
    lens = torch.where(known, seq_lens, 0).clamp(max=used * block_size).long()
    tables = block_tables[row_slots.long().clamp(0, num_slots - 1), :used].long()
    tables = torch.where((tables >= 0) & (tables < num_blocks), tables, 0)
    key = torch.arange(used * block_size, device=q.device)
    index = torch.arange(max_query_len, device=q.device)
    out = q.new_zeros((num_tokens + 1, *q.shape[1:]))  # the last token collects what belongs nowhere
    for row in range(row_slots.shape[0]):
        first, past = query_start[row].long(), query_start[row + 1].long()
        token = first + index
        owned = (token < past) & (token >= 0) & (token < num_tokens)
        place = token.clamp(0, max(num_tokens - 1, 0))
        position = lens[row] - (past - first) + index
        end = torch.maximum(ends[place].long(), position + 1)
        seen = (key < end[:, None]) & (key < lens[row])  # [n, keys]
        if window > 0:
            seen &= key > position[:, None] - window
        k, v = (cache[tables[row]].flatten(0, 1).float() for cache in (k_cache, v_cache))
        v = torch.where((key < lens[row])[:, None, None], v, 0.0)  # memory past the end may hold anything
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,khd->hnk", q[place].float(), k) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        weights = torch.softmax(scores, dim=-1).masked_fill(~seen.any(-1)[:, None], 0.0)
        out[torch.where(owned, token, num_tokens)] = torch.einsum("hnk,khd->nhd", weights, v).to(q.dtype)
    return out[:num_tokens]

"""The meaning of ``mla_decode``; shapes in the package docstring. Reads no device value on the host.

Rows of one token are done together, others one by one; tokens with selected positions all at once.
"""

from __future__ import annotations

import torch

from headway.kernels.latent_rows import cached, checked_tables, rows_of


def mla_decode(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    latents: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    selected: torch.Tensor | None,
    scale: float,
    most_queries: int,
    max_query_len: int,
    max_seq_len_bound: int,
) -> torch.Tensor:
    num_tokens, heads, rank = q_latent.shape
    num_rows, block_size = row_slots.shape[0], latents.shape[1]
    rotated = latents.shape[2] - rank
    queries = torch.cat([q_latent.float(), q[..., q.shape[2] - rotated :].float()], dim=2)  # [T, H, L + Dr]
    tables, lens = checked_tables(latents, block_tables, row_slots, seq_lens, max_seq_len_bound)
    if selected is not None:
        row, _ = rows_of(query_start, num_tokens)
        row = row.clamp(max=num_rows - 1)
        places = selected.long().clamp(min=0)
        blocks = tables[row[:, None], (places // block_size).clamp(max=tables.shape[1] - 1)]
        seen = (selected >= 0) & (places < lens[row][:, None])
        result = _attend(queries[:, None], cached(latents, blocks, places % block_size), seen[:, None], scale, rank)
        return result[:, 0].transpose(0, 1).to(q.dtype).contiguous()

    starts, ends = query_start[:-1].long(), query_start[1:].long()
    out = queries.new_zeros((num_tokens + 1, heads, rank))  # the last token collects what belongs nowhere
    most = min(max_query_len, most_queries)
    groups = [(0, num_rows)] if most == 1 else [(row, row + 1) for row in range(num_rows)]
    index = torch.arange(most, device=q.device)
    offset = torch.arange(block_size, device=q.device)
    for low, high in groups:
        rows = slice(low, high)
        token = starts[rows, None] + index  # [r, most]
        owned = (token < ends[rows, None]) & ((ends - starts)[rows, None] <= most_queries)
        position = (lens - (ends - starts))[rows, None] + index
        keys = cached(latents, tables[rows][..., None], offset).flatten(1, 2)  # [r, keys, L + Dr]
        key_position = torch.arange(keys.shape[1], device=q.device)
        seen = (key_position <= position[..., None]) & (key_position < lens[rows, None, None])
        result = _attend(queries[token.clamp(0, max(num_tokens - 1, 0))], keys, seen, scale, rank)
        out[torch.where(owned, token, num_tokens)] = result
    return out[:num_tokens].transpose(0, 1).to(q.dtype).contiguous()


def _attend(q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float, rank: int) -> torch.Tensor:
    """q [r, n, H, L + Dr] over keys [r, k, L + Dr] where ``seen`` [r, n, k] -> [r, n, H, L]; zeros where nothing is seen."""
    keys = torch.where(seen.any(1)[..., None], keys, 0.0)  # what nobody sees may be anything
    scores = torch.einsum("rnhd,rkd->rnhk", q, keys) * scale
    weights = torch.softmax(scores.masked_fill(~seen[:, :, None], float("-inf")), dim=-1)
    weights = weights.masked_fill(~seen.any(-1)[:, :, None, None], 0.0)
    return torch.einsum("rnhk,rkd->rnhd", weights, keys[..., :rank])

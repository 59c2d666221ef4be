"""The meaning of ``mla_gather`` and ``mla_prefill``; shapes in the package docstring. Reads no device value on the host.

All queries meet all keys, masked: quadratic in the step, which is what a definition may be.
"""

from __future__ import annotations

import math

import torch

from headway.kernels.latent_rows import cached, checked_tables, rows_of


def contexts_of(
    query_start: torch.Tensor, seq_lens: torch.Tensor, most_queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R] each: where the contexts of long rows begin, one behind the other, and their lengths, 0 for other rows."""
    counts = (query_start[1:] - query_start[:-1]).long()
    lengths = torch.where(counts > most_queries, seq_lens.long() - counts, 0).clamp(min=0)
    return lengths.cumsum(0) - lengths, lengths


def mla_gather(
    latents: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    first: int,
    size: int,
    most_queries: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    block_size = latents.shape[1]
    tables, _ = checked_tables(latents, block_tables, row_slots, seq_lens, block_tables.shape[1] * block_size)
    begins, lengths = contexts_of(query_start, seq_lens, most_queries)
    place = first + torch.arange(size, device=latents.device)
    ends = begins + lengths
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
    position = place - begins[row]
    real = (position >= 0) & (position < lengths[row])
    position = torch.where(real, position, 0)
    block = tables[row, (position // block_size).clamp(max=tables.shape[1] - 1)]
    found = cached(latents, block, position % block_size)
    return torch.where(real[:, None], found, 0.0).to(dtype)


def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    key: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    first: int,
    most_queries: int,
    prefix_bound: int,
) -> None:
    num_tokens, num_rows = q.shape[0], len(seq_lens)
    nope = q.shape[2] - key.shape[1]
    row, count = rows_of(query_start, num_tokens)
    live = torch.cat([seq_lens.long(), seq_lens.new_zeros(1).long()])[row] > 0
    if first < 0:
        places = torch.arange(num_tokens, device=q.device)
        seen = (row[:, None] == row) & (places <= places[:, None])
    else:
        begins, lengths = contexts_of(query_start, seq_lens, most_queries)
        begins, lengths = (torch.cat([each, each.new_zeros(1)])[row][:, None] for each in (begins, lengths))
        places = first + torch.arange(kv.shape[0], device=q.device)
        seen = (places >= begins) & (places < begins + lengths)
    seen &= (live & (row < num_rows))[:, None]
    keys = torch.cat([kv[..., :nope], key[:, None].expand(-1, kv.shape[1], -1)], dim=2).float()
    scores = torch.einsum("thd,nhd->thn", q.float(), keys) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    total = torch.logsumexp(scores, dim=2)  # [T, H], natural; -inf where nothing is seen
    weights = torch.exp(scores - torch.where(total.isfinite(), total, 0.0)[..., None])
    result = torch.einsum("thn,nhd->thd", weights, kv[..., nope:].float())
    if first >= 0:
        assert sums is not None, "pieces are taken into what was seen so far"
        before = sums * math.log(2)
        both = torch.logaddexp(before, total)
        shares = [torch.exp(each - torch.where(both.isfinite(), both, 0.0))[..., None] for each in (before, total)]
        result, total = out.float() * shares[0] + result * shares[1], both
    # Long rows; with their own tokens also tokens of no row, which have no count.
    mine = (count > most_queries) | ((row == num_rows) & (first < 0))
    out.copy_(torch.where(mine[:, None, None], result.to(out.dtype), out))
    if sums is not None:
        sums.copy_(torch.where(mine[:, None], total / math.log(2), sums))

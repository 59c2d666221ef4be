"""The meaning of ``paged_attention``; shapes in the package docstring. Reads no device value on the host.

Decode rows are done together, other rows one by one: padded queries x padded keys stays small enough to be usable.
"""

from __future__ import annotations

import torch

from headway.core.ints import cdiv
from headway.kernels.paged_attention.rule import ScoreRule


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    arrivals: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    num_decode_rows: int,
    max_query_len: int,
    max_seq_len_bound: int,
    decode_rows: torch.Tensor | None = None,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    reads_this_step: bool = False,
    width: int = 1,
) -> torch.Tensor:
    num_tokens, num_rows = q.shape[0], row_slots.shape[0]
    num_slots, table_width = block_tables.shape
    num_blocks, block_size = k_cache.shape[:2]
    rule = ScoreRule(scale, window, soft_cap, chunk, sinks, slopes)
    used_width = min(table_width, cdiv(max_seq_len_bound, block_size))
    starts, ends = query_start[:-1].long(), query_start[1:].long()
    known = (row_slots >= 0) & (row_slots < num_slots)
    lens = torch.where(known, seq_lens, 0).clamp(max=used_width * block_size).long()
    tables = block_tables[row_slots.long().clamp(0, num_slots - 1), :used_width].long()  # [R, width]
    tables = torch.where((tables >= 0) & (tables < num_blocks), tables, 0)

    out = q.new_zeros((num_tokens + 1, *q.shape[1:]))  # the last token collects what belongs nowhere
    together = 0 if decode_rows is not None else num_decode_rows  # any row may be a prompt then
    groups = [(0, together, 1)] if together else []
    groups += [(row, row + 1, max_query_len) for row in range(together, num_rows)]
    for low, high, most in groups:
        rows = slice(low, high)
        index = torch.arange(most, device=q.device)
        token = starts[rows, None] + index  # [r, most]
        owned = (token < ends[rows, None]) & (token >= 0) & (token < num_tokens)
        position = (lens - (ends - starts))[rows, None] + index
        keys = k_cache[tables[rows]].flatten(1, 2)  # [r, keys, KH, D]
        values = v_cache[tables[rows]].flatten(1, 2)
        queries = q[token.clamp(0, max(num_tokens - 1, 0))]  # [r, most, H, D]
        result = _attend(queries, keys, values, position, lens[rows], rule)
        out[torch.where(owned, token, num_tokens)] = result
    return out[:num_tokens]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: torch.Tensor,
    lens: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """q [r, n, H, D] at ``position`` [r, n] over k, v [r, keys, KH, D] of length ``lens`` [r] -> [r, n, H, D]."""
    group = q.shape[2] // k.shape[2]
    key_position = torch.arange(k.shape[1], device=q.device)
    seen = (key_position <= position[..., None]) & (key_position < lens[:, None, None])  # [r, n, keys]
    if rule.window > 0:
        seen &= key_position > position[..., None] - rule.window
    if rule.chunk > 0:
        seen &= key_position >= (position // rule.chunk * rule.chunk)[..., None]
    k, v = k.float().repeat_interleave(group, dim=2), v.float().repeat_interleave(group, dim=2)
    v = torch.where((key_position < lens[:, None])[..., None, None], v, 0.0)  # memory past the end may hold anything
    logits = torch.einsum("rnhd,rkhd->rhnk", q.float(), k) * rule.scale
    if rule.soft_cap > 0:
        logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
    if rule.slopes is not None:
        logits = logits + rule.slopes[:, None, None] * (key_position - position[..., None])[:, None]
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks[:, None, None].expand(*logits.shape[:3], 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    weights = weights.masked_fill(~seen.any(-1)[:, None, :, None], 0.0)
    return torch.einsum("rhnk,rkhd->rnhd", weights, v).to(q.dtype)

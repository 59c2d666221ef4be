"""``dense_attention`` on a CPU: our kernel for short rows whose tokens all see each other, else torch's attention, once for
each run of rows of equal length, which needs no copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from headway.kernels.cpu import encoder_ops
from headway.kernels.dense_attention import reference


def available() -> bool:
    """Where nothing else is there, torch serves."""
    return True


def dense_attention(
    qkv: torch.Tensor,
    query_start: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    reach: int,
    soft_cap: float,
    max_query_len: int,
) -> torch.Tensor:
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    starts = query_start.tolist()  # host: a CPU operation
    out = torch.empty((qkv.shape[0], num_heads * size), dtype=qkv.dtype)
    most = 0  # tokens of rows that our kernel takes; what a row goes through depends on the row alone
    if bias is None and soft_cap == 0 and encoder_ops.serves(qkv, query_start, size):
        most = encoder_ops.MOST_KEYS if reach < 0 else min(encoder_ops.MOST_KEYS, reach + 1)
        encoder_ops.short_attention(out, qkv, query_start, num_heads, num_kv_heads, scale, most)
    for start, rows, length in runs(starts):
        if length <= most:
            continue
        end = start + rows * length
        if soft_cap > 0:
            ends = torch.arange(0, end - start + 1, length, dtype=torch.int32)
            numbers = (num_heads, num_kv_heads, scale, reach, soft_cap, length)
            out[start:end] = reference.dense_attention(qkv[start:end], ends, bias, *numbers)
            continue
        heads = qkv[start:end].view(rows, length, num_heads + 2 * num_kv_heads, size).transpose(1, 2)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        mask = _mask(length, bias, reach, qkv.dtype)
        grouped = num_heads != num_kv_heads
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out[start:end].view(rows, length, num_heads, size).copy_(found.transpose(1, 2))
    return out


def runs(starts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, rows, tokens of each) of neighbouring rows of equal length; rows without tokens are left out."""
    first = starts[0]
    length = rows = 0
    for start, end in pairwise(starts):
        if end - start == length:
            rows += 1
            continue
        if length:
            yield first, rows, length
        first, rows, length = start, 1, end - start
    if length:
        yield first, rows, length


def _mask(length: int, bias: torch.Tensor | None, reach: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to the scores of a row, [H or 1, length, length]; None: nothing."""
    if bias is None and not 0 <= reach < length - 1:
        return None
    place = torch.arange(length)
    apart = place[None, :] - place[:, None]
    added = torch.zeros(1, length, length) if bias is None else bias[:, apart + bias.shape[1] // 2]
    if reach >= 0:
        added = added.masked_fill(apart.abs() > reach, float("-inf"))
    return added.to(dtype)

"""When and how the overlapped prefill kernel is launched; elsewhere ``launch_prefill`` serves every shape and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.ints import cdiv
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention.tiles import num_sms

SIZES = (64, 128)
"""Head sizes whose tiles fill the shared memory's swizzled rows and leave the registers room."""
BLOCK_M = 128


@dataclass(frozen=True, slots=True)
class OverlapTile:
    """128 (queries x heads of one KV head) x ``block_n`` keys; ``most_tiles`` (1 or 2) tiles of queries to a program."""

    block_n: int
    most_tiles: int


def overlap_tile(
    heads: tuple[int, int], size: int, dtype: torch.dtype, tokens: int, num_rows: int, max_query_len: int, sms: int
) -> OverlapTile | None:
    """The tile for such rows, None where the general kernel is to be used.

    Args:
        heads: (query heads, KV heads).
        tokens, num_rows: of the rows that are not decode rows.
        max_query_len: most tokens of any row. Rows much shorter than that would leave most of the grid without work.
        sms: processors of the device. They hold one program each, so that small batches would leave some idle.
    """
    group = heads[0] // heads[1]
    if size not in SIZES or dtype not in (torch.bfloat16, torch.float16) or BLOCK_M % group:
        return None
    queries = BLOCK_M // group
    used = tokens // queries + num_rows
    programs = tokens * heads[0] // BLOCK_M
    if programs < sms or num_rows * cdiv(max_query_len, queries) > 2 * used:
        return None
    return OverlapTile(128, 2 if programs >= 4 * sms else 1)


def launch_overlapped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    first_row: int,
    max_query_len: int,
    tile: OverlapTile,
) -> None:
    """Rows from ``first_row`` on, and zeros for the tokens behind the last row. Neither window nor soft cap."""
    from headway.kernels.paged_attention.triton_prefill import overlapped_prefill_kernel

    block_tables, row_slots, query_start, seq_lens = tables
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_slots, table_width = block_tables.shape
    num_rows = row_slots.shape[0]
    queries = BLOCK_M // (heads // kv_heads)
    grid = (kv_heads, num_rows - first_row + 1, cdiv(cdiv(max_query_len, queries), tile.most_tiles))
    overlapped_prefill_kernel[grid](
        q, k_cache, v_cache, out, block_tables, row_slots, query_start, seq_lens,
        num_tokens, num_rows, first_row, num_slots, num_blocks, table_width, tile.most_tiles, scale,
        q.stride(0), k_cache.stride(0), k_cache.stride(2),
        OFFSET_STRIDE=k_cache.stride(1), H=heads, KH=kv_heads, D=size, BS=block_size,
        BLOCK_M=BLOCK_M, BLOCK_N=tile.block_n, num_warps=BLOCK_M // 16,
    )  # fmt: skip


def choose_overlap(
    q: torch.Tensor, k_cache: torch.Tensor, numbers: tuple[float, int, float], first_row: int, num_rows: int, most: int
) -> OverlapTile | None:
    """The tile for these tensors and (scale, window, soft cap); ``most`` is the op's max_query_len."""
    if numbers[1] > 0 or numbers[2] > 0 or num_rows <= first_row or not runs_gluon(q.device):
        return None
    heads = (q.shape[1], k_cache.shape[2])
    return overlap_tile(
        heads, q.shape[2], q.dtype, q.shape[0] - first_row, num_rows - first_row, most, num_sms(q.device)
    )

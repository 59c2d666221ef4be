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
MAX_REGISTERS = 168
"""A thread of three warpgroups; the kernel shares them out anew."""


@dataclass(frozen=True, slots=True)
class OverlapTile:
    """128 (queries x heads of one KV head) x ``block_n`` keys, ``stages`` tiles of keys and of values in shared memory.

    ``kept``: queries are kept in registers, where 64 keys leave room for them.
    """

    block_n: int
    stages: int
    kept: bool


SHORT, LONG = OverlapTile(64, 4, True), OverlapTile(128, 2, False)
LONG_ROWS = 4096
"""Tokens of the longest row from which on wide tiles win: less is done for each key, more lies past the diagonal."""


def overlap_tile(
    heads: tuple[int, int], size: int, dtype: torch.dtype, tokens: int, num_rows: int, max_query_len: int, sms: int
) -> OverlapTile | None:
    """The tile for such rows, None where the general kernel is to be used.

    Args:
        heads: (query heads, KV heads).
        tokens, num_rows: of the rows that are not decode rows.
        max_query_len: most tokens of any row. Rows much shorter than that would leave most of the grid without work.
        sms: processors of the device. They hold one program each; with less than a unit of work for each the general kernel,
            whose tiles are smaller, is ahead.
    """
    group = heads[0] // heads[1]
    if size not in SIZES or dtype not in (torch.bfloat16, torch.float16) or BLOCK_M // 2 % group:
        return None
    queries = BLOCK_M // group
    used = tokens // queries + num_rows
    units = tokens * heads[0] // BLOCK_M
    if units < sms or num_rows * cdiv(max_query_len, queries) > 2 * used:
        return None
    return LONG if max_query_len >= LONG_ROWS else SHORT


def launch_overlapped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    arrivals: torch.Tensor,
    scale: float,
    first_row: int,
    max_query_len: int,
    tile: OverlapTile,
) -> None:
    """Rows from ``first_row`` on, and zeros for the tokens behind the last row. Neither window nor soft cap."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from headway.kernels.paged_attention.triton_prefill import PADS, PANEL, overlapped_prefill_kernel

    block_tables, row_slots, query_start, seq_lens = tables
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_slots, table_width = block_tables.shape
    num_rows, group, panel = row_slots.shape[0], heads // kv_heads, PANEL.value
    block_rows, head_rows = k_cache.stride(0) // size, k_cache.stride(2) // size
    rows = (num_blocks - 1) * block_rows + (kv_heads - 1) * head_rows + block_size
    q_layout, layout = NVMMASharedLayout(128, 16, 3), NVMMASharedLayout(128, 16, 2)
    q_desc = TensorDescriptor(q, list(q.shape), list(q.stride()), [BLOCK_M // 2 // group, group, panel], q_layout)
    page = [min(block_size, tile.block_n), panel]
    k_desc, v_desc = (TensorDescriptor(cache, [rows, size], [size, 1], page, layout) for cache in (k_cache, v_cache))
    units = kv_heads * ((num_rows - first_row) * cdiv(max_query_len, BLOCK_M // group) + PADS.value)
    overlapped_prefill_kernel[(min(num_sms(q.device), units),)](
        q_desc, k_desc, v_desc, out, block_tables, row_slots, query_start, seq_lens, arrivals[first_row],
        num_tokens, num_rows, first_row, num_slots, num_blocks, table_width, units, scale, block_rows, head_rows,
        KH=kv_heads, D=size, BS=block_size, BLOCK_N=tile.block_n, STAGES=tile.stages, KEPT=tile.kept,
        num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def lies_flat(cache: torch.Tensor) -> bool:
    """Whether the places of a head in a block are neighbours, so that a copy can take them as rows of one matrix."""
    block, place, head, _ = cache.stride()
    size = cache.shape[3]
    return place == size and block % size == 0 and head % size == 0


def choose_overlap(
    q: torch.Tensor, k_cache: torch.Tensor, numbers: tuple[float, int, float], first_row: int, num_rows: int, most: int
) -> OverlapTile | None:
    """The tile for these tensors and (scale, window, soft cap); ``most`` is the op's max_query_len."""
    if numbers[1] > 0 or numbers[2] > 0 or num_rows <= first_row or not runs_gluon(q.device) or not lies_flat(k_cache):
        return None
    heads = (q.shape[1], k_cache.shape[2])
    return overlap_tile(
        heads, q.shape[2], q.dtype, q.shape[0] - first_row, num_rows - first_row, most, num_sms(q.device)
    )

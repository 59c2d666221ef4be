"""When and how the prefill kernels of specialised warps are launched; elsewhere ``launch_prefill`` serves all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import DecodeRows

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


SHORT, LONG, NARROW = OverlapTile(64, 4, True), OverlapTile(128, 2, False), OverlapTile(64, 3, True)
"""The last one for keys and values of 8 bits, which have as many tiles beside those of 16 bits that they become."""
SHORT_KEYS, SHORT_REGISTERS = 64, 128
"""Of ``launch_short``: keys of a tile and registers of a thread."""
PAIRED_STAGES, LONE_STAGES, NARROW_STAGES = 3, 4, 2
"""Its tiles in shared memory where two programs share a processor, and where few shall not: the device would put two of
them on one while another idles. The last one takes the first one's place where there are as many tiles of 8 bits, too."""
LONG_ROWS = 4096
"""Tokens of the longest row from which on wide tiles win: less is done for each key, more lies past the diagonal."""


def overlap_tile(
    heads: tuple[int, int], tokens: int, num_rows: int, max_query_len: int, sms: int, itemsize: int = 2
) -> OverlapTile | None:
    """The tile of the programs that stay, None where short tiles are to be used.

    Args:
        heads: (query heads, KV heads).
        tokens, num_rows: of the rows that are not decode rows.
        max_query_len: most tokens of any row. Rows much shorter than that would leave most of the grid without work.
        sms: processors of the device. They hold one program each; with less than two units of work for each short tiles are
            ahead, or as fast.
        itemsize: bytes of a cached number.
    """
    queries = BLOCK_M * heads[1] // heads[0]
    used = tokens // queries + num_rows
    units = tokens * heads[0] // BLOCK_M
    if num_rows == 0 or units < 2 * sms or num_rows * cdiv(max_query_len, queries) > 2 * used:
        return None
    if itemsize == 1:
        return NARROW
    return LONG if max_query_len >= LONG_ROWS else SHORT


def launch_overlapped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    arrivals: torch.Tensor,
    scale: float,
    first: DecodeRows,
    max_query_len: int,
    tile: OverlapTile,
) -> None:
    """Rows behind the ``first``, and zeros for the tokens behind the last row. Neither window nor soft cap."""
    from headway.kernels.paged_attention.hopper.triton_prefill import PADS, overlapped_prefill_kernel
    from headway.kernels.paged_attention.hopper.triton_prefill8 import narrow_prefill_kernel

    block_tables, row_slots, query_start, seq_lens = tables
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_slots, table_width = block_tables.shape
    num_rows, group = row_slots.shape[0], heads // kv_heads
    units = kv_heads * ((num_rows - first.bound) * cdiv(max_query_len, BLOCK_M // group) + PADS.value)
    kernel = narrow_prefill_kernel if k_cache.itemsize == 1 else overlapped_prefill_kernel
    kernel[(min(num_sms(q.device), units),)](
        *descriptors(q, k_cache, v_cache, tile.block_n), out, block_tables, row_slots, query_start, seq_lens,
        arrivals, first.pointer(query_start), num_tokens, num_rows, first.bound, num_slots, num_blocks, table_width, units,
        scale, *steps(k_cache), KH=kv_heads, D=size, BS=block_size, BLOCK_N=tile.block_n, STAGES=tile.stages,
        KEPT=tile.kept, COUNTED=first.count is not None, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def launch_short(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    first: DecodeRows,
    stages: int | None = None,
) -> None:
    """The same in tiles of 64 (queries x heads of a KV head), which need no bound on a row's queries."""
    from headway.kernels.paged_attention.hopper.triton_short import short_prefill_kernel
    from headway.kernels.paged_attention.hopper.triton_short8 import narrow_short_kernel
    from headway.kernels.triton_early import launch_early

    block_tables, row_slots, query_start, seq_lens = tables
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_slots, table_width = block_tables.shape
    num_rows, queries = row_slots.shape[0], BLOCK_M // 2 * kv_heads // heads
    tokens = first.other_tokens(q)
    tiles = tokens // queries + (num_rows - first.bound) + 1  # see find_tile
    narrow = k_cache.itemsize == 1
    stages = stages or short_stages(tokens * kv_heads // queries, num_sms(q.device), narrow)
    kernel = narrow_short_kernel if narrow else short_prefill_kernel
    kernel[(tiles * kv_heads,)](
        *descriptors(q, k_cache, v_cache, SHORT_KEYS), out, block_tables, row_slots, query_start, seq_lens,
        first.pointer(query_start), num_tokens, num_rows, first.bound, num_slots, num_blocks, table_width, scale,
        *steps(k_cache), KH=kv_heads, D=size, BS=block_size, BLOCK_N=SHORT_KEYS, STAGES=stages,
        COUNTED=first.count is not None,
        num_warps=4, maxnreg=SHORT_REGISTERS, **launch_early(q.device),
    )  # fmt: skip


def short_stages(tiles: int, sms: int, narrow: bool = False) -> int:
    """Tiles of keys that a program has room for, where there are so many tiles of queries; ``narrow``: the cache has 8 bits."""
    if tiles <= sms:
        return LONE_STAGES
    return NARROW_STAGES if narrow else PAIRED_STAGES


def descriptors(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_n: int) -> Sequence[Any]:
    """How tensor copies see queries, keys and values: 64 (queries x heads) and a page, each 64 columns at a time."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from headway.kernels.paged_attention.hopper.triton_prefill import PANEL

    num_blocks, block_size, kv_heads, size = k_cache.shape
    group, (block_rows, head_rows) = q.shape[1] // kv_heads, steps(k_cache)
    rows = (num_blocks - 1) * block_rows + (kv_heads - 1) * head_rows + block_size
    q_layout, bits = NVMMASharedLayout(128, 16, 3), 8 * k_cache.itemsize
    layout = NVMMASharedLayout(PANEL.value * bits // 8, bits, 2)
    q_block, page = [BLOCK_M // 2 // group, group, PANEL.value], [min(block_size, block_n), PANEL.value]
    caches = (TensorDescriptor(cache, [rows, size], [size, 1], page, layout) for cache in (k_cache, v_cache))
    return TensorDescriptor(q, list(q.shape), list(q.stride()), q_block, q_layout), *caches


def steps(cache: torch.Tensor) -> tuple[int, int]:
    """Rows of the flat cache from block to block and from head to head."""
    return cache.stride(0) // cache.shape[3], cache.stride(2) // cache.shape[3]


def lies_flat(cache: torch.Tensor) -> bool:
    """Whether the places of a head in a block are neighbours, so that a copy can take them as rows of one matrix."""
    block, place, head, _ = cache.stride()
    size = cache.shape[3]
    return place == size and block % size == 0 and head % size == 0


def fits(q: torch.Tensor, k_cache: torch.Tensor, rule: ScoreRule) -> bool:
    """Whether kernels of specialised warps can do it for these tensors. They know no rule beyond the scale."""
    _, heads, size = q.shape
    plain = rule.is_plain and size in SIZES
    plain = plain and q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype in (q.dtype, torch.float8_e4m3fn)
    return plain and BLOCK_M // 2 % (heads // k_cache.shape[2]) == 0 and runs_gluon(q.device) and lies_flat(k_cache)


def choose_overlap(
    q: torch.Tensor, k_cache: torch.Tensor, first: DecodeRows, num_rows: int, most: int
) -> OverlapTile | None:
    """The tile for such tensors, which fit; ``most`` is the op's max_query_len."""
    heads = (q.shape[1], k_cache.shape[2])
    tokens, sms = first.other_tokens(q), num_sms(q.device)
    return overlap_tile(heads, tokens, num_rows - first.bound, most, sms, k_cache.itemsize)

"""Launches the kernels of ``paged_attention``: grids and tiles from host numbers only."""

from __future__ import annotations

import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms, shared_limit
from headway.kernels.paged_attention.hopper.early_decode import launch_early_decode, serves
from headway.kernels.paged_attention.hopper.overlap import choose_overlap, fits, launch_overlapped, launch_short
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import (
    COUNTED_SPLITS,
    RESIDENTS,
    DecodeRows,
    DecodeTile,
    PrefillTile,
    choose_splits,
    decode_tile,
    holds_tile,
    prefill_tile,
)
from headway.kernels.paged_attention.triton import decode_kernel, prefill_kernel
from headway.kernels.triton_early import launch_early

MOST_TOKENS, MOST_QUERIES = 16, 16
"""Of a row that kernels of decode rows take, and its queries of a KV head. With twice as many, prompts' kernels are faster."""


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
    size = q.shape[2]
    assert q.stride()[1:] == (size, 1) and block_tables.is_contiguous(), "heads and tables must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1, "cache rows must be contiguous"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rule = ScoreRule(scale, window, soft_cap, chunk, sinks, slopes)
    if num_decode_rows:
        tables = (block_tables, row_slots, seq_lens)
        group = q.shape[1] // k_cache.shape[2]
        if k_cache.dtype != q.dtype and serves(size, group, q.dtype, k_cache.dtype, q.device, slopes is not None):
            # Triton would load 8-bit values byte by byte. Rows behind the counted ones are prompts, whose tokens are written
            # again below, or padding, which ends at once.
            rows = slice(min(num_decode_rows, q.shape[0]))
            launch_early_decode(
                q[rows].flatten(1), k_cache, v_cache, out[rows], arrivals, tables, rule, max_seq_len_bound, None
            )
        else:
            launch_decode(
                q, k_cache, v_cache, out, arrivals, tables, rule, num_decode_rows, max_seq_len_bound,
                decode_rows=decode_rows, stored=not reads_this_step,
            )  # fmt: skip
    elif takes_few(q, k_cache, row_slots.shape[0], width, rule):
        tables, drafted = (block_tables, row_slots, seq_lens), (query_start, width)
        launch_few(q, k_cache, v_cache, out, arrivals, tables, rule, max_seq_len_bound, drafted)
        return out
    first = DecodeRows(num_decode_rows, decode_rows)
    if first.other_tokens(q):
        spans = (block_tables, row_slots, query_start, seq_lens)
        if not fits(q, k_cache, rule):
            launch_prefill(q, k_cache, v_cache, out, spans, rule, first)
            return out
        tile = choose_overlap(q, k_cache, first, row_slots.shape[0], max_query_len)
        if tile is None:
            launch_short(q, k_cache, v_cache, out, spans, scale, first)
        else:
            launch_overlapped(q, k_cache, v_cache, out, spans, arrivals, scale, first, max_query_len, tile)
    return out


def takes_few(q: torch.Tensor, k_cache: torch.Tensor, num_rows: int, width: int, rule: ScoreRule) -> bool:
    """Whether rows of up to ``width`` tokens, drafts among them, go to the kernels of decode rows, which split a row's keys.

    A tile of queries takes all those of a row and KV head there. The kernels of prompts that copy tiles ahead are as fast
    where rows fill the device.
    """
    tokens, heads, size = q.shape
    kv_heads, group = k_cache.shape[2], heads // k_cache.shape[2]
    if not 1 < width <= MOST_TOKENS:
        return False
    assert tokens <= num_rows * width, "no row has more tokens"
    if serves(size, group, q.dtype, k_cache.dtype, q.device, rule.slopes is not None, width):
        return True
    fills = num_rows * kv_heads > num_sms(q.device)
    return width * group <= MOST_QUERIES and not (fills and fits(q, k_cache, rule))


def launch_few(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rule: ScoreRule,
    max_seq_len_bound: int,
    spans: tuple[torch.Tensor, int],
) -> None:
    """All rows, of up to W tokens each; ``spans``: (query_start, W). Zeros for the tokens behind the last row."""
    size, group = q.shape[2], q.shape[1] // k_cache.shape[2]
    if serves(size, group, q.dtype, k_cache.dtype, q.device, rule.slopes is not None, spans[1]):
        launch_early_decode(q.flatten(1), k_cache, v_cache, out, arrivals, tables, rule, max_seq_len_bound, None, spans)
    else:
        launch_decode(
            q,
            k_cache,
            v_cache,
            out,
            arrivals,
            tables,
            rule,
            len(tables[1]),
            max_seq_len_bound,
            stored=False,
            spans=spans,
        )


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rule: ScoreRule,
    num_rows: int,
    max_seq_len_bound: int,
    tile: DecodeTile | None = None,
    decode_rows: torch.Tensor | None = None,
    stored: bool = True,
    spans: tuple[torch.Tensor, int] | None = None,
) -> None:
    """Rows [0, num_rows), or those of them that are among the first ``decode_rows``; one kernel. ``stored``: earlier steps made
    all keys but the newest. ``spans``: (query_start, W), all rows, of up to W tokens each; None: each token is a row."""
    block_tables, row_slots, seq_lens = tables
    query_start, width = spans or (seq_lens, 1)
    num_rows = min(num_rows, q.shape[0])
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    tile = tile or decode_tile(size, width * group, q.dtype)
    bound = rule.most_keys(max_seq_len_bound, tile.block_n + width - 1)
    programs, sms = num_rows * kv_heads, num_sms(q.device)
    num_splits, min_tiles = choose_splits(programs, bound, tile.block_n, sms)
    if decode_rows is not None:  # so few, perhaps, that splits have to fill the device
        num_splits = max(num_splits, min(COUNTED_SPLITS, cdiv(bound, tile.block_n)))
    hold = stored and decode_rows is None and holds_tile(programs, sms)  # what a counted row holds was not measured
    partial = top = arrivals.view(torch.float32)  # read by nobody; of the parts' type, so that one kernel serves
    if num_splits > 1:
        partial = torch.empty((num_tokens, heads, num_splits, size), dtype=torch.float32, device=q.device)
        top = torch.empty((num_tokens, heads, num_splits), dtype=torch.float32, device=q.device)
    num_slots, table_width = block_tables.shape
    decode_kernel[(kv_heads, num_rows, num_splits)](
        q, k_cache, v_cache, out, partial, top, arrivals, block_tables, row_slots, seq_lens,
        seq_lens if decode_rows is None else decode_rows, query_start,
        num_rows, num_tokens, num_slots, num_blocks, table_width, num_splits, min_tiles, int(RESIDENTS * sms),
        *rule_arguments(rule, seq_lens),
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        H=heads, GROUP=group, D=size, BS=block_size, WIDTH=width,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d, MEMBERS=next_power_of_2(width * group),
        **rule_kinds(rule), PRECISION=tile.precision, HOLD=hold, COUNTED=decode_rows is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_early(q.device),
    )  # fmt: skip


def launch_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rule: ScoreRule,
    first: DecodeRows,
    tile: PrefillTile | None = None,
) -> None:
    """Rows behind the ``first``, and zeros for the tokens behind the last row."""
    block_tables, row_slots, query_start, seq_lens = tables
    num_tokens, heads, size = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    num_rows = row_slots.shape[0]
    tokens = first.other_tokens(q)
    tile = tile or prefill_tile(
        size, heads, kv_heads, q.dtype, tokens, num_sms(q.device), k_cache.itemsize, shared_limit(q.device)
    )
    num_tiles = tokens // (tile.block_m // (heads // kv_heads)) + (num_rows - first.bound) + 1  # see find_row
    num_slots, table_width = block_tables.shape
    prefill_kernel[(num_tiles * kv_heads,)](
        q, k_cache, v_cache, out, block_tables, row_slots, query_start, seq_lens, first.pointer(query_start),
        num_tokens, num_rows, first.bound, num_slots, num_blocks, table_width, *rule_arguments(rule, seq_lens),
        q.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        H=heads, KH=kv_heads, D=size, BS=block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=tile.block_d,
        **rule_kinds(rule), PRECISION=tile.precision, COUNTED=first.count is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def rule_arguments(rule: ScoreRule, unused: torch.Tensor) -> tuple[float, int, float, torch.Tensor, torch.Tensor]:
    """What kernels take of a rule; ``unused`` in place of tensors that they do not read."""
    by_head = (unused if each is None else each for each in (rule.sinks, rule.slopes))
    sinks, slopes = by_head
    return rule.scale, rule.reach[1], rule.soft_cap, sinks, slopes


def rule_kinds(rule: ScoreRule) -> dict[str, int]:
    """What kernels are compiled for."""
    return {
        "REACH": rule.reach[0],
        "CAPPED": rule.soft_cap > 0,
        "SINKS": rule.sinks is not None,
        "BIASED": rule.slopes is not None,
    }

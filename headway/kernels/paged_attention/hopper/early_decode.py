"""When and how the decode kernel for Hopper is launched; elsewhere ``launch_decode`` serves every shape and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention.hopper.decode_tiles import WARP_KEYS, EarlyTile, Heads, early_tile
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import choose_splits
from headway.kernels.triton_early import launch_early

SIZES = (64, 128, 256)
"""Head sizes whose tiles fill the shared memory's swizzled rows and fit into registers."""
MOST_QUERIES = 8
MOST_SHARES = 2
"""Programs that read the same keys for the tokens of one row; with more the kernels with larger products are ahead."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What makes queries, keys and values of the projections; shapes as in ``rope_kv_write``.

    ``shares``: projections are queries alone, [T, H * D]; another layer has written the tokens' keys and values, at
    ``kv_slots``.
    """

    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    kv_slots: torch.Tensor
    shares: bool = False


TURNED_TILE = EarlyTile(2, 3)
"""Of rows whose queries are turned. One for any number of rows, so that a start compiles it whatever steps it rehearses."""


def serves(
    size: int,
    group: int,
    dtype: torch.dtype,
    cached: torch.dtype,
    device: torch.device,
    biased: bool = False,
    width: int = 1,
) -> bool:
    """Whether the kernel can run heads of ``size`` that ``group`` queries share, of rows of up to ``width`` tokens, with a
    cache of dtype ``cached``; it knows no slopes, which ``biased`` ones have."""
    known = dtype in (torch.bfloat16, torch.float16) and cached in (dtype, torch.float8_e4m3fn) and not biased
    few = group <= MOST_QUERIES and width <= MOST_QUERIES and shares_of(width, group) <= MOST_SHARES
    return size in SIZES and few and known and runs_gluon(device)


def turned_tile(heads: Heads) -> EarlyTile:
    """``TURNED_TILE``; heads of 256 numbers of two bytes fill twice as much, so two tiles stay and two programs a processor."""
    return replace(TURNED_TILE, stages=2, residents=2.0) if heads.size * heads.itemsize > 256 else TURNED_TILE


def shares_of(width: int, group: int) -> int:
    """Programs that a row of ``width`` tokens has for each KV head and split: of whole tokens, up to eight queries."""
    return cdiv(width, min(width, MOST_QUERIES // group))


def launch_early_decode(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    arrivals: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rule: ScoreRule,
    max_seq_len_bound: int,
    turn: Turn | None,
    spans: tuple[torch.Tensor, int] | None = None,
) -> None:
    """All rows of qkv [T, (H + 2 KH) * D], or what ``turn`` says; other arguments as of ``launch_decode``.

    Without a ``turn`` the first H heads of a token are queries that are normed and rotated, and all keys and values are cached.
    ``spans``: (query_start, W), rows have up to W tokens each, and there are no more than W tokens a row, padding included;
    ``arrivals`` has a number for each KV head and token then. None: each token is a row.
    """
    from headway.kernels.paged_attention.hopper.triton_decode import early_decode_kernel

    block_tables, row_slots, seq_lens = tables
    num_tokens, heads, size = out.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    sms = num_sms(qkv.device)
    query_start, width = spans or (seq_lens, 1)
    num_rows = len(seq_lens) if spans else num_tokens
    members = kv_heads * shares_of(width, heads // kv_heads)
    assert num_tokens <= num_rows * width and (spans is None or arrivals.numel() >= num_rows * members), "see above"
    heads_of_program = Heads(size, heads // kv_heads, k_cache.itemsize, width)
    tile = turned_tile(heads_of_program)
    if turn is not None or spans is not None:
        tile = early_tile(num_rows * members, heads_of_program, sms)
    bound = rule.most_keys(max_seq_len_bound, tile.block_n + width - 1)
    num_splits, min_tiles = choose_splits(num_rows * members, bound, tile.block_n, sms, tile.residents)
    partial = stats = arrivals.view(torch.float32)  # as in ``launch_decode``
    if num_splits > 1:
        partial = torch.empty((num_tokens, heads, num_splits, size), dtype=torch.float32, device=qkv.device)
        stats = torch.empty((num_tokens, heads, num_splits, 2), dtype=torch.float32, device=qkv.device)
    clusters = cdiv(num_splits, tile.cluster) * tile.cluster
    grid = (members, num_rows, num_splits) if tile.cluster == 1 else (clusters, members, num_rows)
    used = turn or Turn(seq_lens, out, None, None, 0.0, seq_lens)  # a kernel of turned rows reads none of it
    early_decode_kernel[grid](
        qkv, k_cache, v_cache, out, partial, stats, arrivals, block_tables, row_slots, seq_lens, query_start,
        used.positions, used.cos_sin,
        used.cos_sin if used.q_norm is None else used.q_norm, used.cos_sin if used.k_norm is None else used.k_norm,
        used.kv_slots, num_rows, num_tokens, block_tables.shape[0], num_blocks, used.cos_sin.shape[0], block_tables.shape[1],
        num_splits, min_tiles, rule.scale, rule.reach[1], rule.soft_cap, used.eps,
        seq_lens if rule.sinks is None else rule.sinks,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(2),
        OFFSET_STRIDE=k_cache.stride(1), H=heads, GROUP=heads // kv_heads, D=size, BS=block_size,
        STAGES=tile.stages, KEYS=WARP_KEYS, CLUSTER=tile.cluster, WIDTH=width, TURNED=turn is None,
        STORED=used.shares, REACH=rule.reach[0], CAPPED=rule.soft_cap > 0, SINKS=rule.sinks is not None,
        Q_NORM=used.q_norm is not None, K_NORM=used.k_norm is not None and not used.shares,
        num_warps=tile.num_warps, maxnreg=tile.registers, **launch_early(qkv.device),
    )  # fmt: skip

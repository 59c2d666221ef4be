"""When and how the decode kernel for Hopper is launched; elsewhere ``launch_decode`` serves every shape and device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.core.ints import cdiv
from headway.kernels.capability import num_sms
from headway.kernels.hopper import runs_gluon
from headway.kernels.paged_attention.rule import ScoreRule
from headway.kernels.paged_attention.tiles import choose_splits
from headway.kernels.triton_early import launch_early

SIZES = (64, 128, 256)
"""Head sizes whose tiles fill the shared memory's swizzled rows and fit into registers."""
MOST_QUERIES = 8
MOST_SHARES = 2
"""Programs that read the same keys for the tokens of one row; with more the kernels with larger products are ahead."""
WARP_KEYS = 16
"""A warp's keys of a tile."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What makes queries, keys and values of the projections; shapes as in ``rope_kv_write``."""

    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    kv_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class EarlyTile:
    """``num_warps`` times ``WARP_KEYS`` keys a tile, ``stages`` tiles in shared memory.

    ``residents``: programs a processor, for which rows are split while there are fewer. ``cluster``: splits of a row that meet
    in shared memory; 1: in the L2 cache. ``registers``: of a thread at most; None: as many as the compiler wants.
    """

    num_warps: int
    stages: int
    residents: float = 3.0
    cluster: int = 1
    registers: int | None = None

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return WARP_KEYS * self.num_warps


TURNED_TILE = EarlyTile(2, 3)
"""Of rows whose queries are turned. One for any number of rows, so that a start compiles it whatever steps it rehearses."""


def early_tile(programs: int, group: int, sms: int, itemsize: int) -> EarlyTile:
    """The tile for rows x KV heads = ``programs`` of ``group`` queries a KV head, on ``sms`` processors.

    ``itemsize``: bytes of a cached number. With one, registers limit how many programs share a processor: 128 rows of 8 heads
    run all at once with two tiles (57.1 us a layer of Qwen3-0.6B), and do not with three (62.3).

    What made whole layers fastest on one H200 (132 processors), at 1 to 256 rows: of Qwen3-0.6B with 2 queries a KV head, and
    of Llama-3.1-8B with 4, whose large linear layers want the processors early and lose by clusters at one row. There half
    as many programs were 0.4 us faster at 448 tokens, and 1.2 slower at 4000 (two rows: 3.2). One stage is for about 256 rows
    of Qwen3 alone, in 16 bits: 1.6 us a layer there, but 1 to 2 slower at 192 and 224.
    """
    if 8 * programs <= sms:
        return EarlyTile(4, 1, 1.94, 8) if group <= 2 else EarlyTile(4, 1)
    if 4 * programs <= sms:
        return EarlyTile(4, 1)
    if 2 * programs <= sms:
        return EarlyTile(4, 2, 1.94, 4, 128) if group <= 2 else EarlyTile(4, 4, 0.97, 2)
    if programs <= sms:
        return EarlyTile(4, 3, 1.5, 2) if group <= 2 else EarlyTile(4, 2, 1.5)
    if programs <= 2 * sms:
        return EarlyTile(2, 3, 3.0, 2) if group <= 2 else EarlyTile(4, 2, 1.5)
    if programs <= (5 if itemsize == 1 else 10) * sms:
        return EarlyTile(2, 3)
    one_stage = group <= 2 and itemsize > 1 and 14 * sms < programs <= 16 * sms
    return EarlyTile(2, 1) if one_stage else EarlyTile(2, 2)


def fitted(tile: EarlyTile, size: int, itemsize: int) -> EarlyTile:
    """``tile`` for heads of ``size`` numbers of ``itemsize`` bytes: it was chosen for those of 128.

    A head of 256 fills twice the shared memory, so half the stages stay; its sums take nearly all registers of a thread (245 of
    255 with bfloat16; with drafts all, and 8 bytes are spilled), which leaves no limit below that and two programs a processor.
    """
    if size <= 128:
        return tile
    stages = tile.stages if itemsize == 1 else cdiv(tile.stages, 2)
    return replace(tile, stages=stages, residents=min(tile.residents, 2.0), registers=None)


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
    """All rows of qkv [T, (H + 2 KH) * D]; other arguments as of ``launch_decode``.

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
    tile = TURNED_TILE
    if turn is not None or spans is not None:
        tile = early_tile(num_rows * members, heads // kv_heads, sms, k_cache.itemsize)
    tile = fitted(tile, size, k_cache.itemsize)
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
        REACH=rule.reach[0], CAPPED=rule.soft_cap > 0, SINKS=rule.sinks is not None,
        Q_NORM=used.q_norm is not None, K_NORM=used.k_norm is not None,
        num_warps=tile.num_warps, maxnreg=tile.registers, **launch_early(qkv.device),
    )  # fmt: skip

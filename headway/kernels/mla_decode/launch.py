"""Launches the kernels of ``mla_decode``: grids, tiles and splits from host numbers only."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import num_sms, shared_limit
from headway.kernels.hopper import runs_gluon
from headway.kernels.mla_decode.triton import mla_decode_kernel, mla_merge_kernel
from headway.kernels.triton_early import launch_early

MOST_MEMBERS, BLACKWELL_MEMBERS = 64, 32
"""Heads times queries of a program: their sums of 512 elements then take half of its registers. On data-centre Blackwell
products of 64 rows run on its fifth generation of tensor cores, for which Triton keeps more copies of the factors than there
is room for."""
PROGRAMS = 4
"""A processor's, so that the last ones to end leave little of the card idle."""
SPLIT_TOKENS = 512
"""Least of a split where rows alone fill the device: writing and reading its part takes an eighth of reading its latents."""
FEW_SPLIT_TOKENS = 128
"""Where they do not."""


class Tile(NamedTuple):
    """Sizes of a program: queries, heads, members (their product, 16 at least), keys, warps, stages."""

    block_q: int
    block_h: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def most_members(device: torch.device) -> int:
    """Heads times queries of a program on ``device``."""
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    return BLACKWELL_MEMBERS if blackwell else MOST_MEMBERS


def choose_tile(heads: int, max_queries: int, row_bytes: int, itemsize: int, limit: int, members: int) -> Tile:
    """The tile of a program.

    Args:
        max_queries: >= tokens of the rows it is for.
        row_bytes: of a latent and its rotated key as factors of products, rounded up to powers of two.
        itemsize: of those factors.
        limit: bytes of shared memory.
        members: heads times queries at most.
    """
    block_h = min(next_power_of_2(heads), members)
    block_q = max(1, min(next_power_of_2(max_queries), members // block_h))
    block_m = max(16, block_q * block_h)
    own = block_m * row_bytes  # the queries, as factors
    for block_n, stages in ((64, 2), (32, 3), (32, 2), (16, 3), (16, 2)):
        if own + stages * block_n * row_bytes + block_m * block_n * itemsize <= limit:
            break
    return Tile(block_q, block_h, block_m, block_n, 8 if block_m > 16 else 4, stages)


def choose_splits(programs: int, bound: int, block_n: int, sms: int) -> tuple[int, int]:
    """(splits at most, tiles of a split at least) for so many programs of rows of up to ``bound`` keys."""
    least = cdiv(SPLIT_TOKENS if programs >= sms else FEW_SPLIT_TOKENS, block_n)
    wanted = cdiv(PROGRAMS * sms, max(programs, 1))
    return max(1, min(wanted, cdiv(cdiv(bound, block_n), least))), least


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
    num_blocks, block_size, width = latents.shape
    num_rows, rotated, sparse = row_slots.shape[0], width - rank, selected is not None
    assert q_latent.stride(2) == q.stride(2) == latents.stride(2) == 1, "rows must be contiguous"
    assert block_tables.is_contiguous(), "tables must be contiguous"
    out = torch.empty((heads, num_tokens, rank), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    longest = 1 if sparse else min(max_query_len, most_queries)
    if not sparse and runs_gluon(q.device):
        from headway.kernels.mla_decode.hopper.launch import attend_shared, serves

        if serves(q_latent, q, latents):
            attend_shared(
                q_latent,
                q,
                latents,
                block_tables,
                (row_slots, query_start, seq_lens),
                out,
                scale,
                most_queries,
                longest,
            )
            return out
    block_rank, block_rotated = max(16, next_power_of_2(rank)), max(16, next_power_of_2(rotated))
    row_bytes = (block_rank + block_rotated) * q.itemsize
    tile = choose_tile(heads, longest, row_bytes, q.itemsize, shared_limit(q.device), most_members(q.device))
    parts = cdiv(longest, tile.block_q)
    units, blocks = num_tokens if sparse else num_rows * parts, cdiv(heads, tile.block_h)
    positions = selected.shape[1] if selected is not None else 0
    bound = min(positions, max_seq_len_bound) if sparse else max_seq_len_bound
    splits, least = choose_splits(units * blocks, bound, tile.block_n, num_sms(q.device))
    partial = top = torch.empty(0, dtype=torch.float32, device=q.device)
    if splits > 1:
        queries = units * tile.block_q  # of tokens in long rows, which others compute, there may be many more
        partial = torch.empty((queries, heads, splits, rank), dtype=torch.float32, device=q.device)
        top = torch.empty((queries, heads, splits), dtype=torch.float32, device=q.device)
    tables = (row_slots, query_start, seq_lens, row_slots if selected is None else selected)
    stride = 0 if selected is None else selected.stride(0)
    sizes = {
        "H": heads,
        "RANK": rank,
        "BS": block_size,
        "PARTS": parts,
        "BLOCK_Q": tile.block_q,
        "BLOCK_N": tile.block_n,
    }
    sizes |= {"BLOCK_RANK": block_rank, "SPARSE": sparse}
    mla_decode_kernel[(blocks, units, splits)](
        q_latent, q, latents, out, partial, top, block_tables, *tables,
        num_rows, num_tokens, block_tables.shape[0], num_blocks, block_tables.shape[1], splits, least,
        most_queries, positions, scale, q_latent.stride(0), q_latent.stride(1), q.stride(0), q.stride(1),
        latents.stride(0), latents.stride(1), stride,
        D=q.shape[2], ROTATED=rotated, BLOCK_H=tile.block_h, BLOCK_M=tile.block_m, BLOCK_ROTATED=block_rotated,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **sizes, **launch_early(q.device),
    )  # fmt: skip
    if splits > 1:
        mla_merge_kernel[(heads, units * tile.block_q)](
            out, partial, top, *tables, num_rows, num_tokens, block_tables.shape[0], block_tables.shape[1], splits, least,
            most_queries, positions, stride, num_warps=4, **sizes, **launch_early(q.device),
        )  # fmt: skip
    return out

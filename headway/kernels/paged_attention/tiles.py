"""Tile shapes and split counts of the paged attention kernels: plain host arithmetic, no search at run time.

The limits on Hopper that the tables respect: 227 KB of shared memory a block, 255 registers a thread, warpgroup matrix
products from 64 rows on. K and V tiles take ``num_stages - 1`` buffers each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from headway.core.ints import cdiv, next_power_of_2
from headway.kernels.capability import MOST_KB

SPLIT_TOKENS = 1024
"""Once the rows fill the device, a row is split only into pieces of at least this many tokens."""
MAX_SPLITS = 64
MAX_SPLITS_WHEN_FULL = 8
COUNTED_SPLITS = 4
"""Most splits of a row, at least, where the number of rows is read on the device."""
RESIDENTS = 3.0
"""Programs a processor, for which rows are split while there are fewer."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """``block_m`` query heads of one KV head x ``block_n`` keys of ``block_d`` (padded) dimensions."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    precision: str


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """``block_m`` (queries x heads of one KV head) x ``block_n`` keys of ``block_d`` (padded) dimensions."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    precision: str


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The leading rows that the decode kernel serves: ``bound``, or no more than that and than ``count`` (int32 [1])."""

    bound: int
    count: torch.Tensor | None = None

    def other_tokens(self, q: torch.Tensor) -> int:
        """Tokens of q [T, H, D] that other rows and padding may have; 0: all are the decode kernel's."""
        return q.shape[0] if self.count is not None else max(q.shape[0] - self.bound, 0)

    def pointer(self, unused: torch.Tensor) -> torch.Tensor:
        """``count``, or what a kernel gets that does not read it."""
        return unused if self.count is None else self.count


@lru_cache(maxsize=64)
def decode_tile(size: int, group: int, dtype: torch.dtype) -> DecodeTile:
    """The tile of the decode kernel for head size ``size`` and ``group`` query heads per KV head."""
    block_d = max(16, next_power_of_2(size))
    block_m = max(16, next_power_of_2(group))
    if dtype == torch.float32:  # no tensor cores at full precision; small tiles keep registers in bounds
        return DecodeTile(block_m, 32 if block_d <= 128 else 16, block_d, 4, 2, "ieee")
    block_n = 64 if block_d <= 128 else 32 if block_d <= 256 else 16  # 99 KB on consumer cards
    return DecodeTile(block_m, block_n, block_d, 4, 2, "tf32")


@lru_cache(maxsize=64)
def prefill_tile(
    size: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    tokens: int,
    sms: int,
    itemsize: int,
    shared: int = MOST_KB << 10,
) -> PrefillTile:
    """The tile of the prefill kernel: large, unless ``tokens`` queries would leave some of ``sms`` processors idle.

    Args:
        itemsize: bytes of a cached number.
        shared: bytes of shared memory that a program may have.
    """
    tile = _roomy_prefill_tile(size, heads, kv_heads, dtype, tokens, sms, itemsize)
    least = max(16, next_power_of_2(heads // kv_heads))
    while _prefill_bytes(tile, dtype.itemsize, itemsize) > shared:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_n > 32:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > max(least, 32):
            tile = replace(tile, block_m=tile.block_m // 2, num_warps=max(4, tile.num_warps // 2))
        elif tile.block_n > 16:
            tile = replace(tile, block_n=16)
        else:
            break
    return tile


def _prefill_bytes(tile: PrefillTile, itemsize: int, cached: int) -> int:
    """Shared memory of queries and of keys and values in flight."""
    return tile.block_d * (tile.block_m * itemsize + 2 * tile.num_stages * tile.block_n * cached)


def _roomy_prefill_tile(
    size: int, heads: int, kv_heads: int, dtype: torch.dtype, tokens: int, sms: int, itemsize: int
) -> PrefillTile:
    """``prefill_tile`` where there is as much shared memory as on Hopper."""
    block_d = max(16, next_power_of_2(size))
    group = heads // kv_heads
    least = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return PrefillTile(max(least, 32), 32, block_d, 4, 2, "ieee")
    if tokens * heads < 2 * sms * 128 or block_d > 256:
        return PrefillTile(max(least, 64), 64 if block_d <= 128 else 32, block_d, 4, 3, "tf32")
    if block_d <= 64:
        return PrefillTile(max(least, 128), 128, block_d, 8, 3, "tf32")
    if block_d <= 128 and itemsize == 1:  # one program a processor: 156 us, with 32 keys 182 (8 x 1024 of Qwen3-0.6B)
        return PrefillTile(max(least, 128), 64, block_d, 8, 3, "tf32")
    if (
        block_d <= 128
    ):  # 128 registers a thread: two programs a processor, 12-18 % ahead of 64 keys (bench/ops/forward.py)
        return PrefillTile(max(least, 128), 32, block_d, 8, 3, "tf32")
    return PrefillTile(max(least, 128), 32, block_d, 8, 2, "tf32")


def holds_tile(programs: int, sms: int) -> bool:
    """Whether decode programs (rows x KV heads) fetch a tile before their queries are there.

    It costs registers, and so residency: it pays while rows are few, 0.6 to 2 us a layer up to 32 programs on 132 processors,
    measured with keys that lay in the L2 cache.
    """
    return 4 * programs <= sms


def choose_splits(programs: int, bound: int, block_n: int, sms: int, residents: float = RESIDENTS) -> tuple[int, int]:
    """(splits per row at most, tiles per split at least) of a decode launch.

    Args:
        programs: rows x KV heads, what runs side by side without splitting.
        bound: >= the keys any row reads; only limits the number of splits.
        block_n: keys per tile.
        sms: processors of the device.
        residents: programs a processor, for which rows are split while there are fewer.

    The kernel shares a row's true number of tiles evenly among the splits it uses, so short and long rows both spread.
    Below ``residents`` programs a processor a row may be split down to single tiles, for about as many; three, since with four
    a row of 4000 tokens alone takes 12.6 us instead of 9.3. Above, only long rows are split, so that one of them does not
    outlast all others; finer pieces cost more than they even out (64 rows of 448: 31.5 us whole, 41.8 in pieces of 256).
    """
    tiles = cdiv(bound, block_n)
    programs = max(programs, 1)
    wanted = int(residents * sms)
    if programs < wanted:
        return max(1, min(cdiv(wanted, programs), tiles, MAX_SPLITS)), 1
    return max(1, min(bound // SPLIT_TOKENS, MAX_SPLITS_WHEN_FULL)), SPLIT_TOKENS // block_n

"""Tiles of the decode kernel for Hopper, by a rule about what fits a processor at a time.

A launch has rows x KV heads programs, or as many pieces of rows. It is fastest when all of them are resident at once and the
shared memory that is left holds tiles on their way: a second wave costs a whole row's time, and a row of few programs is cut
in two, whose halves meet in a cluster, so that all processors read. ``bench/ops/attention_tiles.py`` has the measurements
behind it: 14 shapes of 1 to 8 KV heads, 64 to 256 numbers a head, 16 and 8 bits, at 1 to 256 rows on one H200. Six more shapes
judged it; ``_few_programs`` was changed by them, too, so of that part no shape is left that it has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headway.core.ints import cdiv

WARP_KEYS = 16
"""A warp's keys of a tile."""
SHARED, RESERVED, REGISTERS = 228 << 10, 1 << 10, 65536
"""Bytes of shared memory of a processor, those of them that each program costs besides, and registers."""
THREAD_REGISTERS = {64: 128, 128: 168, 256: 248}
"""What the compiler takes for a thread, about, by head size."""


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


@dataclass(frozen=True, slots=True)
class Heads:
    """What a launch's programs work on: ``group`` queries of ``size`` numbers a KV head, of rows of up to ``width`` tokens.
    Cached numbers have ``itemsize`` bytes."""

    size: int
    group: int
    itemsize: int
    width: int = 1


@lru_cache(maxsize=1024)
def early_tile(programs: int, heads: Heads, sms: int) -> EarlyTile:
    """The tile for rows x KV heads = ``programs`` on ``sms`` processors."""
    if 2 * programs <= sms:
        return _few_programs(programs, heads, sms)
    if programs <= sms:
        warps = 4 if heads.size * heads.itemsize <= 256 else 2
        return EarlyTile(warps, _stages(heads, warps, 2, cluster=2), 1.5, 2)
    wave = cdiv(programs, sms)
    if wave <= 4:
        halves = 2 * wave
        stages = _stages(heads, 2, halves, cluster=2)
        if wave <= 3 or (stages > 1 and _resident(heads, 2, halves) == halves):
            return EarlyTile(2, stages, 2.0 * programs / sms, 2)
    spills = heads.size > 128 or heads.width > 1  # with one warp
    warps = 2 if spills or wave <= 8 else 1
    return EarlyTile(warps, min(3, _stages(heads, warps, wave)), 0.97)


def _few_programs(programs: int, heads: Heads, sms: int) -> EarlyTile:
    """Of at most half as many programs as processors: latency decides, so tiles are long, and pieces meet in a cluster.

    One row of few queries is cut into a cluster of eight; with larger groups, whose linear layers want the processors early,
    that lost.
    """
    one_row, head_bytes = 16 * programs <= sms, heads.size * heads.itemsize
    if one_row and heads.group <= 2:
        return EarlyTile(4, 1, 1.94, 8)
    if heads.size > 128 and heads.itemsize == 1:
        return EarlyTile(4, 2, 1.5)
    if heads.size > 128:
        return EarlyTile(4, 2, 0.97, 1 if 4 * programs <= sms else 2)
    if one_row:
        return EarlyTile(4, 1)
    if head_bytes <= 128 and 4 * programs <= sms:
        return EarlyTile(4, 2, 0.97 if 8 * programs <= sms else 1.5, 8)
    if head_bytes > 128 and 8 * programs > sms >= 3 * programs:
        return EarlyTile(4, 2, 0.97, 4)
    return EarlyTile(8, 2, 0.97, 1 if 8 * programs <= sms else 2)


def program_bytes(tile: EarlyTile, heads: Heads) -> int:
    """Shared memory of a program, as its kernel compiles: tiles, queries, room for merging, the cluster's mailbox."""
    tiles = 2 * tile.stages * tile.block_n * heads.size * heads.itemsize
    return tiles + _other_bytes(heads, tile.num_warps, tile.cluster)


def _other_bytes(heads: Heads, warps: int, cluster: int) -> int:
    from headway.kernels.paged_attention.hopper.triton_merge import cluster_bytes, room_bytes, row_count
    from headway.kernels.paged_attention.hopper.triton_take import tokens_of

    rows = row_count.fn(tokens_of.fn(heads.width, heads.group) * heads.group)
    mailbox = 0 if cluster == 1 else 8 + cluster_bytes.fn(cluster, rows, heads.size)
    return int(16 * heads.size + room_bytes.fn(warps, rows, heads.size, heads.width) + mailbox)


def _resident(heads: Heads, warps: int, wanted: int) -> int:
    """Programs of a processor, of ``wanted``, for which its registers last."""
    return min(wanted, REGISTERS // (32 * warps * THREAD_REGISTERS[heads.size]))


def _stages(heads: Heads, warps: int, programs: int, cluster: int = 1) -> int:
    """Tiles, one to four, for which shared memory lasts where a processor has so many ``programs``."""
    own = SHARED // _resident(heads, warps, programs) - RESERVED - _other_bytes(heads, warps, cluster)
    return max(1, min(4, own // (2 * WARP_KEYS * warps * heads.size * heads.itemsize)))

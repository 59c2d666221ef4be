"""Tiles of the linear layers for up to 256 rows for any shape, and how long they should take. Imports no Triton.

A product's time is that of its slowest resource: memory (each weight once), what the busiest SM takes in (its weights, and
its rows of activations from the L2 cache), its chunks one after the other, or its matrix products. Weights that are on their
way before the kernel ahead has ended are taken off. ``FEW`` and ``MANY`` were fitted to differences between tiles inside whole
layers of five models on one H200 (``bench/ops/linear_forms.py``). What the first tile of the rule then cost over the best that
was measured: 1.3 % of a layer for up to 64 rows, 0.9 % above; in three models that it was not fitted to 0.8 and 1.9 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType

from headway.core.ints import cdiv
from headway.kernels.linear_forms.card import Card
from headway.kernels.mid_linear.tile import SHARED_LIMIT, Kind, MidTile


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of ``predicted``.

    Attributes:
        intake: bytes a microsecond that an SM takes in.
        products: floating-point operations a microsecond of an SM's matrix units.
        chunk, copied: microseconds of a chunk at least: waiting for copies, a barrier, starting a product; the latter with a
            producer warp.
        latency: microseconds until activations are there; a chunk waits for its share when few are in flight.
        hidden: microseconds of copies, at most, that are over when the kernel ahead has ended.
        mixed: how much of the resources that are not the slowest adds to it.
        start, finish: microseconds of a kernel, and of a round of programs.
        exchange: programs of a cluster -> microseconds in which they exchange sums.
        crowd: microseconds for each 100 KB of shared memory above ``roomy`` KB, in which the next kernel has no room to begin.
        parts: microseconds that the next product takes to add 64 sums of squares.
        two, trailing, producer: microseconds of tiles of two widths, of products that may still run, of a producer warp.
    """

    intake: float
    products: float
    chunk: float
    copied: float
    latency: float
    hidden: float
    mixed: float
    start: float
    finish: float
    exchange: Mapping[int, float]
    crowd: float
    roomy: float
    parts: float
    two: float
    trailing: float
    producer: float


FEW = Costs(
    intake=102e3, products=10.4e6, chunk=0.047, copied=0.164, latency=0.934, hidden=1.55, mixed=0.482, start=0.5, finish=3.54,
    exchange=MappingProxyType({1: 0.0, 2: 0.168, 4: 1.26, 8: 2.63}), crowd=1.0, roomy=93.0, parts=0.419, two=1.97,
    trailing=0.564, producer=0.661,
)  # fmt: skip
"""For up to 64 rows."""
MANY = Costs(
    intake=87.6e3, products=10.4e6, chunk=0.0913, copied=0.0918, latency=1.28, hidden=0.0413, mixed=0.00536, start=0.5,
    finish=2.99, exchange=MappingProxyType({1: 0.0, 2: 0.118, 4: 4.16, 8: 6.56}), crowd=0.112, roomy=377.0, parts=0.0626,
    two=1.94, trailing=0.00483, producer=0.615,
)  # fmt: skip
PARTS_RATE, NORM = 2e6, 1.5
"""Bytes a microsecond of parts that a norm sums, and what that norm takes beside."""
MOST_RESIDENT = 4
"""Programs an SM has registers for."""
WHOLE = 1024
"""Inputs of a program up to which its loop is unrolled whole; the assembler takes seconds for more."""
GROUPS = (16, 64, 128, 256)
"""Numbers of rows that have a tile of their own."""
WIDTHS = (16, 24, 32, 48, 64, 96, 128, 192)
SHARINGS = (1, 2, 3)
"""Programs an SM is to have room for: of this kernel, or of the one behind it."""


def predicted(kind: Kind, tile: MidTile, rows: int, outputs: int, inputs: int, card: Card) -> float:
    """Microseconds of [rows, K] x [N, K]^T inside a chain of kernels that start early."""
    costs = FEW if rows <= 64 else MANY
    part = inputs // (tile.splits * tile.cluster)
    blocks = cdiv(rows, tile.rows)
    tall = tile.rows if tile.producer else min(rows, tile.rows)  # a producer warp copies zeros, too
    programs = cdiv(outputs, tile.wide) * tile.splits * tile.cluster * blocks
    taken, resident = tile.shared_bytes(inputs) + 1024, residents(tile, inputs)
    each, chunks = cdiv(programs, card.sms), tile.chunks(inputs)
    turns = each / min(resident, each)
    memory = 2 * outputs * inputs / card.bandwidth
    ahead = min(tile.w_ahead, chunks) * 2 * tile.block_k * tile.wide * min(programs // blocks, card.sms * resident)
    intake = each * 2 * part * (tile.wide + tall) / costs.intake
    chunk = max(
        costs.copied if tile.producer else costs.chunk,
        costs.latency / min(tile.x_ahead + 1, chunks),
        2 * tile.block_k * (tile.wide + tall) / costs.intake,
    )
    loop = turns * chunks * chunk
    multiplied = each * 2 * tile.rows * tile.wide * part / costs.products
    body = max(memory - min(ahead / card.bandwidth, costs.hidden), intake, loop, multiplied)
    body += costs.mixed * (intake + loop + multiplied)
    crowd = costs.crowd * max(0.0, taken * min(resident, each) / 1024 - costs.roomy) / 100
    more = costs.exchange[tile.cluster] + crowd + costs.trailing * tile.trailing
    more += costs.two * (tile.widths()[1] > 0) + costs.producer * tile.producer
    if kind == "mid_add":
        more += costs.parts * cdiv(outputs, tile.wide) / 64
    if kind == "linear_parts":
        more += NORM + 8 * tile.splits * rows * outputs / PARTS_RATE
    return costs.start + costs.finish * turns + body + more


def residents(tile: MidTile, inputs: int) -> int:
    """Programs that an SM has room for."""
    if tile.producer:
        return tile.residents(inputs)
    room: int = SHARED_LIMIT // (tile.shared_bytes(inputs) + 1024)
    return min(MOST_RESIDENT, max(1, room), 16 // tile.num_warps)


@lru_cache(maxsize=4096)
def ranked(kind: Kind, rows: int, outputs: int, inputs: int, card: Card) -> tuple[tuple[float, MidTile], ...]:
    """Every tile worth a look, with its predicted microseconds, the best first."""
    tiles = dict.fromkeys(candidates(kind, rows, outputs, inputs))
    return tuple(
        sorted(
            ((predicted(kind, tile, rows, outputs, inputs, card), tile) for tile in tiles),
            key=lambda x: (x[0], repr(x[1])),
        )
    )


def best_tile(kind: Kind, rows: int, outputs: int, inputs: int, card: Card) -> MidTile:
    """The tile of least predicted time for [rows, K] x [N, K]^T; the same for neighbouring numbers of rows, of whatever dtype.

    Raises:
        ValueError: no tile fits, or there are more rows than the kernels were made for.
    """
    group = next((most for most in GROUPS if rows <= most), 0)
    found = ranked(kind, group, outputs, inputs, card) if group else ()
    if not found:
        raise ValueError(f"no tile of {kind} for {rows} rows of [{outputs}, {inputs}]")
    return found[0][1]


def coarser(tile: MidTile, inputs: int) -> MidTile | None:
    """``tile`` with half as many chunks of twice the inputs, and about as many bytes in flight; None: it does not fit."""
    if tile.producer or tile.block_k != 128 or tile.chunks(inputs) % 2:
        return None
    half = replace(
        tile, block_k=256, w_ahead=max(1, tile.w_ahead // 2), x_ahead=max(1, tile.x_ahead // 2), trailing=0, turn=0
    )
    half = replace(half, x_ahead=min(half.x_ahead, half.w_ahead))
    if half.chunks(inputs) * half.block_k > WHOLE:
        half = replace(half, turn=half.least_turn(inputs))
    return half if half.fits(inputs) else None


def candidates(kind: Kind, rows: int, outputs: int, inputs: int) -> Iterator[MidTile]:
    """Tiles that the kernels can run for K = ``inputs`` and that differ in what matters."""
    many = rows > 64
    shapes = [(64, 4), (64, 8)] + ([(128, 8)] if many else [])
    sums = kind in ("mid_add", "linear_parts")
    for wide, (tall, warps), block_k, parts in product(WIDTHS, shapes, (64, 128), (1, 2, 3, 4, 6, 8) if sums else (1,)):
        if inputs % (block_k * parts) or (kind == "mid_add" and parts in (3, 6)):
            continue
        if (
            (warps == 8 and tall == 64 and wide < 128)
            or wide > max(WIDTHS[0], 2 * outputs)
            or (sums and wide & (wide - 1))
        ):
            continue
        splits, cluster = (1, parts) if kind == "mid_add" else (parts, 1)
        start = MidTile(wide, block_k, splits, 1, 1, warps, tall, 0, cluster)
        if cluster > tall // 8 or (cluster > 1 and tall * wide < 256 * warps):
            continue
        yield from _flights(start, inputs)
    if rows <= 64 and kind != "linear_parts":
        yield from _copying(kind, outputs, inputs)


def _flights(start: MidTile, inputs: int) -> Iterator[MidTile]:
    """``start`` with as many copies ahead as there is room for, when programs share an SM."""
    chunks = start.chunks(inputs)
    whole = chunks * start.block_k <= WHOLE
    for sharing, trailing in product(SHARINGS, (0, 1)):
        room = (SHARED_LIMIT + 1024) // sharing - 1024 - 512
        for across in (3, 4, 6, 8, chunks) if whole else (2, 3, 5, 7):
            if across > chunks or (trailing and (chunks < 12 or start.block_k == 128)):
                continue
            tile = _most_ahead(replace(start, x_ahead=across, w_ahead=across, trailing=trailing), inputs, room, whole)
            if tile is not None:
                yield tile


def _most_ahead(tile: MidTile, inputs: int, room: int, whole: bool) -> MidTile | None:
    """``tile`` with the most weights ahead that ``room`` bytes hold, in a loop that is unrolled ``whole`` or in short turns."""
    chunks, more = tile.chunks(inputs), 1 + tile.trailing
    if whole:
        aheads = range(chunks, tile.x_ahead - 1, -1)
    else:  # a turn of the loop uses every buffer equally often
        across = tile.x_ahead + more
        aheads = range(across * (16 // across) - more, tile.x_ahead - 1, -across)
    for w_ahead in aheads:
        longer = replace(tile, w_ahead=w_ahead)
        if not whole:
            longer = replace(longer, turn=longer.least_turn(inputs))
        if longer.shared_bytes(inputs) <= room and longer.fits(inputs):
            return longer
    return None


def _copying(kind: Kind, outputs: int, inputs: int) -> Iterator[MidTile]:
    """Tiles with a producer warp and as many buffers as one or two programs an SM have room for."""
    if inputs < 2048 or outputs % 8:
        return
    for wide, cluster, sharing in product((32, 64, 128, 256), (1, 2, 4) if kind == "mid_add" else (1,), (1, 2)):
        if inputs % (64 * cluster) or (wide == 256 and kind == "mid_add"):
            continue
        for stages in range(17, 2, -1):
            tile = MidTile(wide, 64, 1, stages, stages, 4, cluster=cluster, producer=True)
            if (tile.shared_bytes(inputs) + 1024) * sharing <= SHARED_LIMIT - 512 and tile.fits(inputs):
                yield tile
                break

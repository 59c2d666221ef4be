"""Where the linear layers for 3 to 256 rows are used, and with which tile. Imports no Triton.

Tiles are those that were measured for a shape (``linear_forms.table``), in whole layers and where they beat layers of separate
kernels; a tile within 0.2 us of the best stands for several numbers of rows, so that fewer kernels are compiled at the start.
Other shapes follow ``rule``. Nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from headway.kernels.linear_forms.card import Card, card_of
from headway.kernels.linear_forms.table import current_device, measured
from headway.kernels.mid_linear.rule import best_tile
from headway.kernels.mid_linear.tile import Kind, MidTile

__all__ = [
    "BUCKETS",
    "LEAST_ROWS",
    "MAX_ROWS",
    "Kind",
    "MidTile",
    "measured_tiles",
    "mid_rows",
    "row_bucket",
    "tile_for",
]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""What measurements count rows in."""

LEAST_ROWS = 3
"""Where nothing was measured, one and two rows are for the fused layers of ``skinny_linear``."""

MOST_BY_RULE, FEW_BLOCKS, LARGE = 128, 64, 200 << 20
"""Where nothing was measured: the most rows, and those of weights with at least so many bytes. In layers of eight models 128
rows were 15 % faster to 4 % slower than ``F.linear``, of Llama-8B 11 % slower; 256 rows were slower in all but two."""

BARE: Mapping[Kind, Kind] = MappingProxyType({"bare_linear": "mid_linear", "bare_gate_up": "mid_gate_up"})
"""Kinds without squares -> the same with them, whose entries stand for those that have none of their own."""

MAX_ROWS = BUCKETS[-1]
"""Nobody measured more; every block of rows reads all weights from the L2 cache once more."""


def row_bucket(rows: int) -> int:
    """The smallest of ``BUCKETS`` that holds ``rows``, at most 256."""
    return next(bucket for bucket in BUCKETS if rows <= bucket)


@lru_cache(maxsize=1024)
def measured_tiles(kind: Kind, outputs: int, inputs: int, card: Card) -> Mapping[int, MidTile] | None:
    """The most rows it is for -> the fastest tile, as measured; None: nothing was. It lost for more rows than these."""
    found = measured(kind, outputs, inputs, card)
    if found is None:
        return measured_tiles(BARE[kind], outputs, inputs, card) if kind in BARE else None
    tiles = {rows: _tile(numbers) for rows, numbers in found.tiles.items() if numbers}
    return MappingProxyType({rows: tile for rows, tile in tiles.items() if tile.fits(inputs)})


def _tile(numbers: Sequence[int]) -> MidTile:
    wide, block_k, splits, w_ahead, x_ahead, num_warps, rows, trailing, cluster, producer, *turn = numbers
    return MidTile(wide, block_k, splits, w_ahead, x_ahead, num_warps, rows, trailing, cluster, bool(producer), *turn)


def mid_rows(kind: Kind, outputs: int, inputs: int) -> range:
    """The numbers of rows for which ``kind`` beats other kernels on a 16-bit weight [N, K]; empty: none.

    Of kinds without squares that were not measured themselves it begins at one: ``linear_forms.bare`` says where forms for few
    rows end.
    """
    if inputs % 64:
        return range(0)
    card = card_of(current_device())
    found, guessed = (
        measured_tiles(kind, outputs, inputs, card),
        kind in BARE and measured(kind, outputs, inputs, card) is None,
    )
    if found is None:
        most = MOST_BY_RULE if 2 * outputs * inputs < LARGE else FEW_BLOCKS
        return range(1 if guessed else LEAST_ROWS, most + 1)
    if not found:
        return range(0)
    if guessed:
        return range(1, max(found) + 1)
    first = BUCKETS.index(row_bucket(min(found)))
    return range(BUCKETS[first - 1] + 1 if first else 1, max(found) + 1)


def float16_rows(kind: Kind, outputs: int, inputs: int) -> range:
    """``mid_rows`` in float16, beyond which the residual times a norm's weight may be."""
    return range(0) if kind == "mid_add" else mid_rows(kind, outputs, inputs)


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> MidTile:
    """The tile for [rows, K] x [N, K]^T, wanted by ``mid_rows`` or not.

    Raises:
        ValueError: K is no multiple of 64, or there are more than 256 rows.
    """
    if inputs % 64 or rows > MAX_ROWS:
        raise ValueError(f"{kind} takes up to {MAX_ROWS} rows and K a multiple of 64, not {rows} and K={inputs}")
    card = card_of(current_device())
    found = measured_tiles(kind, outputs, inputs, card) or {}
    most = min((most for most in found if rows <= most), default=0)
    return found[most] if most else best_tile(kind, rows, outputs, inputs, card)

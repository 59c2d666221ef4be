"""Where the fused linear layers are used, and with which tile. Imports no Triton.

Tiles are those that were measured for a shape (``linear_forms.table``), in whole layers and where they beat layers of separate
kernels. Other shapes follow ``rule`` and ``_rows_by_rule``. Nothing is tuned while serving.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from headway.kernels.linear_forms.card import Card, card_of
from headway.kernels.linear_forms.table import current_device, measured
from headway.kernels.skinny_linear.rule import best_tile
from headway.kernels.skinny_linear.tile import Kind, Tile, row_bucket

__all__ = ["MAX_ROWS", "Kind", "Tile", "fused_rows", "measured_tiles", "row_bucket", "tile_for"]

MAX_ROWS = 16
"""Above it ``F.linear`` is at least as fast for every kind."""

MIB = 2**20


@lru_cache(maxsize=1024)
def measured_tiles(kind: Kind, outputs: int, inputs: int, card: Card) -> Mapping[int, Tile] | None:
    """Row bucket -> the fastest tile, as measured; None: nothing was. Buckets that are absent lost."""
    found = measured(kind, outputs, inputs, card)
    if found is None:
        return None
    return MappingProxyType({rows: Tile(*numbers) for rows, numbers in found.tiles.items() if numbers})


def fused_rows(kind: Kind, outputs: int, inputs: int) -> int:
    """The largest number of rows for which ``kind`` beats the separate kernels on a 16-bit weight [N, K]; 0: none."""
    found = measured_tiles(kind, outputs, inputs, card_of(current_device()))
    return _rows_by_rule(kind, outputs, inputs) if found is None else max(found, default=0)


def _rows_by_rule(kind: Kind, outputs: int, inputs: int) -> int:
    """Shapes that were not measured.

    Without a norm the kernel streams weights as fast as ``F.linear`` or faster up to 16 rows, in all six measured shapes.
    A norm is computed by every program anew: with more rows that pays only while the matrix is small.
    """
    if inputs % 8:  # weight rows do not begin at 16 bytes, so loads are narrow
        return 0
    large = 2 * outputs * inputs >= 16 * MIB
    return 8 if large and kind in ("norm_linear", "norm_gate_up") else MAX_ROWS


def tile_for(kind: Kind, rows: int, outputs: int, inputs: int) -> Tile:
    """The tile for [rows, K] x [N, K]^T; any shape, wanted by ``fused_rows`` or not."""
    bucket, card = row_bucket(rows), card_of(current_device())
    found = measured_tiles(kind, outputs, inputs, card) or {}
    return found.get(bucket) or best_tile(kind, bucket, outputs, inputs, card)

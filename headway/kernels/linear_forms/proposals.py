"""Tiles that a measurement tries for an op: what a start would take, and what the rule thinks best. Imports no Triton."""

from __future__ import annotations

from typing import Any

from headway.kernels.linear_forms.card import Card
from headway.kernels.linear_forms.winners import Form
from headway.kernels.mid_linear import rule as mid_rule
from headway.kernels.mid_linear.tile import MidTile, is_early
from headway.kernels.mid_linear.tiles import tile_for as mid_tile_for
from headway.kernels.skinny_linear import rule as skinny_rule
from headway.kernels.skinny_linear.tile import Tile
from headway.kernels.skinny_linear.tiles import tile_for as skinny_tile_for

MOST_COARSER = 3
"""Tiles with twice the inputs a chunk that are tried beside the rule's, which does not know them."""


def proposals(op: str, rows: int, outputs: int, inputs: int, card: Card, most: int) -> list[tuple[float, Form]]:
    """Tiles to try for an op, with the microseconds that the rule predicts.

    What a start would take without this search, then the rule's best, then the best that differ in what matters.
    """
    few = not is_early(op)
    if inputs % (8 if few else 64):
        return []
    rule: Any = skinny_rule if few else mid_rule
    taken: Any = (skinny_tile_for if few else mid_tile_for)(op, rows, outputs, inputs)  # type: ignore[arg-type]
    found: list[tuple[float, Form]] = [(rule.predicted(op, taken, rows, outputs, inputs, card), (op, taken))]
    kinds: dict[object, int] = {}
    for us, tile in rule.ranked(op, rows, outputs, inputs, card):
        kind = _kind(tile)
        if tile == taken or kinds.get(kind, 0) >= (2 if kinds and kind != next(iter(kinds)) else 4):
            continue
        if len(found) == most:
            break
        kinds[kind] = kinds.get(kind, 0) + 1
        found.append((us, (op, tile)))
    tiles = [form[1] for _, form in found] if not few and rows <= 64 else []
    coarse = [mid_rule.coarser(tile, inputs) for tile in tiles if isinstance(tile, MidTile)]
    more = [tile for tile in dict.fromkeys(coarse) if tile is not None][:MOST_COARSER]
    return found + [(mid_rule.predicted(op, tile, rows, outputs, inputs, card), (op, tile)) for tile in more]  # type: ignore[arg-type]


def _kind(tile: Tile | MidTile) -> object:
    """What tiles of one kind have in common."""
    if isinstance(tile, Tile):
        return tile.block_n, tile.splits > 0, tile.num_warps * (tile.held > 0)
    return tile.wide, tile.cluster, tile.splits, tile.rows, tile.producer, tile.block_k

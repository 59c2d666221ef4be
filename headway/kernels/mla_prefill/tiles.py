"""Tiles of the prefill kernel of latent attention, within a card's shared memory. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Queries and keys of a program's tile, its warps and stages."""

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int


TILES = (
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(32, 16, 4, 2),
    Tile(16, 16, 4, 2),
    Tile(16, 16, 4, 1),
)
"""From the fastest on: more queries read less, more stages hide more of the reading."""


def choose_tile(key_size: int, value_size: int, itemsize: int, most_queries: int, limit: int) -> Tile:
    """The first that fits, and is not larger than rows can use.

    Args:
        key_size, value_size: elements of a key and of a value, rounded up as the kernel does.
        most_queries: >= tokens of a step.
        limit: bytes of shared memory.
    """
    for tile in TILES:
        own = tile.block_q * (key_size * itemsize + tile.block_n * itemsize)
        if (
            tile.block_q <= max(most_queries, 16)
            and own + tile.num_stages * tile.block_n * itemsize * (key_size + value_size) <= limit
        ):
            return tile
    return TILES[-1]

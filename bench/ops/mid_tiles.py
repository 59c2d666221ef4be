"""The tiles that ``mid_linear.py`` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from linear import Layer

from headway.core.ints import cdiv
from headway.kernels.mid_linear.tiles import SHARED_LIMIT, TABLE, UNROLLED, Kind, MidTile

PROCESSORS = 132
WAYS: dict[str, dict[str, Kind]] = {
    "meet": {"qkv": "mid_linear", "o": "mid_add", "gate_up": "mid_gate_up", "down": "mid_add"},
    "parts": {"qkv": "mid_linear", "o": "linear_parts", "gate_up": "mid_gate_up", "down": "linear_parts"},
}
"""What sums the parts of K -> layer -> its op."""


def candidates(layer: Layer, rows: int, way: str) -> Iterator[MidTile]:
    kind = WAYS[way][layer.name]
    if way == "meet" and layer.inputs >= 4096 and 32 < rows <= 64:
        yield from (tile for tile in copying(layer, kind) if tile.fits(layer.inputs))
    if way == "meet" and rows > 64 and layer.inputs < 4096:
        yield from wide_blocks(layer, rows, kind)
    elif kind == "mid_add":
        yield from clusters(layer, rows)
    elif way == "meet":
        yield from scaled(layer, rows, kind)
    elif layer.inputs >= 4096:
        yield from long_loops(layer, rows, kind)
    else:
        yield from one_block(layer, rows, kind) if rows <= 64 else many_blocks(layer, rows, kind)


def scaled(layer: Layer, rows: int, kind: Kind) -> Iterator[MidTile]:
    """The table's tiles, then a choice of others: each is compiled for several numbers of sums of squares."""
    found = TABLE[kind, layer.outputs, layer.inputs]
    tiles = [tile for bucket, tile in sorted(found.items()) if (bucket <= 64) == (rows <= 64)]
    if layer.inputs >= 4096:
        tiles += [tile for tile in long_loops(layer, 64, kind) if tile.wide >= 64 and tile.num_warps == 4]
    elif rows <= 64:
        for wide, block_k, share in product((32, 64, 128), (64, 128), (1, 2)):
            ahead = layer.inputs // block_k // share
            tiles += [MidTile(wide, block_k, 1, ahead, x_ahead, 4) for x_ahead in {512 // block_k, ahead}]
    yield from [tile for tile in dict.fromkeys(tiles) if tile.fits(layer.inputs)]


def wide_blocks(layer: Layer, rows: int, kind: Kind) -> Iterator[MidTile]:
    """Tiles for several blocks of rows, for most processors once to three times; with as many weights ahead as fit, and with
    room left for a program of the next kernel."""
    inputs, found = layer.inputs, set()
    blocks = ((64, 32, 4), (64, 64, 4), (64, 96, 4), (64, 128, 4), (64, 128, 8), (64, 192, 8))
    blocks += ((128, 32, 8), (128, 48, 8), (128, 64, 8), (128, 96, 8), (128, 128, 8))
    flights = ((64, 3, 0), (64, 4, 0), (64, 5, 1), (128, 2, 0), (128, 3, 0))
    for (block, wide, warps), cluster, flight in product(blocks, (1, 2, 4), flights):
        block_k, x_ahead, trailing = flight
        programs = cdiv(layer.outputs, wide) * cluster * cdiv(rows, block)
        each = cdiv(programs, PROCESSORS)
        if inputs % (block_k * cluster) or each > 3 or programs < 0.7 * PROCESSORS * each:
            continue
        if layer.outputs % wide or (kind != "mid_add" and (cluster > 1 or wide < 48)):
            continue
        start = MidTile(wide, block_k, 1, 1, x_ahead, warps, block, trailing, cluster)
        chunks = start.chunks(inputs)
        for sharing in (each, each + 1):
            for w_ahead in range(chunks, x_ahead - 1, -1):
                tile = replace(start, w_ahead=w_ahead)
                if tile.fits(inputs) and (tile.shared_bytes(inputs) + 1024) * sharing <= SHARED_LIMIT + 1024:
                    found.add(tile)
                    break
    tiles = [tile for bucket, tile in sorted(TABLE[kind, layer.outputs, layer.inputs].items()) if bucket > 64]
    yield from dict.fromkeys([*tiles, *sorted(found, key=repr)])


def copying(layer: Layer, kind: Kind) -> Iterator[MidTile]:
    """Tiles with a copying warp and as many buffers as one or two programs a processor have room for."""
    for wide, cluster in product((32, 64, 128, 256), (1, 2) if kind == "mid_add" else (1,)):
        programs = cdiv(layer.outputs, wide) * cluster
        if programs < 90 or (kind == "mid_add" and programs > PROCESSORS):
            continue
        for sharing in (1, 2):
            stages = [
                n
                for n in range(3, 18)
                if _copying(wide, n, cluster).shared_bytes(layer.inputs) * sharing < SHARED_LIMIT - 1024 * sharing
            ]
            yield from (_copying(wide, n, cluster) for n in stages[-2:])


def _copying(wide: int, stages: int, cluster: int) -> MidTile:
    return MidTile(wide, 64, 1, stages, stages, 4, cluster=cluster, copier=True)


def clusters(layer: Layer, rows: int) -> Iterator[MidTile]:
    """Tiles whose programs are most of the processors once or twice, one or two a processor by their shared memory."""
    inputs, found = layer.inputs, set()
    long = inputs >= 4096
    shapes = product((64,) if rows <= 64 else (64, 128), (32, 64, 128), (2, 4, 8), (64, 128), (4, 8))
    for block, wide, cluster, block_k, warps in shapes:
        programs, chunks = cdiv(layer.outputs, wide) * cluster * cdiv(rows, block), inputs // (block_k * cluster)
        if inputs % (block_k * cluster) or not 60 <= programs <= 280 or wide < inputs // 224 * long:
            continue
        if (chunks > UNROLLED and block_k == 128) or (warps == 8 and (wide < 8192 // block or long)):
            continue
        in_flight = (4, 8, 16) if chunks <= UNROLLED else (2, 3, 5, 6, 7, 12, 13, 15)
        for sharing, x_ahead, trailing in product((1, 2), in_flight, (0, 1) if long else (0,)):
            if rows > 64 and (sharing == 1 or x_ahead > 4):
                continue
            start = MidTile(wide, block_k, 1, 1, min(x_ahead, chunks), warps, block, trailing, cluster)
            tile = _longest(start, inputs, sharing)
            if tile is not None and chunks > 8 * trailing:
                found.add(tile)
    if (layer.outputs, inputs) == (4096, 4096):
        found.add(MidTile(32, 64, 1, 15, 15, 4))
    yield from sorted(found, key=repr)


def _longest(tile: MidTile, inputs: int, sharing: int) -> MidTile | None:
    """``tile`` with as many weights ahead as ``sharing`` programs a processor have room for, if they fill most of it."""
    chunks = tile.chunks(inputs)
    for w_ahead in range(chunks, tile.x_ahead - 1, -1):
        longer = replace(tile, w_ahead=w_ahead)
        taken = (longer.shared_bytes(inputs) + 1024) * sharing
        looped = chunks <= UNROLLED or longer.ring(inputs) < chunks
        if looped and longer.fits(inputs) and taken <= SHARED_LIMIT + 1024:
            if taken > 0.6 * SHARED_LIMIT or w_ahead == chunks:
                return longer
    return None


def one_block(layer: Layer, rows: int, kind: Kind) -> Iterator[MidTile]:
    """Tiles that occupy most processors once or twice, with some or all of their copies in flight."""
    inputs = layer.inputs
    parts = kind == "linear_parts"
    for wide, block_k, splits, warps in product((16, 32, 64, 128), (64, 128), (1, 2, 3, 4, 6, 8), (4, 8)):
        if inputs % (block_k * splits) or (splits > 1) is not parts or (wide == 16 and rows > 32):
            continue
        chunks = inputs // (block_k * splits)
        programs = cdiv(layer.outputs, wide) * splits
        if not (60 if wide >= 64 else 90) <= programs <= 264 or chunks > 32:
            continue
        in_flight = (2, 4) if block_k == 128 else (4, 8) if parts else (3, 5, 8)
        for x_ahead in [*(ahead for ahead in in_flight if ahead < chunks - 1), chunks]:
            for w_ahead in {chunks, max(x_ahead, chunks // 2)}:
                whole = w_ahead == chunks
                if (warps == 8 and (not whole or block_k == 128)) or (parts and not whole and x_ahead != 4):
                    continue
                tile = MidTile(wide, block_k, splits, w_ahead, x_ahead, warps)
                if tile.fits(inputs) and (rows > 16 or (whole and warps == 4)):
                    yield tile


def many_blocks(layer: Layer, rows: int, kind: Kind) -> Iterator[MidTile]:
    """Tiles whose programs are spread evenly; as many weights ahead as there is room for when programs share processors."""
    inputs, parts = layer.inputs, kind == "linear_parts"
    shapes = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8))
    flights = ((64, 3, 0), (64, 3, 1), (64, 6, 1), (128, 2, 0), (128, 2, 1), *(() if parts else ((128, 4, 0),)))
    for (block, wide, warps), splits in product(shapes, (1, 2, 3, 4, 6) if parts else (1,)):
        programs = cdiv(layer.outputs, wide) * splits * cdiv(rows, block)
        each = cdiv(programs, PROCESSORS)
        if programs < (0.7 if parts else 0.54) * PROCESSORS * each or each > 3:
            continue
        found = set()
        for (block_k, x_ahead, trailing), sharing in product(
            flights, {each, each + 1} if parts else {1, each, each + 1}
        ):
            for w_ahead in range(inputs // (block_k * splits), x_ahead - 1, -1):
                tile = MidTile(wide, block_k, splits, w_ahead, x_ahead, warps, block, trailing)
                if tile.fits(inputs) and (tile.shared_bytes(inputs) + 1024) * sharing <= SHARED_LIMIT + 1024:
                    found.add(tile)
                    break
        yield from sorted(found, key=repr)


def long_loops(layer: Layer, rows: int, kind: Kind) -> Iterator[MidTile]:
    """Tiles for K that no unrolled loop holds, with a hundred or two hundred KB of buffers."""
    parts = kind == "linear_parts"
    few = ((64, 16, 4),) if rows <= 16 else ()
    shapes = (*few, (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8))
    rings = product((4, 7, 8, 14, 16), (1, 2, 4), (0, 1))
    for (block, wide, warps), splits, ring in product(shapes, (1, 2, 4, 8) if parts else (1,), list(rings)):
        weights, activations, trailing = ring[0], ring[0] // ring[1], ring[2]
        programs = cdiv(layer.outputs, wide) * splits * cdiv(rows, block)
        if ring[0] % ring[1] or activations < 2 + trailing or programs < 96 or (parts and programs > 1100):
            continue
        if block > 64 and rows <= 64:
            continue
        tile = MidTile(wide, 64, splits, weights - 1 - trailing, activations - 1 - trailing, warps, block, trailing)
        full = any(
            0.7 * SHARED_LIMIT < tile.shared_bytes(layer.inputs) * n <= SHARED_LIMIT - 1024 * n for n in (1, 2, 3)
        )
        if full and tile.fits(layer.inputs) and tile.ring(layer.inputs) == weights:
            yield tile


def shown(tile: MidTile) -> str:
    """As in the table."""
    t = tile
    more = f", {t.rows}, {t.trailing}" if t.trailing else f", {t.rows}" if t.rows != 64 else ""
    more += f", cluster={t.cluster}" if t.cluster > 1 else ""
    more += ", copier=True" if t.copier else ""
    return f"MidTile({t.wide}, {t.block_k}, {t.splits}, {t.w_ahead}, {t.x_ahead}, {t.num_warps}{more})"

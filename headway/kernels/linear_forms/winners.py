"""From times to a table: which form and tile for which rows, so that time never falls when rows are added. Imports no Triton.

Rows are padded by a kernel itself, so what was measured for some rows can be had for fewer at no more. Each number of rows
therefore takes the best of its own and of all larger numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import combinations_with_replacement
from math import log
from typing import TypeVar

from headway.kernels.linear_forms.shapes import JUNCTIONS, DecoderShape
from headway.kernels.linear_forms.table import Key, Numbers
from headway.kernels.mid_linear.tile import MidTile
from headway.kernels.skinny_linear.tile import Tile

Form = tuple[str, Tile | MidTile | None]
T = TypeVar("T")
WAYS = ("few", "meet", "parts", "plain")
"""In the order in which they take over when rows are added."""
OPS: Mapping[str, Mapping[str, str]] = {
    "few": {"qkv": "norm_linear", "o": "linear_add", "gate_up": "norm_gate_up", "down": "linear_add"},
    "meet": {"qkv": "mid_linear", "o": "mid_add", "gate_up": "mid_gate_up", "down": "mid_add"},
    "parts": {"qkv": "mid_linear", "o": "linear_parts", "gate_up": "mid_gate_up", "down": "linear_parts"},
}
"""Way -> junction -> op."""


def envelope(times: Mapping[int, tuple[float, T]]) -> dict[int, tuple[float, T]]:
    """Per number of rows the least of its own time and those of more rows, with what it is the time of."""
    best: dict[int, tuple[float, T]] = {}
    least: tuple[float, T] | None = None
    for rows in sorted(times, reverse=True):
        least = times[rows] if least is None or times[rows][0] <= least[0] else least
        best[rows] = least
    return dict(sorted(best.items()))


def split(times: Mapping[str, Mapping[int, tuple[float, T]]], ways: Sequence[str] = WAYS) -> dict[int, str]:
    """Rows -> way, where each of ``ways`` has neighbouring numbers of rows, in their order: the split that loses least."""
    all_rows = sorted({rows for found in times.values() for rows in found})
    covered = {way: envelope(times.get(way, {})) for way in ways}

    def spent(way: str, rows: int) -> float:
        known = covered[way]
        return known[rows][0] if rows in known else float("inf")

    def loss(cuts: Sequence[int]) -> float:
        total = 0.0
        for i, rows in enumerate(all_rows):
            us = spent(ways[sum(cut <= i for cut in cuts)], rows)
            total += log(us) if us < float("inf") else 1e9
        return total

    cuts = min(combinations_with_replacement(range(len(all_rows) + 1), len(ways) - 1), key=loss)
    return {rows: ways[sum(cut <= i for cut in cuts)] for i, rows in enumerate(all_rows)}


Times = Mapping[str, Mapping[int, tuple[float, Mapping[str, Form]]]]
"""Way -> rows -> microseconds of products that take their forms together, and the form of each by its junction."""


def entries(keys: Mapping[str, Mapping[str, Key]], times: Times) -> dict[Key, dict[int, Numbers]]:
    """The table's entries of products that take their forms together; ``keys``: way -> junction -> key.

    An op that is used for no number of rows has the entry 0 -> (): measured, and lost.
    """
    used = split(times)
    found: dict[Key, dict[int, Numbers]] = {}
    for way, of_way in keys.items():
        best = envelope(times.get(way, {}))
        for junction, key in of_way.items():
            tiles = found.setdefault(key, {})
            for rows in (rows for rows, chosen in used.items() if chosen == way):
                tiles[rows] = numbers(best[rows][1][junction])
    return {key: tiles or {0: ()} for key, tiles in found.items()}


def layer_entries(
    shape: DecoderShape, layers: Mapping[tuple[int, str], tuple[float, Mapping[str, Form]]]
) -> dict[Key, dict[int, Numbers]]:
    """The same of a whole layer: (rows, way) -> microseconds and choice. Parts that were not tried have no entries."""
    times: dict[str, dict[int, tuple[float, Mapping[str, Form]]]] = {}
    for (rows, way), found in layers.items():
        times.setdefault(way, {})[rows] = found
    tried = [way for way in OPS if way in times or way != "parts"]
    return entries({way: {each: (OPS[way][each], *shape.weight(each)) for each in JUNCTIONS} for way in tried}, times)


def head_entries(
    shape: DecoderShape, heads: Mapping[int, Mapping[str, tuple[float, Form]]]
) -> dict[Key, dict[int, Numbers]]:
    """The same of the output layer: rows -> op ("skinny_linear", "mid_linear" or "plain") -> microseconds and form."""
    order = ("skinny_linear", "mid_linear", "plain")
    times: dict[str, dict[int, tuple[float, Form]]] = {}
    for rows, forms in heads.items():
        for op, found in forms.items():
            times.setdefault(op, {})[rows] = found
    used = split(times, order)
    entries: dict[Key, dict[int, Numbers]] = {}
    for op in order[:2]:
        best = envelope(times.get(op, {}))
        tiles = {rows: numbers(best[rows][1]) for rows, chosen in used.items() if chosen == op}
        entries[op, *shape.weight("head")] = tiles or {0: ()}
    return entries


def numbers(form: Form) -> Numbers:
    """A form's tile as the table has it."""
    assert form[1] is not None
    return tuple(int(number) for number in astuple(form[1]))

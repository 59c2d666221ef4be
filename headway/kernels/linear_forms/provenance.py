"""Says where the forms and tiles of a model's linear layers come from. Imports no Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.linear_forms.card import Card, card_of
from headway.kernels.linear_forms.shapes import Product
from headway.kernels.linear_forms.table import measured
from headway.kernels.mid_linear.tile import is_early
from headway.kernels.skinny_linear.tile import row_bucket

NAMES: Mapping[str, str] = {
    "tuned": "tuned on this machine",
    "shipped": "measured on an H200",
    "rule": "chosen by the rule",
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are told apart."""
Decided = Callable[[int], Mapping[Product, str]]
"""Rows -> product -> the op that it runs, "plain" for ``F.linear``; see ``models.layers.form_walk``."""


def source(product: Product, op: str, rows: int, card: Card) -> str:
    """Where it comes from that ``product`` runs ``op`` in a step of ``rows`` rows: "tuned", "shipped" or "rule".

    A form counts as measured if its tile was measured for so many rows; ``F.linear``, if all that it was preferred to were.
    """
    found = {
        each: measured(each, *product.size, card) for each in {of_way for _, of_way in product.ops} | {op} - {"plain"}
    }
    if op == "plain":
        known = [each.source for each in found.values() if each is not None]
        return "rule" if len(known) < len(found) or not known else min(known, key=list(NAMES).index)
    entry = found[op]
    if entry is None:
        return "rule"
    tiles = [most for most, numbers in entry.tiles.items() if numbers]
    covered = any(rows <= most for most in tiles) if is_early(op) else row_bucket(rows) in tiles
    return entry.source if covered else "rule"


def sources(decided: Decided, card: Card) -> dict[str, dict[int, str]]:
    """Junction, with its sizes where a model has several -> rows -> source."""
    found: dict[tuple[str, tuple[int, int]], dict[int, str]] = {}
    for rows in ROWS:
        for product, op in decided(rows).items():
            known = found.setdefault((product.junction, product.size), {})
            told = source(product, op, rows, card)
            known[rows] = max(told, known.get(rows, told), key=list(NAMES).index)  # what is guessed anywhere is guessed
    names = [name for name, _ in found]
    return {
        name if names.count(name) == 1 else f"{name} [{size[0]}, {size[1]}]": of_rows
        for (name, size), of_rows in found.items()
    }


def describe(decided: Decided, device: torch.device) -> str:
    """A line for the log of a start; empty where there is nothing to choose among."""
    if not runs_gluon(device):
        return ""
    found = sources(decided, card_of(device))
    parts = []
    for kind, name in NAMES.items():
        told = [f"{junction}{spans(of_rows, kind)}" for junction, of_rows in found.items() if kind in of_rows.values()]
        parts += [f"{name}: {', '.join(told)}"] if told else []
    advice = "; headway tune MODEL measures these" if any("rule" in each.values() for each in found.values()) else ""
    return f"tiles of linear layers {'; '.join(parts)}{advice}" if parts else ""


def spans(of_rows: Mapping[int, str], kind: str) -> str:
    """The numbers of rows whose source is ``kind``: "" for all of them, else as in " (1 to 8, 64 rows)"."""
    if set(of_rows.values()) == {kind}:
        return ""
    places = [i for i, rows in enumerate(ROWS) if of_rows.get(rows) == kind]
    starts = places[:1] + [b for a, b in pairwise(places) if b != a + 1]
    ends = [a for a, b in pairwise(places) if b != a + 1] + places[-1:]
    return f" ({', '.join(_span(ROWS[a], ROWS[b]) for a, b in zip(starts, ends, strict=True))} rows)"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"

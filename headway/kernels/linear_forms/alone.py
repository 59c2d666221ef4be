"""Finds the fastest ops and tiles of single products: of models whose layers are not those of ``search``. Imports no Triton.

Models with norms behind their products, with layers that lack a half, ranks that share a product: what their starts take is
measured product by product, with the norm that a form needs beside it. Products that take their forms together are added up.
What times a product is a ``Bench``, so that all the rest runs without a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headway.kernels.linear_forms.card import Card
from headway.kernels.linear_forms.proposals import proposals
from headway.kernels.linear_forms.shapes import Group, Product
from headway.kernels.linear_forms.table import Key, Numbers, merge
from headway.kernels.linear_forms.winners import WAYS, Form, entries
from headway.kernels.mid_linear.rule import GROUPS
from headway.kernels.mid_linear.tile import is_early
from headway.kernels.mid_linear.tiles import MAX_ROWS as MOST_EARLY
from headway.kernels.skinny_linear.tiles import MAX_ROWS as MOST_FEW

PLAIN: Form = ("plain", None)
Work = tuple[Product, int, Form]
"""A product, rows, and the form to time it with."""


class Bench(Protocol):
    """Times products."""

    def compile(self, work: Sequence[Work]) -> int:
        """Have the kernels compiled that ``work`` launches; returns how many there are."""

    def us(self, product: Product, rows: int, form: Form) -> float:
        """Microseconds of ``product`` with what stands around it.

        Raises:
            Exception: the form gives something else than float32 products, or does not run.
        """


@dataclass(frozen=True, slots=True)
class TimedAlone:
    """A form that was timed: microseconds, and the rule's prediction, which knows other surroundings."""

    product: Product
    rows: int
    form: Form
    us: float
    predicted: float


@dataclass(slots=True)
class FoundAlone:
    """What was found.

    Attributes:
        entries: of the table.
        timed: every form that was timed; those that a start would take without these times come first of their op.
        failed: forms that are wrong or do not run, and why.
        left: products for which there was no time; they have no entries.
    """

    entries: dict[Key, dict[int, Numbers]] = field(default_factory=dict)
    timed: list[TimedAlone] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[Product] = field(default_factory=list)


class Alone:
    """Measures groups of products.

    Args:
        most: tiles of an op that are tried for a number of rows.
        until: ``time.monotonic()`` at which it ends with the groups that it has.
    """

    def __init__(self, bench: Bench, card: Card, *, most: int, until: float, say: Callable[[str], object]) -> None:
        self.bench, self.card, self.most, self.until, self.say = bench, card, most, until, say
        self._best: dict[tuple[Product, int, str], tuple[float, Form] | None] = {}

    def run(self, groups: Sequence[Group], all_rows: Sequence[int]) -> FoundAlone:
        """Measure ``groups`` for numbers of decoding rows."""
        found, begin = FoundAlone(), time.monotonic()
        products = dict.fromkeys(product for group in groups for product in group)
        work = [
            (product, rows, form)
            for product in products
            for rows in all_rows
            for op in dict.fromkeys(op for _, op in product.ops)
            for _, form in self._forms(product, rows, op)
        ]
        count = self.bench.compile(work)
        self.say(f"  compiled or found {count} kernels in {time.monotonic() - begin:.0f} s")
        for group in groups:
            times = {way: self._times(group, way, all_rows, found) for way in WAYS}
            if time.monotonic() > self.until:
                found.left += group
                continue
            ways = {way: {each.junction: (dict(each.ops)[way], *each.size) for each in group if way in dict(each.ops)}
                    for way in WAYS if way != "plain" and _has(group, way)}  # fmt: skip
            found.entries = merge(found.entries, entries(ways, times))
            self._tell(group, times)
        return found

    def _forms(self, product: Product, rows: int, op: str) -> list[tuple[float, Form]]:
        if rows > (MOST_EARLY if is_early(op) else MOST_FEW):
            return []
        told = (
            next(most for most in GROUPS if rows <= most) if is_early(op) else rows
        )  # one set of kernels for 1 to 16 rows
        return proposals(op, told, *product.size, self.card, self.most)

    def _times(
        self, group: Group, way: str, all_rows: Sequence[int], found: FoundAlone
    ) -> dict[int, tuple[float, dict[str, Form]]]:
        """Of all products of the group by one way; rows for which one of them has no form are left out."""
        times: dict[int, tuple[float, dict[str, Form]]] = {}
        for rows in all_rows if _has(group, way) else ():
            best = {each.junction: self._best_of(each, rows, dict(each.ops).get(way, "plain"), found) for each in group}
            known = {junction: each for junction, each in best.items() if each is not None}
            if len(known) == len(best):
                times[rows] = sum(us for us, _ in known.values()), {name: form for name, (_, form) in known.items()}
        return times

    def _best_of(self, product: Product, rows: int, op: str, found: FoundAlone) -> tuple[float, Form] | None:
        """The fastest form of an op; None: none is right, or the time is up."""
        key = product, rows, op
        if key not in self._best:
            forms = [(0.0, PLAIN)] if op == "plain" else self._forms(product, rows, op)
            timed = [each for us, form in forms if (each := self._time(product, rows, form, us, found)) is not None]
            found.timed += timed
            self._best[key] = min(((each.us, each.form) for each in timed), key=lambda pair: pair[0], default=None)
        return self._best[key]

    def _time(self, product: Product, rows: int, form: Form, predicted: float, found: FoundAlone) -> TimedAlone | None:
        if time.monotonic() > self.until:
            return None
        try:
            return TimedAlone(product, rows, form, self.bench.us(product, rows, form), predicted)
        except Exception as error:
            what = f"{rows} rows {product.junction} {list(product.size)} {form}"
            found.failed.append(f"{what}: {type(error).__name__} {' '.join(str(error).split())[:160]}")
            return None

    def _tell(self, group: Group, times: dict[str, dict[int, tuple[float, dict[str, Form]]]]) -> None:
        names = ", ".join(f"{each.junction} [{each.outputs}, {each.inputs}]" for each in group)
        for rows in sorted({rows for of_way in times.values() for rows in of_way}):
            told = ", ".join(f"{way} {of_way[rows][0]:.2f}" for way, of_way in times.items() if rows in of_way)
            self.say(f"  {names}, {rows} rows: {told} us")


def _has(group: Group, way: str) -> bool:
    """Whether a product of the group has an op for ``way``; others run ``F.linear`` then."""
    return way == "plain" or any(way in dict(product.ops) for product in group)

"""Times by a formula in place of a card's: all of ``linear_forms.alone`` but the timing runs without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headway.kernels.linear_forms import table
from headway.kernels.linear_forms.alone import Alone, FoundAlone, Work
from headway.kernels.linear_forms.bare import handover_by_rule
from headway.kernels.linear_forms.card import H200
from headway.kernels.linear_forms.shapes import Group, Product
from headway.kernels.linear_forms.winners import Form
from headway.kernels.mid_linear.tiles import measured_tiles as early_tiles
from headway.kernels.skinny_linear.tiles import measured_tiles as few_tiles

Times = Callable[[Product, int, Form], float]


class FakeBench:
    """Times of ``times``; asks that everything is compiled before it is timed."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.compiled: set[Work] = set()

    def compile(self, work: Sequence[Work]) -> int:
        self.compiled |= set(work)
        return len(self.compiled)

    def us(self, product: Product, rows: int, form: Form) -> float:
        assert form[1] is None or (product, rows, form) in self.compiled, "compiled while it is timed"
        return self.times(product, rows, form)


def measure(
    groups: Sequence[Group], rows: Sequence[int], times: Times, *, most: int = 3, until: float = float("inf")
) -> FoundAlone:
    """What ``headway tune`` would write if kernels took ``times``."""
    return Alone(FakeBench(times), H200, most=most, until=until, say=lambda _: None).run(groups, rows)


@contextmanager
def tuned(found: FoundAlone | None = None) -> Iterator[Path]:
    """Inside, starts read what was ``found``; XDG_CACHE_HOME must be a folder of the test."""
    caches = (table.tables, few_tiles, early_tiles, handover_by_rule)
    path = table.save_tuned(H200, found.entries) if found is not None else table.tuned_path(H200)
    for each in caches:
        each.cache_clear()
    try:
        yield path
    finally:
        for each in caches:
            each.cache_clear()

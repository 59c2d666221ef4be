"""A histogram in plain numbers: what metrics are kept in, on both sides of the engine's socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec


class Histogram(msgspec.Struct, array_like=True):
    """Counts of observed values by bucket. Observing costs a fraction of a microsecond and allocates nothing.

    Attributes:
        bounds: ascending upper bounds, inclusive; values above the last one count in a bucket of their own.
        counts: observations per bucket, ``len(bounds) + 1`` of them, not cumulative.
        total: sum of all values observed.
    """

    bounds: tuple[float, ...] = ()
    counts: list[int] = []
    total: float = 0.0

    @classmethod
    def over(cls, bounds: Iterable[float]) -> Histogram:
        """An empty histogram with these upper bounds."""
        kept = tuple(bounds)
        return cls(kept, [0] * (len(kept) + 1))

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """A snapshot that later observations leave alone."""
        return Histogram(self.bounds, list(self.counts), self.total)

"""Decimal integers between two bounds, as digit patterns."""

from __future__ import annotations

MAX_DIGITS = 16
"""Longest integer written without bounds, and longest part of a number: what a double still tells apart."""

Digits = list[tuple[int, int]]
"""One (lowest, highest) digit per place."""


def between(low: int, high: int) -> list[Digits]:
    """Patterns that together spell exactly the integers low..high, 0 <= low <= high, without leading zeros."""
    found: list[Digits] = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        found += _same_length(str(low), str(end))
        low = end + 1
    return found


def _same_length(low: str, high: str) -> list[Digits]:
    """Both ends have the same number of digits."""
    if not low:
        return [[]]
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [[(first, first), *rest] for rest in _same_length(low[1:], high[1:])]
    found: list[Digits] = []
    count = len(low) - 1
    if low[1:] != "0" * count:
        found += [[(first, first), *rest] for rest in _same_length(low[1:], "9" * count)]
        first += 1
    tail: list[Digits] = []
    if high[1:] != "9" * count:
        tail = [[(last, last), *rest] for rest in _same_length("0" * count, high[1:])]
        last -= 1
    if first <= last:
        found.append([(first, last), *[(0, 9)] * count])
    return found + tail

"""Decimal integers and numbers between two bounds, as digit patterns."""

from __future__ import annotations

import math
from fractions import Fraction

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


MAX_FRACTION = 9
"""Longest fraction of a number with bounds, in digits. With more, a number that is within them as it is written could be
rounded to one that is not.
"""
MAX_MULTIPLES = 2000


def number_pattern(low: Fraction | None, low_open: bool, high: Fraction | None, high_open: bool) -> str:
    """A regular expression of decimal numbers within bounds, "" where there is none.

    Args:
        low_open, high_open: the bound itself is left out.
    """
    limit = Fraction(10**MAX_DIGITS - 1)
    given = [len(str(int(abs(each)))) for each in (low, high) if each is not None]
    places = max(0, min(MAX_FRACTION, MAX_DIGITS - 1 - max(given, default=1)))
    if low is None or low < -limit:
        low, low_open = -limit, False
    if high is None or high > limit:
        high, high_open = limit, False
    unit = 10**places
    # In units of the last place, bounds included.
    least, most = math.ceil(low * unit), math.floor(high * unit)
    least += low_open and low * unit == least
    most -= high_open and high * unit == most
    parts = []
    if least < 0:
        parts += ["-" + each for each in _decimals(max(1, -most), -least, places)]
    if most >= 0:
        parts += _decimals(max(0, least), most, places)
    return "|".join(parts)


def _decimals(least: int, most: int, places: int) -> list[str]:
    """Patterns of least..most, both >= 0, in units of 10 ** -places."""
    if least > most:
        return []
    unit = 10**places
    (first, rest), (last, end) = divmod(least, unit), divmod(most, unit)
    if first == last:
        return [f"{first}{_fraction(rest, end, places)}"]
    found = []
    if rest:
        found.append(f"{first}{_fraction(rest, unit - 1, places)}")
        first += 1
    if end != unit - 1:
        found.append(f"{last}{_fraction(0, end, places)}")
        last -= 1
    if first <= last:
        whole = "|".join("".join(_digit(*each) for each in digits) for digits in between(first, last))
        found.append(f"(?:{whole}){_fraction(0, unit - 1, places)}")
    return found


def _fraction(least: int, most: int, places: int) -> str:
    """What may stand behind the whole part: least..most in units of the last place, with or without zeros at the end."""
    if not places:
        return ""
    written = []
    for digits in _same_length(f"{least:0{places}}", f"{most:0{places}}"):
        kept = len(digits)
        while kept > 0 and digits[kept - 1][0] == 0:
            kept -= 1
        fixed = max(kept, 1)
        head = "".join(_digit(*each) for each in digits[:fixed])
        tail = ""
        for each in reversed(digits[fixed:]):
            tail = f"(?:{_digit(*each)}{tail})?"
        if all(each == (0, 9) for each in digits[fixed:]) and digits[fixed:]:
            tail = f"[0-9]{{0,{places - fixed}}}"
        written.append(head + tail)
    pattern = f"\\.(?:{'|'.join(written)})"
    return f"(?:{pattern})?" if least == 0 else pattern


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def multiples(of: int, low: int | None, high: int | None) -> list[int]:
    """Multiples within bounds, up to MAX_MULTIPLES of them: those nearest to the lower bound, or to zero without one."""
    limit = 10**MAX_DIGITS - 1
    least = -limit if low is None else max(low, -limit)
    most = limit if high is None else min(high, limit)
    first, last = -(-least // of), most // of
    if last - first >= MAX_MULTIPLES:
        if low is None and high is None:
            first, last = -(MAX_MULTIPLES // 2), MAX_MULTIPLES // 2 - 1
        elif low is None:
            first = last - MAX_MULTIPLES + 1
        elif first < 0 <= last:
            first = max(first, -(MAX_MULTIPLES // 2))
        last = min(last, first + MAX_MULTIPLES - 1)
    return [of * each for each in range(first, last + 1)]

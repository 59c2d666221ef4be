"""Sets of Unicode characters, and the byte sequences that UTF-8 makes of them."""

from __future__ import annotations

from collections.abc import Iterable

Range = tuple[int, int]
CharSet = tuple[Range, ...]
"""Ascending, disjoint ranges of code points, both ends included; never surrogates."""

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
_LENGTH_ENDS = (0x7F, 0x7FF, 0xFFFF, _LAST)


def charset(ranges: Iterable[Range]) -> CharSet:
    """Any ranges, put in order, joined, and without surrogates."""
    kept: list[Range] = []
    for low, high in sorted(ranges):
        if kept and low <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(kept[-1][1], high))
        elif low <= high:
            kept.append((low, high))
    return _without_surrogates(kept)


def _without_surrogates(ranges: list[Range]) -> CharSet:
    first, last = _SURROGATES
    parts = [part for low, high in ranges for part in ((low, min(high, first - 1)), (max(low, last + 1), high))]
    return tuple((low, high) for low, high in parts if low <= high)


def of(text: str) -> CharSet:
    """The characters of ``text``."""
    return charset((ord(c), ord(c)) for c in text)


def union(*sets: CharSet) -> CharSet:
    """The characters of any of the sets."""
    return charset(part for each in sets for part in each)


def complement(chars: CharSet) -> CharSet:
    """Every other character."""
    gaps, start = [], 0
    for low, high in chars:
        gaps.append((start, low - 1))
        start = high + 1
    return charset([*gaps, (start, _LAST)])


def minus(chars: CharSet, others: CharSet) -> CharSet:
    """The characters that are not among ``others``."""
    return complement(union(complement(chars), others))


EVERY: CharSet = charset([(0, _LAST)])
DIGITS: CharSet = of("0123456789")
WORDS: CharSet = charset([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_BLANKS = [(9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_BLANKS += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
SPACES: CharSet = charset(_BLANKS)
"""What Python's ``str.isspace`` calls blank."""
NOT_ASCII: CharSet = charset([(0x80, _LAST)])

Sequence = tuple[Range, ...]
"""One range per byte."""


def utf8(chars: CharSet) -> list[Sequence]:
    """Byte sequences that together spell exactly the characters of the set."""
    found: list[Sequence] = []
    for low, high in chars:
        for end in _LENGTH_ENDS:
            if low <= end:
                _split(low, min(high, end), found)
                low = end + 1
            if low > high:
                break
    return found


def _split(low: int, high: int, found: list[Sequence]) -> None:
    """Cut a range of equally long characters until each byte varies freely."""
    count = len(chr(low).encode())
    for i in range(1, count):
        mask = (1 << 6 * i) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                _split(low, low | mask, found)
                _split((low | mask) + 1, high, found)
                return
            if high & mask != mask:
                _split(low, (high & ~mask) - 1, found)
                _split(high & ~mask, high, found)
                return
    found.append(tuple(zip(chr(low).encode(), chr(high).encode(), strict=True)))

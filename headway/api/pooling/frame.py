"""What a model wants around a text, and around two texts: special tokens and types of tokens.

A pair is composed of texts that were tokenised one by one, so that a query with a thousand documents is tokenised once. A
tokenizer treats the parts of a pair alike, each for itself, before its post-processor puts special tokens around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

PROBES = (("a", "b"), ("the", "and"), ("1", "2"))
"""Texts of which a tokenizer must make something to show its frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Special tokens around one text, or two.

    Attributes:
        before, between, after: token ids; nothing is between where there is one text.
        types: of the tokens before, of the first text, between, of the second text, and after; 0 or 1 each.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types: tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]] = ((), 0, (), 0, ())

    @property
    def size(self) -> int:
        """Tokens of its own."""
        return len(self.before) + len(self.between) + len(self.after)

    def single(self, ids: list[int]) -> list[int]:
        """One text within it."""
        return [*self.before, *ids, *self.after] if self.size else ids

    def pair(self, first: list[int], second: list[int]) -> list[int]:
        """Two texts within it."""
        return [*self.before, *first, *self.between, *second, *self.after]

    def type_range(self, first: int, second: int) -> tuple[int, int] | None:
        """[start, end) of the tokens of type 1, of texts with so many tokens; None where all are of type 0.

        Raises:
            ValueError: they are no range.
        """
        head, one, mid, two, tail = self.types
        kinds = [*head, *[one] * first, *mid, *[two] * second, *tail]
        if 1 not in kinds:
            return None
        start = kinds.index(1)
        end = start + sum(kinds)
        if not all(kinds[start:end]) or set(kinds) - {0, 1}:
            raise ValueError("tokens of type 1 are not next to each other")
        return start, end


def single_frame(backend: tokenizers.Tokenizer) -> Frame | None:
    """The frame around one text; None where the tokenizer does not put a fixed one there."""
    for text, _ in PROBES:
        whole = backend.encode(text, add_special_tokens=True)
        where = [i for i, number in enumerate(whole.sequence_ids) if number == 0]
        if not where:
            continue
        frame = Frame(before=tuple(whole.ids[: where[0]]), after=tuple(whole.ids[where[-1] + 1 :]))
        bare = backend.encode(text, add_special_tokens=False).ids
        return frame if frame.single(bare) == whole.ids else None
    return None


def pair_frame(backend: tokenizers.Tokenizer) -> Frame | None:
    """The frame around two texts; None where the tokenizer does not put a fixed one there."""
    for one, two in PROBES:
        whole = backend.encode(one, two, add_special_tokens=True)
        first = [i for i, number in enumerate(whole.sequence_ids) if number == 0]
        second = [i for i, number in enumerate(whole.sequence_ids) if number == 1]
        if not first or not second:
            continue
        ids, types = tuple(whole.ids), tuple(whole.type_ids)
        a, b, c, d = first[0], first[-1] + 1, second[0], second[-1] + 1
        frame = Frame(ids[:a], ids[b:c], ids[d:], (types[:a], types[a], types[b:c], types[c], types[d:]))
        bare = [backend.encode(text, add_special_tokens=False).ids for text in (one, two)]
        return frame if frame.pair(bare[0], bare[1]) == whole.ids else None
    return None


def cut_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that two texts keep when both together may have ``room``: the longer one is cut first, as Hugging Face's
    "longest_first" does.
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if first <= second else (long, short)

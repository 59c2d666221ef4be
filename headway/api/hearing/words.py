"""Words of a transcript and when they are spoken: tokens joined to words, with the times that the decoder's attention gives.

As Whisper's authors have it (openai/whisper, timing.py and tokenizer.py): words begin at spaces, and punctuation belongs to the
word that it touches; languages that are written without spaces have a word for each character or run of bytes that is text.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Final

from headway.api.hearing.transcript import Word

WITHOUT_SPACES: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
OPENING: Final = frozenset("\"'“¡¿([{-")
CLOSING: Final = frozenset("\"'.。,，!！?？:：”)]}、")
UNFINISHED: Final = "\ufffd"
"""What a decoder writes for bytes that are not yet a character."""

Decode = Callable[[list[int]], str]
Part = tuple[str, int]
"""Text, and how many tokens it has."""


def timed_words(tokens: Sequence[int], times: Sequence[float], language: str, decode: Decode) -> list[Word]:
    """The words of a text.

    Args:
        tokens: of the text.
        times: when each begins, and when the text ends: one more than tokens. Rising; seconds.
        language: its code.
        decode: tokens -> text.
    """
    parts = _characters(tokens, decode)
    if language not in WITHOUT_SPACES:
        parts = _spaced(parts)
    found, at = [], 0
    for text, count in parts:
        found.append(Word(text, times[at], times[at + count]))
        at += count
    whole = _closed(_opened(found))
    return [Word(each.word.strip(), each.start, each.end) for each in whole if each.word.strip()]


def _characters(tokens: Sequence[int], decode: Decode) -> list[Part]:
    """The fewest tokens at a time that are text, in order. Bytes that never become a character stay with what follows them."""
    text, found, begin, said = decode(list(tokens)), [], 0, 0
    for end in range(1, len(tokens) + 1):
        piece = decode(list(tokens[begin:end]))
        cut = piece.find(UNFINISHED)
        # The text itself may have this character, where the model wrote bytes that are none.
        if cut < 0 or text[said + cut : said + cut + 1] == UNFINISHED:
            found.append((piece, end - begin))
            begin, said = end, said + len(piece)
    return [*found, (decode(list(tokens[begin:])), len(tokens) - begin)] if begin < len(tokens) else found


def _spaced(parts: Sequence[Part]) -> list[Part]:
    """Joined to words: one begins where there is a space, and each punctuation mark is one."""
    found: list[Part] = []
    for text, count in parts:
        mark = text.strip() in string.punctuation
        if found and not text.startswith(" ") and not mark:
            found[-1] = (found[-1][0] + text, found[-1][1] + count)
        else:
            found.append((text, count))
    return found


def _opened(words: Sequence[Word]) -> list[Word]:
    """Marks behind a space that open something are part of the word behind them, whose times remain."""
    found: list[Word] = []
    for word in reversed(words):
        mark = word.word.strip()
        if found and word.word.startswith(" ") and mark and mark in OPENING:
            found[-1] = Word(word.word + found[-1].word, found[-1].start, found[-1].end)
        else:
            found.append(word)
    return found[::-1]


def _closed(words: Sequence[Word]) -> list[Word]:
    """Marks that close something are part of the word ahead of them, whose times remain."""
    found: list[Word] = []
    for word in words:
        if found and not found[-1].word.endswith(" ") and word.word in CLOSING:
            found[-1] = Word(found[-1].word + word.word, found[-1].start, found[-1].end)
        else:
            found.append(word)
    return found

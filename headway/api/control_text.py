"""Control tokens that somebody spells in a text, such as ``<|im_end|>`` in a message, and how they stay text.

Tokenizers find their special tokens wherever these are spelled, so a user could close his own turn and open a system's.
Before a template sees a conversation, a *mark*, a character that occurs nowhere in it, is put behind the first character
of each control token that the conversation spells. What the template itself writes has no marks. A twin of the tokenizer
then drops marks only after special tokens were looked for. A conversation that spells none is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from headway.core.errors import InvalidRequestError

MARKS: Final = "\ufdd0\ufdd1"
"""Noncharacters: Unicode keeps them for programs' own use, no text needs them. Few, as a tokenizer needs a twin for each."""


class MarkedText(str):
    """A text that spells control tokens which are to stay text.

    Attributes:
        marked: the same text with marks.
        mark: the character.
    """

    marked: str
    mark: str

    @classmethod
    def of(cls, marked: str, mark: str) -> MarkedText:
        """The text of which ``marked`` is the marked form."""
        made = cls(marked.replace(mark, ""))
        made.marked, made.mark = marked, mark
        return made


class ControlTexts:
    """The control tokens of one tokenizer, by their texts.

    Args:
        texts: what spells them; [] finds nothing.
        ignore_case: the tokenizer does not tell upper from lower case.
    """

    def __init__(self, texts: Iterable[str], ignore_case: bool = False) -> None:
        self.texts = sorted({text for text in texts if text}, key=len, reverse=True)
        self.ignore_case = ignore_case
        self._longest = max(map(len, self.texts), default=0)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
        """One control token; the place where one begins. Made when first needed: vocabularies with thousands are known."""
        if not self.texts:
            return None
        whole, flags = "|".join(map(re.escape, self.texts)), re.IGNORECASE if self.ignore_case else 0
        return re.compile(whole, flags), re.compile(f"(?={whole})", flags)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        folded = [self._folded(text) for text in self.texts]
        return frozenset(text[:count] for text in folded for count in range(1, len(text)))

    def _folded(self, text: str) -> str:
        return text.lower() if self.ignore_case else text

    def find(self, text: str) -> list[int]:
        """Where control tokens begin in ``text``, and where one may begin at its end to go on in a string behind it."""
        if self._patterns is None:
            return []
        whole, starts = self._patterns
        found = [match.start() for match in starts.finditer(text)] if whole.search(text) else []
        end = text.rstrip()  # templates strip
        for count in range(min(self._longest - 1, len(end)), 0, -1):
            if self._folded(end[-count:]) in self._beginnings and len(end) - count not in found:
                found.append(len(end) - count)
        return sorted(found)

    def spelled(self, text: str) -> bool:
        """Whether ``text`` holds a whole control token."""
        return self._patterns is not None and self._patterns[0].search(text) is not None

    def marked(self, text: str, mark: str) -> str:
        """``text`` with a mark behind the first character of each control token."""
        parts, done = [], 0
        for start in self.find(text):
            parts += [text[done : start + 1], mark]
            done = start + 1
        return "".join([*parts, text[done:]])

    def as_text(self, text: str) -> str:
        """``text`` such that none of its control tokens is one: a MarkedText where it spells any."""
        if not self.find(text):
            return text
        mark = free_mark([text])
        return MarkedText.of(self.marked(text, mark), mark)

    def mark_all(self, value: Any, mark: str) -> Any:
        """Plain JSON data with all its strings, keys too, marked."""
        if isinstance(value, str):
            return self.marked(value, mark)
        if isinstance(value, Mapping):
            return {self.marked(key, mark): self.mark_all(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark_all(item, mark) for item in value]
        return value


def strings(value: Any) -> Iterator[str]:
    """All strings of plain JSON data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def free_mark(texts: Sequence[str]) -> str:
    """A mark that occurs in none of the texts. Raises InvalidRequestError: there is none."""
    for mark in MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise InvalidRequestError(
        "a text that spells control tokens may not hold U+FDD0 and U+FDD1, which are not characters"
    )

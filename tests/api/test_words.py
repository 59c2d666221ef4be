"""Words of a transcript: tokens are joined as transformers does it, and times are those of what is spoken."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from headway.api.hearing.transcript import Word
from headway.api.hearing.words import timed_words

TEXTS = {
    "en": [
        " Hello there, world.",
        ' He said: "No!" (and left) - it\'s 5.30',
        "No space first",
        "...",
        " ",
        "a - b",
        " \"'A'\" ",
    ],
    "es": [" ¿Qué? ¡No!  Sí…", " naïve café"],
    "zh": ["你好，世界。", "“好”吗？"],
    "ja": ["ありがとう、 です"],
}
NAMES = {"en": "english", "es": "spanish", "zh": "chinese", "ja": "japanese"}


def pieces_of(text: str, seed: int) -> list[bytes]:
    """Its bytes, cut anywhere."""
    rng, data, found = random.Random(seed), text.encode(), []
    while data:
        size = rng.choice([1, 1, 2, 3, 5])
        found.append(data[:size])
        data = data[size:]
    return found


@pytest.mark.parametrize(("language", "text"), [(code, text) for code, texts in TEXTS.items() for text in texts])
def test_words_are_those_of_transformers(language: str, text: str) -> None:
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    for seed in range(20):
        pieces = pieces_of(text, seed)

        def decode(ids: list[int], pieces: list[bytes] = pieces, **_: Any) -> str:
            return b"".join(pieces[i] for i in ids).decode(errors="replace")

        tokens = list(range(len(pieces)))
        whole: Any = SimpleNamespace(decode=decode, eos_token_id=10**6)
        theirs, ids, _ = _combine_tokens_into_words(whole, tokens, NAMES[language])
        found = timed_words(tokens, [float(i) for i in range(len(tokens) + 1)], language, decode)
        assert [each.word for each in found] == [word.strip() for word in theirs if word.strip()], seed
        for word, own in zip(found, [own for word, own in zip(theirs, ids, strict=True) if word.strip()], strict=True):
            assert own[0] <= word.start < word.end <= own[-1] + 1  # without the marks around it


def decode(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


PIECES = [b" (", b"Hel", b"lo", b")", b",", b" caf", b"\xc3", b"\xa9", b"\xff", b"\xe4\xbd", b' "', b" Hel"]


def test_times_are_of_what_is_spoken() -> None:
    """Neither the mark ahead nor those behind a word change its times; a character of two tokens is not cut."""
    found = timed_words([10, 11, 2, 3, 4, 5, 6, 7], [0.0, 0.5, 0.7, 1.0, 1.2, 2.0, 2.5, 2.5, 3.0], "en", decode)
    assert found == [Word('" Hello),', 0.5, 1.0), Word("café", 2.0, 3.0)]


def test_bytes_that_are_no_text_are_kept() -> None:
    """At the end, and where the model wrote them."""
    found = timed_words([1, 2, 8, 5, 9], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "en", decode)
    assert found == [Word("Hello\ufffd", 0.0, 3.0), Word("caf\ufffd", 3.0, 5.0)]
    assert timed_words([], [1.0], "en", decode) == []

"""Stop strings where they begin, end and overlap: what is shown at once, what is held back, what ends the text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.api.detokenizer import Detokenizer
from headway.core.params import SamplingParams


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def new_stream(self, tail: object, skip: bool) -> Any:
        return SimpleNamespace(step=lambda token: self._texts[token], flush=lambda: "")


def expected(texts: list[str], params: SamplingParams) -> tuple[list[str], int | None]:
    """(what may be shown after each token, tokens until a stop string is complete), by searching the whole text again."""
    shown: list[str] = []
    text = ""
    for number, piece in enumerate(texts, 1):
        before, text = len(text), text + piece
        found = [(text.find(stop, max(0, before - len(stop) + 1)) + len(stop), -len(stop)) for stop in params.stop or []
                 if text.find(stop, max(0, before - len(stop) + 1)) >= 0]  # fmt: skip
        if found:
            end, length = min(found)
            return [*shown, text[:end] if params.include_stop_str_in_output else text[: end + length]], number
        held = max((i for stop in params.stop or [] for i in range(len(stop)) if text.endswith(stop[:i])), default=0)
        shown.append(text[: len(text) - held])
    return shown, None


@given(
    texts=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_text_is_shown_as_soon_as_it_is_certain(texts: list[str], stops: list[str], keep: bool) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep)
    wanted, ends = expected(texts, params)
    made = Detokenizer(Pieces(texts), [1], params)  # type: ignore[arg-type]
    for token, text in enumerate(wanted):
        stopped = made.push([token])
        assert (made.text, stopped) == (text, ends == token + 1)
    if ends is None:
        assert not made.finish() and made.text == "".join(texts)
        assert made.num_tokens == len(texts)
    else:
        assert made.stop in stops and made.num_tokens == ends


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_in_the_last_token_of_an_answer(keep: bool) -> None:
    made = Detokenizer(Pieces(["so", " en", "d"]), [1], SamplingParams(stop="end", include_stop_str_in_output=keep))  # type: ignore[arg-type]
    assert not made.push([0, 1]) and made.text == "so "
    assert made.push([2]) and made.text == ("so end" if keep else "so ")


def test_what_a_stop_token_says_is_no_stop_string() -> None:
    made = Detokenizer(Pieces(["so", "end"]), [1], SamplingParams(stop="end"))  # type: ignore[arg-type]
    assert not made.push([0, 1], ended_by_token=True) and not made.finish() and made.text == "so"

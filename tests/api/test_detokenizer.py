"""Text and stop strings do not depend on how the text was cut into tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.api.detokenizer import Detokenizer, StopMatcher
from headway.core.params import SamplingParams, StructuredOutputsParams
from tests.api.fakes import ByteTokenizer
from tests.engine.fake_core import EOS


def detokenizer(pieces: list[bytes], **params: Any) -> Detokenizer:
    """Token i of the completion has the text ``pieces[i]``."""
    tokenizer = ByteTokenizer(pieces)
    tokenizer.special_ids = frozenset()
    return Detokenizer(cast(Any, tokenizer), [], SamplingParams(**params))


def plain(params: SamplingParams) -> Detokenizer:
    """Token i is byte i."""
    return Detokenizer(cast(Any, ByteTokenizer()), [], params)


def oracle(text: str, stops: list[str], keep: bool) -> tuple[str, str | None, int]:
    """(text, stop string, characters consumed): the first stop string to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keep else end - len(stop)], stop, end
    return text, None, len(text)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


texts = st.text(alphabet="abé€\U0001f600", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=4)


@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=30), st.booleans())
def test_stop_strings_across_any_token_borders(text: str, stops: list[str], cuts: list[int], keep: bool) -> None:
    pieces = cut(text.encode(), cuts)
    expected, stop, consumed = oracle(text, stops, keep)
    detok = detokenizer(pieces, stop=stops, include_stop_str_in_output=keep)
    shown = ""
    stopped = False
    for token in range(len(pieces)):
        stopped = detok.push([token])
        assert detok.text.startswith(shown), "text once shown was taken back"
        shown = detok.text
        assert expected.startswith(shown), "part of a stop string was shown"
        if stopped:
            break
    stopped = stopped or detok.finish()
    assert (detok.text, detok.stop, stopped) == (expected, stop, stop is not None)
    if stop is not None:
        needed = len(text[:consumed].encode())
        lengths = [len(b"".join(pieces[: i + 1])) for i in range(len(pieces))]
        assert detok.num_tokens == next(i + 1 for i, length in enumerate(lengths) if length >= needed)


@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=30), st.lists(st.integers(0, 200), max_size=5))
def test_several_tokens_at_once_are_as_one_by_one(
    text: str, stops: list[str], cuts: list[int], groups: list[int]
) -> None:
    pieces = cut(text.encode(), cuts)
    one, many = detokenizer(pieces, stop=stops), detokenizer(pieces, stop=stops)
    _ = any(one.push([token]) for token in range(len(pieces))) or one.finish()
    borders = [0, *sorted(g % (len(pieces) + 1) for g in groups), len(pieces)]
    _ = any(many.push(list(range(a, b))) for a, b in pairwise(borders)) or many.finish()
    assert (one.text, one.stop, one.num_tokens) == (many.text, many.stop, many.num_tokens)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detok = detokenizer([b"Hello E", b"N", b"X", b" EN", b"D!"], stop=["END"])
    seen = []
    for token in range(5):
        stopped = detok.push([token])
        seen.append(detok.text)
    assert seen == ["Hello ", "Hello ", "Hello ENX", "Hello ENX ", "Hello ENX "]
    assert stopped
    assert detok.stop == "END"


def test_held_text_is_released_at_the_end() -> None:
    detok = detokenizer([b"an EN"], stop=["END"])
    assert not detok.push([0])
    assert detok.text == "an "
    assert not detok.finish()
    assert detok.text == "an EN"


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    detok = detokenizer([b"a;", b"b;", b"c;", b"d"], stop=[";"], min_tokens=2)
    assert [detok.push([token]) for token in range(3)] == [False, False, True]
    assert detok.text == "a;b;c"


@pytest.mark.parametrize("stop", [None, ["nowhere"]])
@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "ab<eos>")])
def test_the_token_that_ends_a_completion_gives_text_only_when_asked(
    keep: bool, text: str, stop: list[str] | None
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=keep, skip_special_tokens=False)
    detok = plain(params)
    detok.push([97, 98, EOS], ended_by_token=True)
    detok.finish()
    assert detok.text == text
    assert detok.num_tokens == 3


def test_special_tokens() -> None:
    shown = plain(SamplingParams(skip_special_tokens=False))
    hidden = plain(SamplingParams())
    for detok in (shown, hidden):
        detok.push([97, EOS, 98])
    assert (shown.text, hidden.text) == ("a<eos>b", "ab")


def test_without_detokenize_tokens_are_only_counted() -> None:
    for detok in (
        plain(SamplingParams(detokenize=False)),
        Detokenizer(None, [], SamplingParams()),
    ):
        assert not detok.push([1, 2])
        assert not detok.finish()
        assert (detok.text, detok.num_tokens) == ("", 2)


def test_an_unfinished_character_shows_at_the_end() -> None:
    detok = plain(SamplingParams())
    detok.push([97, 0xE2, 0x82])
    assert detok.text == "a"
    detok.finish()
    assert detok.text == "a\ufffd"


def test_half_a_character_of_the_prompt_is_no_part_of_a_constrained_answer() -> None:
    """The prompt ends in the first byte of a two-byte character that the answer does not complete."""
    for structured, expected in ((None, "\ufffd[1]"), (StructuredOutputsParams(regex=r"\[1\]"), "[1]")):
        params = SamplingParams(structured_outputs=structured)
        answer = Detokenizer(cast(Any, ByteTokenizer()), [0xC3], params)
        answer.push(list(b"[1]"))
        answer.finish()
        assert answer.text == expected


def test_hostile_stop_strings_cost_one_step_per_character() -> None:
    matcher = StopMatcher(["a" * 1024 + chr(98 + i) for i in range(20)])
    steps = 0
    step = matcher._step

    def counted(state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return step(state, char)

    matcher._step = counted  # type: ignore[method-assign]
    assert matcher.feed("a" * 5000) is None
    assert steps == 5000
    assert matcher.held == 1024

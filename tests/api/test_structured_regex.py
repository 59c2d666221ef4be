"""Patterns as automata mean what ``re.fullmatch`` says: whatever they accept matches, and what matches they accept."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.api.structured import charset
from headway.api.structured.compile import Task, compile_task
from headway.api.structured.integers import between
from headway.core.automaton import Automaton
from tests.examples import examples

ALL_BYTES = bytes(range(256))


def compiled(pattern: str, usable: bytes = ALL_BYTES) -> Automaton:
    outcome = compile_task(Task("regex", pattern, usable))
    assert outcome.automaton is not None, outcome
    outcome.automaton.check()
    return outcome.automaton


def refusal(pattern: str) -> str:
    outcome = compile_task(Task("regex", pattern, ALL_BYTES))
    assert outcome.automaton is None
    return str(outcome.refusal or outcome.not_regular)


def walk_randomly(automaton: Automaton, rng: random.Random, most: int = 60) -> bytes | None:
    """A random accepted text, drawn byte by byte; None when it does not end in time."""
    state, text = automaton.start, b""
    table, width = memoryview(automaton.transitions).cast("H"), automaton.num_classes
    for _ in range(most):
        moves = [b for b in range(256) if table[state * width + automaton.classes[b]]]
        accepts = state >= automaton.first_accepting
        assert moves or accepts, "a state that leads nowhere"
        if accepts and (not moves or rng.random() < 0.3):
            return text
        byte = rng.choice(moves)
        state, text = automaton.walk(state, bytes([byte])), text + bytes([byte])
    return None


PATTERNS = [
    r"[a-zA-Z ,.]+", r"a{1,5}", r"(foo|bar)?baz", r"^abc$", r"^(?:a|b$)", r"\d{3}-\d{4}", r"(?i)ab[c-e]", r"a.b",
    r"(?s)a.b", r"[^a-z]", r"[^\d\s]x", r"\S\W\D", r"\w+@\w+\.(com|org)", r"é[à-ü]?€", r"(a?){3}a{3}", r"(a*)*b",
    "[\U0001f600-\U0001f64f]",
    r"(?:(?:25[0-5]|1?\d?\d)\.){3}\d", r"[\]\-\\^]", r"a+?b*?", r"(?x) a  b # note", r"\x41\u00e9\n\t", r"[^x]{0,3}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_accepted_matches(pattern: str) -> None:
    automaton, rng = compiled(pattern), random.Random(pattern)
    found = [text for _ in range(80) if (text := walk_randomly(automaton, rng)) is not None]
    assert found
    for text in found:
        assert re.fullmatch(pattern, text.decode()), text


@given(
    st.sampled_from([r"[ab]*a[ab]{3}", r"(a|b(c|d)?)+", r"^a{2,4}b?|c$", r"(?i)a[^b]c?", r"(ab|a)(bc|c)?"]), st.data()
)
@examples(300)
def test_short_texts_are_judged_as_re_judges_them(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="abcdA", max_size=8))
    assert compiled(pattern).accepts(text.encode()) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?=a)b", "look-around"),
        (r"(a)\1", "back references"),
        (r"a\bc", "anchor"),
        (r"a$b", "anchor"),
        (r"(?m)^a", "flag"),
        (r"a++", "possessive"),
        (r"(?>a)", "atomic"),
        (r"(", "not valid"),
        (r"(?i)ä", "ASCII"),
        (r"", "empty text"),
        (r"[^\x00-\U0010ffff]", "no text"),
        (r"(a|b)*a(a|b){20}", "transitions"),
        (r"((a{0,200}){0,200}){0,200}", "states"),
        ("(" * 150 + "a" + ")" * 150, "deep"),
    ],
)
def test_what_cannot_be_followed_is_refused(pattern: str, reason: str) -> None:
    assert reason in refusal(pattern)


def test_bytes_without_a_token_are_avoided() -> None:
    assert not compiled("[ab]", b"b").accepts(b"a")
    outcome = compile_task(Task("regex", "a+b", b"a"))
    assert outcome.refusal is not None and "tokens" in outcome.refusal


def test_can_go_on() -> None:
    assert compiled("a+").can_go_on and not compiled("a{1,3}").can_go_on and not compiled("a+;").can_go_on


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)), max_size=4), st.integers(0, 0x10FFFF))
@examples(200)
def test_utf8_of_a_set_of_characters(ranges: list[tuple[int, int]], point: int) -> None:
    chars = charset.charset((min(pair), max(pair)) for pair in ranges)
    candidates = [point, *(edge for pair in ranges for edge in pair)]
    for each in candidates:
        if 0xD800 <= each <= 0xDFFF:
            continue
        data = chr(each).encode()
        spelled = any(
            len(sequence) == len(data) and all(low <= b <= high for (low, high), b in zip(sequence, data, strict=True))
            for sequence in charset.utf8(chars)
        )
        assert spelled == any(low <= each <= high for low, high in chars)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3500))
@examples(300)
def test_digits_between(low: int, high: int, number: int) -> None:
    text = str(number)
    spelled = any(
        len(digits) == len(text) and all(a <= int(d) <= b for (a, b), d in zip(digits, text, strict=True))
        for digits in between(low, high)
    )
    assert spelled == (low <= number <= high)

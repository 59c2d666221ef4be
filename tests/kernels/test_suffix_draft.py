"""``suffix_draft`` against a search written from its definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.cpu import draft_ops
from headway.kernels.suffix_draft import OFF, OWN, PARTS, SHARED, suffix_draft
from tests.examples import examples
from tests.kernels.guarded import expect, ints
from tests.kernels.kept_answers import Kept
from tests.kernels.native_kernel import native_as_kernel, native_function


def matches(text: list[int], mine: list[int], most: int) -> list[int]:
    """How many tokens that end at each place equal the last of ``mine``."""
    found = []
    for place in range(len(text)):
        same = 0
        while same < min(most, place + 1, len(mine)) and text[place - same] == mine[-1 - same]:
            same += 1
        found.append(same)
    return found


def guesses(text: list[int], kept: Kept, reach: int, number: int, most: int, factor: float, least: float) -> list[int]:
    """Drafts of a text, from the definition."""
    runs: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(2 * PARTS)]  # (matched, place, what follows)
    if reach == SHARED:
        for answer, places in kept.texts():
            for i, same in enumerate(matches(answer, text, most)[:-1]):
                runs[places[i] // -(-kept.size // PARTS)].append((same, places[i], answer[i + 1 :]))
    for i, same in enumerate(matches(text, text, most)[:-1]):
        follows = (text[i + 1 :] * (number + 1))[:number]
        runs[PARTS + i // -(-(len(text) - 1) // PARTS)].append((same, i, follows))
    candidates = [max(run) for run in runs if run and max(run)[0] > 0]
    longest = max((same for same, _, _ in candidates), default=0)
    voters = [follows for same, _, follows in candidates if same == longest]
    found: list[int] = []
    chance = 1.0
    while len(found) < min(number, int(factor * longest + 1e-6)):
        i = len(found)
        said = Counter(follows[i] for follows in voters if i < len(follows))
        if not said:
            break
        top = max(said.values())
        token = next(f[i] for f in reversed(voters) if i < len(f) and said[f[i]] == top)
        chance *= top / len(voters)
        if chance < least - 1e-6:
            break
        found.append(token)
        voters = [follows for follows in voters if i < len(follows) and follows[i] == token]
    return found + [text[-1]] * (number - len(found))


def check(
    texts: list[list[int]], scopes: list[int], kept: Kept, number: int, most: int, factor: float, least: float
) -> None:
    length = max(map(len, texts)) + 2
    history = torch.full((len(texts), length), 1, dtype=torch.int32)  # 1 lies behind the known tokens, too
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = ints(text)
    drafts = torch.full((len(texts), number), -5, dtype=torch.int32)
    expected = drafts.clone()
    for slot, (text, reach) in enumerate(zip(texts, scopes, strict=True)):
        if text and reach != OFF:
            expected[slot] = ints(guesses(text, kept, reach, number, most, factor, least))
    slots = ints([-1, *range(len(texts)), len(texts), 2**31 - 1])
    known, (store, cursor) = ints([len(text) for text in texts]), kept.tensors()
    args = (drafts, slots, ints(scopes), history, known, store, cursor, most, factor, least)
    expect(suffix_draft, args, {0: expected})


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    """Of few words, so that everything repeats; rings that are empty, half full, and written over several times."""
    words = st.integers(0, draw(st.integers(1, 3)))
    texts = draw(st.lists(st.lists(words, max_size=40), min_size=1, max_size=3))
    scopes = draw(st.lists(st.sampled_from([OFF, OWN, SHARED, SHARED]), min_size=len(texts), max_size=len(texts)))
    kept = Kept(draw(st.sampled_from([4, 9, 40, 70])), draw(st.integers(1, 5)))
    for answer in draw(st.lists(st.lists(words, min_size=1, max_size=20), max_size=8)):
        kept.add(answer)
    sizes = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    return texts, scopes, kept, *sizes, draw(st.sampled_from([0.5, 1.0, 2.5])), draw(st.sampled_from([0.0, 0.4, 0.7]))


@examples(40)
@given(cases())
def test_native_equals_a_plain_search(case: tuple[Any, ...]) -> None:
    if not draft_ops.available():
        pytest.skip("no C compiler here")
    with native_as_kernel():
        check(*case)


@examples(3)
@given(cases())
def test_triton_equals_a_plain_search(case: tuple[Any, ...]) -> None:
    check(*case)


def test_what_most_say_is_guessed_as_long_as_it_is_likely() -> None:
    kept = Kept(256, 9)
    for answer in ([7, 8, 1, 2, 3, 4], [9, 8, 1, 2, 3, 5], [6, 8, 1, 2, 9, 9]):
        kept.add(answer)
        kept.add([5] * 8)  # so that each lies in a part of its own
    text = [0, 8, 1]
    assert guesses(text, kept, SHARED, 4, 9, 1.0, 0.1) == [2, 3, 1, 1], "a match of two tokens is worth two"
    assert guesses(text, kept, SHARED, 4, 9, 2.0, 0.1) == [2, 3, 5, 1], "of equals the last; then it ends"
    assert guesses(text, kept, SHARED, 4, 9, 2.0, 0.5) == [2, 3, 1, 1], "a third of the answers is too few"
    assert guesses(text, kept, SHARED, 4, 9, 2.0, 0.7) == [2, 1, 1, 1]
    assert guesses(text, kept, OWN, 4, 9, 2.0, 0.1) == [1, 1, 1, 1]
    for factor, least in ((1.0, 0.1), (2.0, 0.1), (2.0, 0.5), (2.0, 0.7)):
        check([text], [SHARED], kept, 4, 9, factor, least)


@pytest.mark.parametrize(
    ("size", "most", "answers", "reach", "wanted"),
    [
        (64, 3, [[8, 1, 2], [5], [6]], SHARED, [2, 1]),
        (64, 2, [[8, 1, 2], [5], [6]], SHARED, [1, 1]),  # two are kept
        (64, 3, [[8, 1, 2], [5], [6]], OWN, [1, 1]),
        (10, 4, [[5], [5, 5], [5, 5], [8, 1, 2]], SHARED, [2, 1]),  # it goes on at the ring's begin
        (10, 9, [[8, 1, 2], [5, 5], [5, 5], [5]], SHARED, [1, 1]),  # it is written over
        (64, 3, [[2, 8, 1]], SHARED, [1, 1]),  # nothing follows
    ],
)
def test_which_answers_count(size: int, most: int, answers: list[list[int]], reach: int, wanted: list[int]) -> None:
    kept = Kept(size, most)
    for answer in answers:
        kept.add(answer)
    assert guesses([0, 8, 1], kept, reach, 2, 9, 1.0, 0.1) == wanted
    check([[0, 8, 1]], [reach], kept, 2, 9, 1.0, 0.1)


def test_a_long_text_is_searched_in_parts() -> None:
    """Of more tokens than a program looks at once."""
    kept = Kept(35_000, 4)
    kept.add([*range(100, 2100), 1, 2, 3, 4])
    text = [*range(3000, 5500), 1, 2, 3]
    assert guesses(text, kept, SHARED, 2, 8, 1.0, 0.1) == [4, 3]
    check([text], [SHARED], kept, 2, 8, 1.0, 0.1)


def test_the_cpu_runs_it() -> None:
    assert not draft_ops.available() or suffix_draft.implementation("cpu") is native_function(suffix_draft)

"""``ngram_draft`` against a search written from its definition."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.cpu import draft_ops
from headway.kernels.ngram_draft import ngram_draft
from headway.kernels.ngram_draft.triton import BLOCK
from tests.examples import examples
from tests.kernels.guarded import expect, ints
from tests.kernels.native_kernel import native_as_kernel, native_function


def guesses(text: list[int], number: int, min_n: int, max_n: int) -> list[int]:
    """Drafts of a text: by the longest suffix that occurred before, and its last occurrence."""
    known = len(text)
    for length in range(min(max_n, known - 1), min_n - 1, -1):
        suffix = text[known - length :]
        for start in range(known - 1 - length, -1, -1):
            if text[start : start + length] == suffix:
                grown = list(text)
                for i in range(number):
                    grown.append(grown[start + length + i])
                return grown[known:]
    return [text[-1]] * number


def check(texts: list[list[int]], slots: list[int], number: int, min_n: int, max_n: int, length: int) -> None:
    history = torch.full((len(texts), length), 7, dtype=torch.int32)  # 7 lies behind the known tokens, too
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = ints(text)
    drafts = torch.full((len(texts), number), -5, dtype=torch.int32)
    expected = drafts.clone()
    for slot in slots:
        if 0 <= slot < len(texts) and texts[slot]:
            expected[slot] = ints(guesses(texts[slot], number, min_n, max_n))
    known = ints([len(text) for text in texts])
    expect(ngram_draft, (drafts, ints(slots), history, known, min_n, max_n), {0: expected})


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=3)


@examples(60)
@given(TEXTS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 4))
def test_native_equals_a_plain_search(texts: list[list[int]], number: int, min_n: int, more: int) -> None:
    """Of few words, so that everything repeats."""
    if not draft_ops.available():
        pytest.skip("no C compiler here")
    with native_as_kernel():
        check(texts, [-1, *range(len(texts)), len(texts), 2**31 - 1], number, min_n, min_n + more, 31)


@examples(12)
@given(TEXTS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 4))
def test_triton_equals_a_plain_search(texts: list[list[int]], number: int, min_n: int, more: int) -> None:
    check(texts, [-1, *range(len(texts)), len(texts), -(2**31)], number, min_n, min_n + more, 31)


def test_a_long_text_is_searched_in_parts() -> None:
    rng = random.Random(3)
    for place in (3, BLOCK - 2, BLOCK - 1, BLOCK, 3 * BLOCK + 1):
        text = [rng.randrange(100, 10**6) for _ in range(4 * BLOCK)]
        text[place : place + 6] = [1, 2, 3, 4, 5, 6]
        text += [1, 2, 3]
        assert guesses(text, 3, 2, 5) == [4, 5, 6]
        check([text, [9]], [0, 1], 3, 2, 5, 4 * BLOCK + 9)


def test_ties_go_to_the_last_and_length_to_the_longest() -> None:
    assert guesses([5, 1, 2, 8, 1, 2, 9, 3, 1, 2], 1, 1, 4) == [9]
    assert guesses([3, 1, 2, 8, 1, 2, 9, 3, 1, 2], 1, 1, 4) == [8]
    assert guesses([3, 1, 2, 8, 1, 2, 9, 3, 1, 2], 1, 1, 2) == [9]
    for text in ([5, 1, 2, 8, 1, 2, 9, 3, 1, 2], [3, 1, 2, 8, 1, 2, 9, 3, 1, 2]):
        for max_n in (2, 4):
            check([text], [0], 4, 1, max_n, 16)


def test_more_known_tokens_than_there_is_room_for() -> None:
    history = ints([[1, 2, 1, 2]])
    args = (ints([[0, 0, 0]]), ints([0]), history, ints([2**31 - 1]), 1, 3)
    expect(ngram_draft, args, {0: ints([[1, 2, 1]])})


def test_the_cpu_runs_it() -> None:
    assert not draft_ops.available() or ngram_draft.implementation("cpu") is native_function(ngram_draft)

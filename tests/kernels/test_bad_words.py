"""``bad_words`` against a plain loop."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.bad_words import bad_words
from headway.kernels.testing import kernel_dtypes
from tests.kernels.guarded import expect, ints

S, L, PHRASES, M = 4, 20, 12, 40


def _tables(words: list[list[list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, offsets, tokens; what lies behind the phrases in use is stale nonsense."""
    counts, offsets, tokens = [], [], []
    for phrases in words:
        ends = [0]
        for phrase in phrases:
            ends.append(ends[-1] + len(phrase))
        flat = [token for phrase in phrases for token in phrase]
        counts.append(len(phrases))
        offsets.append(ends + [3] * (PHRASES + 1 - len(ends)))
        tokens.append(flat + [1] * (M - len(flat)))
    return ints(counts), ints(offsets), ints(tokens)


def _check(
    words: list[list[list[int]]], history: torch.Tensor, known: list[int], prompt: list[int], vocab: int
) -> torch.Tensor:
    slots = [2, -1, 0, 3, S, 1]
    logits = torch.randn(len(slots), vocab)
    expected = logits.clone()
    for n, slot in enumerate(slots):
        if 0 <= slot < S:
            generated = history[slot].tolist()[prompt[slot] : known[slot]]
            for phrase in words[slot]:
                head = phrase[:-1]
                if phrase and len(head) <= len(generated) and generated[len(generated) - len(head) :] == head:
                    if 0 <= phrase[-1] < vocab:
                        expected[n, phrase[-1]] = float("-inf")
    for dtype in kernel_dtypes():
        args = (logits.to(dtype), ints(slots), history, ints(known), ints(prompt), *_tables(words))
        expect(bad_words, args, {0: expected.to(dtype)})
    return expected


@pytest.mark.parametrize("seed", range(20))
def test_random_phrases(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([5, 97, 1031])
    history = ints([[rng.randrange(2) for _ in range(L)] for _ in range(S)])
    known = [rng.randrange(1, L + 1) for _ in range(S)]
    prompt = [rng.randrange(n + 1) for n in known]
    words = []
    for _ in range(S):
        phrases: list[list[int]] = []
        for _ in range(rng.randrange(PHRASES + 1)):
            phrase = [rng.randrange(2) for _ in range(rng.choice([0, 0, 1, 2, 5]))] + [
                rng.choice([*range(5), -1, vocab])
            ]
            if sum(map(len, phrases)) + len(phrase) <= M:
                phrases.append(phrase)
        words.append(phrases)
    _check(words, history, known, prompt, vocab)


def test_the_prompt_never_matches() -> None:
    history = ints([[1, 2, 3, *[0] * (L - 3)]] * S)
    words = [[[2, 3, 4]]] * S
    expected = _check(words, history, [3, 3, 3, 3], [3, 2, 1, 0], vocab=5)
    # slots 2 and 3 generated (2, 3); slots 0 and 1 have part of it in the prompt.
    assert expected[[0, 3], 4].isneginf().all() and not expected[[2, 5], 4].isneginf().any()


def test_empty_phrases_are_dropped() -> None:
    _check([[[]], [[], [3]], [[3], []], []], ints([[0] * L] * S), [5] * S, [1] * S, vocab=5)


def test_offsets_outside_the_table_write_nothing() -> None:
    counts, offsets, tokens = _tables([[[1], [2, 3]]] * S)
    offsets[0, 1] = -5
    offsets[1, 1] = M + 1
    offsets[2, 1:3] = 2**31 - 1
    offsets[3, 0] = -(2**31)
    logits = torch.zeros(2, 5)
    args = (logits, ints([2, 2]), ints([[0] * L] * S), ints([4] * S), ints([4] * S), counts, offsets, tokens)
    expect(bad_words, args, {0: logits})
    from tests.kernels.guarded import run_both

    for slot in (0, 1, 3):
        run_both(bad_words, (logits, ints([slot, slot]), *args[2:]))  # guards hold

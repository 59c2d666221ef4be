"""``suffix_keep`` against a list written from its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.cpu import draft_ops
from headway.kernels.suffix_draft import OFF, OWN, SHARED
from headway.kernels.suffix_keep import suffix_keep
from tests.examples import examples
from tests.kernels.guarded import expect, ints
from tests.kernels.kept_answers import Kept
from tests.kernels.native_kernel import native_as_kernel, native_function


@st.composite
def endings(draw: st.DrawFn) -> tuple[Any, ...]:
    slots, length = draw(st.integers(1, 5)), 24
    kept = Kept(draw(st.sampled_from([4, 7, 64])), draw(st.integers(1, 4)))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        lens = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=slots, max_size=slots))
        flags = st.tuples(st.sampled_from([OFF, OWN, SHARED, SHARED]), st.booleans(), st.booleans())
        steps.append((lens, draw(st.lists(flags, min_size=slots, max_size=slots)), draw(st.permutations(range(slots)))))
    return slots, length, kept, steps


def keep(case: tuple[Any, ...]) -> None:
    slots, length, kept, steps = case
    for number, (lens, flags, order) in enumerate(steps):
        history = torch.arange(slots * length, dtype=torch.int32).view(slots, length) + 1000 * number
        before = kept.tensors()
        rows = [*order, -1, slots]
        for slot in order:
            (prompt, answer), (reach, was_alive, is_alive) = lens[slot], flags[slot]
            if was_alive and not is_alive and reach == SHARED and answer:
                kept.add(history[slot, prompt : prompt + answer].tolist())
        after = kept.tensors()
        seq_lens = ints([int(flags[slot][1]) if 0 <= slot < slots else 0 for slot in rows])
        columns = [ints([each[i] for each in flags]) for i in (0, 2)]
        known = ints([prompt + answer for prompt, answer in lens])
        prompts = ints([prompt for prompt, _ in lens])
        args = (*before, ints(rows), seq_lens, *columns, history, prompts, known)
        expect(suffix_keep, args, {0: after[0], 1: after[1]})


@examples(30)
@given(endings())
def test_native_keeps_what_ends(case: tuple[Any, ...]) -> None:
    if not draft_ops.available():
        pytest.skip("no C compiler here")
    with native_as_kernel():
        keep(case)


@examples(3)
@given(endings())
def test_triton_keeps_what_ends(case: tuple[Any, ...]) -> None:
    keep(case)


def test_the_cpu_runs_it() -> None:
    assert not draft_ops.available() or suffix_keep.implementation("cpu") is native_function(suffix_keep)

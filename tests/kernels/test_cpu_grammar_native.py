"""The native grammar operations: every case of the operations' own tests, and bfloat16 logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.kernels.cpu import grammar_ops
from headway.kernels.grammar_mask import grammar_mask
from tests.kernels import test_grammar_advance, test_grammar_mask
from tests.kernels.grammars import Slots
from tests.kernels.native_kernel import native_as_kernel, poisoned_memory

pytestmark = pytest.mark.skipif(not grammar_ops.available(), reason="no C compiler here")


@pytest.fixture
def native() -> Iterator[None]:
    with native_as_kernel(), poisoned_memory():
        yield


def test_masks(native: None) -> None:
    for vocab in (1, 97, 1031):
        test_grammar_mask.test_forbids_what_the_automaton_cannot_read(vocab, torch.float32)


def test_masks_in_special_cases(native: None) -> None:
    for state in (-1, 0, 9, 2**31 - 1, -(2**31)):
        test_grammar_mask.test_a_state_outside_of_the_automaton_is_dead(state)
    test_grammar_mask.test_numbers_that_lead_out_of_the_table_are_dead()
    test_grammar_mask.test_lengths_beyond_the_words_are_cut()


def test_bfloat16_in_place() -> None:
    made, slots = Slots(5, 1031), [3, -1, 1, 0, 2]
    logits = torch.randn(5, 1031).to(torch.bfloat16)
    expected = test_grammar_mask.forbid(made, slots, logits)
    grammar_mask(*test_grammar_mask.arguments(made, slots, logits))
    assert torch.equal(logits, expected)


def test_advances(native: None) -> None:
    for seed in range(24):
        test_grammar_advance.test_moves_and_reports(seed)
    for length in range(13):
        test_grammar_advance.test_every_byte_of_a_token_is_read(length)
    for ring in (-1, 3, 2**31 - 1):
        test_grammar_advance.test_a_ring_index_outside_of_the_ring_writes_nothing(ring)

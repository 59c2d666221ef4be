"""The native step operations: every case of the operations' own tests, between guards, and what is handed back to torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.kernels.apply_edits import apply_edits
from headway.kernels.count_tokens import count_tokens
from headway.kernels.cpu import step_ops
from headway.kernels.slot_advance import slot_advance
from headway.kernels.step_unpack import step_unpack
from tests.kernels import (
    test_apply_edits,
    test_count_tokens,
    test_runs,
    test_slot_advance,
    test_step_unpack,
)
from tests.kernels.guarded import ints, run, run_both
from tests.kernels.native_kernel import native_as_kernel, native_function

pytestmark = pytest.mark.skipif(not step_ops.available(), reason="no C compiler here")
OUTSIDE = (-1, 2**31 - 1, -(2**31))


@pytest.fixture
def native() -> Iterator[None]:
    with native_as_kernel():
        yield


def test_the_cpu_runs_them() -> None:
    for op in (apply_edits, step_unpack, slot_advance, count_tokens):
        assert op.implementation("cpu") is native_function(op)


@pytest.mark.parametrize("seed", range(10))
def test_apply_edits_equals_slice_assignment(seed: int, native: None) -> None:
    test_apply_edits.test_edits_equal_slice_assignment(seed)


@pytest.mark.parametrize("dst", [-1, 19, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("src", [16, -1, 23, 2**31 - 1])
@pytest.mark.parametrize("size", [2, -5, 2**30, 2**31 - 1])
def test_apply_edits_drops_illegal_edits(dst: int, src: int, size: int, native: None) -> None:
    test_apply_edits.test_illegal_edits_are_dropped_whole((dst, src, size))


def test_apply_edits_at_its_limits(native: None) -> None:
    for edit in ((2, 23, 2), (2, 24, 1), (2, -1, 2), (18, 16, 3), (20, 16, 1)):  # of 24 numbers into 20
        test_apply_edits.test_illegal_edits_are_dropped_whole(edit)
    test_apply_edits.test_an_edit_longer_than_the_limit_is_dropped()
    test_apply_edits.test_no_edits()
    for at, count in ((-3, 2), (10**6, 1), (2**31 - 1, 1), (21, 1)):
        test_apply_edits.test_descriptors_outside_the_buffer_are_dropped(at, count)


@pytest.mark.parametrize("count", [2**31 - 1, 7, -1])
def test_apply_edits_never_goes_past_max_edits(count: int, native: None) -> None:
    arena, packed = torch.zeros(8, dtype=torch.int32), ints([count, 16] + [0] * 14 + [0, 0, 1] * 2 + [4, 2, 1])
    for after, _ in run_both(apply_edits, (arena, packed, 2)):
        assert torch.equal(after[0][1:], arena[1:])


@pytest.mark.parametrize("seed", range(30))
def test_step_unpack_of_random_steps(seed: int, native: None) -> None:
    test_step_unpack.test_random_steps(seed)


@pytest.mark.parametrize("max_query_len", [1, 4])
def test_step_unpack_out_of_range(max_query_len: int, native: None) -> None:
    for slot in (test_step_unpack.S, *OUTSIDE):
        test_step_unpack.test_slots_outside_the_tables(slot, max_query_len)
    for start in (test_step_unpack.L, test_step_unpack.L - 1, *OUTSIDE):
        test_step_unpack.test_positions_outside_the_history(start, max_query_len)


def test_step_unpack_in_special_cases(native: None) -> None:
    for pads in (0, 1, 300):
        test_step_unpack.test_decode_path(pads)
    test_step_unpack.test_null_blocks_and_short_tables_give_no_kv_slot()
    test_step_unpack.test_no_rows()
    test_step_unpack.test_long_row_spans_many_programs()


@pytest.mark.parametrize("place", [2, 3, 4])
@pytest.mark.parametrize("value", [*OUTSIDE, 40])
def test_step_unpack_of_a_nonsense_header(place: int, value: int) -> None:
    """Guards hold, and rows and tokens are those of the reference."""
    inputs = test_step_unpack._inputs([(1, 3, 1), (2, 1, 1)])
    inputs[0][place] = value
    poison = [torch.full((n,), -(2**31), dtype=torch.int32) for n in (6, 6, 6, 4, 3, 3, 3)]
    args = (*inputs, *poison, test_step_unpack.BS, 4)
    native_after, _ = run(step_unpack, native_function(step_unpack), args, "cpu")
    reference_after, _ = run(step_unpack, step_unpack.reference, args, "cpu")
    for index in range(5, 11):
        if place != 2 or value != 40:  # rows past the records are read from what lies behind them
            assert torch.equal(native_after[index], reference_after[index]), index


@pytest.mark.parametrize("seed", range(60))
def test_slot_advance_of_random_states(seed: int, native: None) -> None:
    test_slot_advance.test_random_states(seed)


def test_slot_advance_in_special_cases(native: None) -> None:
    for ring in (test_slot_advance.K, *OUTSIDE):
        test_slot_advance.test_a_ring_index_outside_writes_no_result(ring)
    test_slot_advance.test_a_full_history_is_not_overrun()
    test_slot_advance.test_one_stop_id_per_slot_is_a_flat_table()
    for before, least, most, stops in ((5, 5, 12, (1, 2)), (4, 5, 12, (1, 2)), (4, 5, 5, (1, 2)), (5, 0, 6, (0, 1))):
        test_slot_advance._one(7, before=before, min_total=least, max_total=most, stops=stops, ids=[7, 7, 1, 7, 7])


@pytest.mark.parametrize("before", OUTSIDE)
def test_slot_advance_with_a_nonsense_length(before: int, native: None) -> None:
    state = test_slot_advance._state([(6, 1, 1)], [4])
    state["num_tokens"][6] = before
    args = [state[name] for name in test_slot_advance.NAMES]
    reference, kernel = (after for after, _ in run_both(slot_advance, args))
    for name, a, b in zip(test_slot_advance.NAMES, reference, kernel, strict=True):
        assert name == "results" or name == "alive" or torch.equal(a, b), name


@pytest.mark.parametrize("vocab", [5, 97, 1031, 49152])
@pytest.mark.parametrize("slots", [[0, 3, 4], [-1, 2, 5, 1], [2, 2], [], [-(2**31)]])
def test_count_tokens_rebuilds_rows(vocab: int, slots: list[int], native: None) -> None:
    test_count_tokens.test_rebuilds_the_listed_rows(vocab, slots)


def test_count_tokens_in_special_cases(native: None) -> None:
    test_count_tokens.test_counts_saturate_and_the_prompt_bit_stays()
    test_count_tokens.test_num_tokens_beyond_the_history_reads_nothing_outside()


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_unpacked(seed: int, width: int, native: None) -> None:
    test_runs.test_drafts_follow_the_known_tokens(seed, width)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_runs_are_as_many_single_steps(seed: int, width: int, native: None) -> None:
    test_runs.test_a_run_is_as_many_single_steps(seed, width)
    test_runs.test_rows_of_one_token_need_no_drafts_where_others_may_have_some()


def test_what_the_kernels_do_not_know_is_the_references() -> None:
    arena, packed = torch.zeros(40, dtype=torch.int32), ints([1, 16] + [0] * 14 + [4, 0, 2])
    spread = torch.zeros(2 * packed.numel(), dtype=torch.int32)[::2]
    spread.copy_(packed)
    step_ops.apply_edits(arena, spread, 1)
    assert arena.tolist()[4:6] == [1, 16]

"""Slot tables share one arena; positions, views and edits agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.core.errors import ConfigError
from headway.core.plan import StepPlan
from headway.kernels.apply_edits import apply_edits
from headway.state.packed_step import HEADER_INTS, ROWS_AT, PackedRows, PackedStep, fits_before_rows, segment_ints
from headway.state.slots import SlotArena, Table


def arena() -> SlotArena:
    tables = [Table("a"), Table("b", 3), Table("real", dtype=torch.float32), Table("long", 3000)]
    return SlotArena(tables, 5, torch.device("cpu"))


def test_views_do_not_overlap_and_positions_match() -> None:
    slots = arena()
    for value, name in enumerate(("a", "b", "long"), start=1):
        slots.view(name).fill_(value)
    slots.view("real").fill_(0.5)
    assert slots.view("a").shape == (5,) and slots.view("b").shape == (5, 3)
    slots.ints[slots.position("b", 4, 2)] = 77
    assert slots.view("b")[4].tolist() == [2, 2, 77]
    assert (slots.view("a") == 1).all() and (slots.view("long") == 3).all() and (slots.view("real") == 0.5).all()


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_tables_begin_where_kernels_may_load_sixteen_bytes(num_slots: int) -> None:
    tables = [Table(f"{width} {copies}", width, copies=copies) for width in (1, 2, 3, 5, 7) for copies in (1, 3)]
    slots = SlotArena(tables, num_slots, torch.device("cpu"))
    for table in tables:
        assert slots.position(table.name, 0) % 4 == 0 and slots.view(table.name).data_ptr() % 16 == 0, table


def test_too_large_an_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SlotArena([Table("history", 2**26)], 64, torch.device("meta"))


def test_edits_land_where_they_should_and_nowhere_else() -> None:
    slots = arena()
    plan = StepPlan(
        step=0,
        slots=np.array([3, 1], np.int32),
        query_lens=np.array([1, 4], np.int32),
        starts_bound=np.array([0, 0], np.int32),
        samples=np.array([True, False]),
        num_decode_rows=1,
    )
    ints = np.full(8000, -9, np.int32)
    packed = PackedStep(ints, PackedRows(plan), result_index=6)
    long = np.arange(2500, dtype=np.int32)
    packed.write(slots.position("long", 2), long)
    packed.scatter(np.array([slots.position("a", 0), slots.position("real", 4)]), np.array([5, 0x3F800000], np.int32))
    where = packed.list_at(np.array([8, 9], np.int32))
    used = packed.finish()
    assert ints[:6].tolist() == [5, used - 15, 2, 5, ROWS_AT, 6]
    assert ints[ROWS_AT : ROWS_AT + 8].tolist() == [3, 1, 0, 1, 1, 4, 1, 0]
    assert ints[where : where + 2].tolist() == [8, 9]
    assert (ints[used:] == -9).all()
    assert used == ROWS_AT + 8 + segment_ints(2500) + 2 * segment_ints(1) + 2
    apply_edits(slots.ints, torch.from_numpy(ints), 5)
    assert slots.view("long")[2, :2500].tolist() == long.tolist()
    assert slots.view("a").tolist() == [5, 0, 0, 0, 0]
    assert slots.view("real").tolist() == [0, 0, 0, 0, 1.0]
    assert int(slots.ints.count_nonzero()) == 2499 + 2


@pytest.mark.parametrize("num_values", [0, 1, 124])
def test_rows_that_were_sent_stay(num_values: int) -> None:
    plan = StepPlan(
        step=0,
        slots=np.array([3, 1], np.int32),
        query_lens=np.array([1, 1], np.int32),
        starts_bound=np.array([0, 0], np.int32),
        samples=np.array([True, True]),
        num_decode_rows=2,
    )
    ints = np.zeros(2000, np.int32)
    rows = PackedRows(plan)
    PackedStep(ints, rows, 0).finish()
    assert fits_before_rows(num_values)
    packed = PackedStep(ints, rows, 2, sent=True)
    if num_values:
        packed.scatter(np.arange(num_values), np.arange(num_values, dtype=np.int32))
    assert packed.finish() == HEADER_INTS + 4 * num_values <= ROWS_AT
    assert ints[:6].tolist() == [num_values, HEADER_INTS + num_values if num_values else 0, 2, 2, ROWS_AT, 2]
    assert ints[ROWS_AT : ROWS_AT + 8].tolist() == [3, 1, 0, 1, 1, 1, 1, 1]


def test_more_edits_than_fit_before_the_rows_are_refused() -> None:
    assert not fits_before_rows(125)


def test_overflow_is_caught() -> None:
    plan = StepPlan(
        step=0,
        slots=np.array([0], np.int32),
        query_lens=np.array([1], np.int32),
        starts_bound=np.array([0], np.int32),
        samples=np.array([True]),
        num_decode_rows=1,
    )
    packed = PackedStep(np.zeros(ROWS_AT + 14, np.int32), PackedRows(plan), 0)
    with pytest.raises(AssertionError, match="overflow"):
        packed.write(0, np.zeros(11, np.int32))

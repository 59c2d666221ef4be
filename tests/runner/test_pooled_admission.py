"""A step of whole texts writes the slot tables that admissions one by one would write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.core.plan import Admission, StepPlan, Texts
from headway.core.task import Task
from headway.kernels.apply_edits.reference import apply_edits
from headway.pooling.spec import PoolingSpec
from headway.pooling.text import pooling_tables
from headway.runner.pooled_admission import PooledAdmissions
from headway.state.packed_step import ROW_INTS, ROWS_AT, PackedRows, PackedStep
from headway.state.slots import SlotArena, core_tables
from headway.state.token_types import ADAPTER, type_tables
from tests.engine.tiny_encoders import message

SLOTS = 4


def arena(with_types: bool) -> SlotArena:
    tables = [*core_tables(3000, 1, 1), *pooling_tables(PoolingSpec(kind="embed"), 8, chunked=False)]
    made = SlotArena(tables + (type_tables(2, 3) if with_types else []), SLOTS, torch.device("cpu"))
    made.ints.fill_(-7)  # what former requests left
    return made


@pytest.mark.parametrize("with_types", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2500, 1025, 1024, 3]])
def test_texts_of_a_step_are_written_as_admissions_would_be(lengths: list[int], with_types: bool) -> None:
    rng = np.random.default_rng(1)
    requests = [
        message(str(row), rng.integers(1, 99, length).tolist(), Task.EMBED, raw=row == 1, pool_start=row)
        for row, length in enumerate(lengths)
    ]
    if with_types:
        requests[0].token_type_range = (0, 1)
    tokens = [np.array(each.prompt_token_ids, np.int32) for each in requests]
    columns = [[each.pool_start for each in requests], [each.raw for each in requests]]
    ranges = np.array([each.token_type_range for each in requests], np.int32)
    texts = Texts(
        [each.request_id for each in requests],
        np.concatenate(tokens),
        np.array(columns[0], np.int32),
        np.array(columns[1], np.int32),
        ranges,
        np.array([row % 3 for row in range(len(lengths))], np.int32),
    )
    lens = np.array(lengths, np.int32)
    rows = len(lens)
    slots = np.arange(rows, dtype=np.int32)
    plan = StepPlan(0, slots, lens, np.zeros(rows, np.int32), np.ones(rows, np.bool_), 0, pools=True)
    found = []
    for at_once in (True, False):
        made, ints = arena(with_types), np.zeros(30_000, np.int32)
        packed, writer = PackedStep(ints, PackedRows(plan), 0), PooledAdmissions(made)
        if at_once:
            writer.write_texts(packed, lens, texts)
        else:
            pairs = enumerate(zip(requests, tokens, strict=True))
            writer.write(packed, [Admission(slot, each, ids, 0) for slot, (each, ids) in pairs])
        uploads = sum(writer.check(each) + len(ids) + 3 * -(-len(ids) // 1024) for each, ids in zip(requests, tokens))
        begun = ROWS_AT + ROW_INTS * rows
        assert packed.finish() - begun <= uploads, "a step may send more than the scheduler counts"
        apply_edits(made.ints, torch.from_numpy(ints), packed.num_edits)
        for slot, ids in enumerate(tokens):
            assert made.view("history")[slot, : len(ids)].tolist() == ids.tolist(), (
                "and both write what they were given"
            )
        if with_types:  # adapters are of whole texts alone
            adapters = made.view(ADAPTER)
            assert adapters.tolist() == (
                [0, 1, 2, 0] if at_once and rows == 4 else [0, -7, -7, -7] if at_once else [-7] * 4
            )
            adapters.fill_(0)
        found.append(made.ints)
    assert torch.equal(*found)

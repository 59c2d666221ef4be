"""What lies on the device already is not sent again, and nothing else is left out: a device that keeps what it got has each
step as a device that gets it anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from headway.core.plan import Int32s, StepPlan
from headway.runner.admission import MAX_STOP_IDS
from headway.runner.config import RunnerConfig
from headway.runner.launch import Launch
from headway.runner.packer import Packer
from headway.sampling.sampler import Sampler, sampler_tables
from headway.state.packed_step import DECODE_ROWS_AT, HEADER_INTS, ROW_INTS, ROWS_AT
from headway.state.slots import SlotArena, core_tables

SLOTS, WIDTH, VOCAB = 4, 3, 40


def packer() -> Packer:
    tables = [*core_tables(64, 4, MAX_STOP_IDS, WIDTH - 1), *sampler_tables(VOCAB)]
    arena = SlotArena(tables, SLOTS, torch.device("cpu"))
    sizes: dict[str, Any] = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 32, "max_model_len": 64, "block_size": 16}
    config = RunnerConfig(
        **sizes,
        vocab_size=VOCAB,
        max_logprobs=0,
        max_upload_ints=4000,
        max_in_flight=3,
        width=WIDTH,
        widths=(1, 2, WIDTH),
    )
    return Packer(arena, Sampler(arena, VOCAB), config)


def plan_of(step: int, slots: Int32s, width: int, edits: int = 0, prompts: int = 0) -> StepPlan:
    """Decode rows, and the last ``prompts`` of five tokens. ``slots`` is the same array as long as rows are the same."""
    rows = len(slots)
    lens = np.full(rows, width, np.int32)
    lens[rows - prompts :] = 5
    found = StepPlan(
        step, slots, lens, np.full(rows, 9, np.int32), np.ones(rows, np.bool_), rows - prompts, width=width
    )
    if edits:
        found.block_edit_rows = np.arange(edits, dtype=np.int32) % SLOTS
        found.block_edit_indices = found.block_edit_ids = np.arange(edits, dtype=np.int32) // SLOTS
    return found


class Device:
    """Keeps the buffer as uploads leave it."""

    def __init__(self) -> None:
        self.packer, self.ints = packer(), np.full(6000, -1, np.int32)

    def run(self, plan: StepPlan) -> Launch:
        buffer = np.full(6000, -2, np.int32)  # a staging buffer of some earlier step's
        launch = self.packer.pack(plan, buffer)
        self.packer.launched(plan)
        self.ints[: len(launch.ints)] = launch.ints
        return launch


def check(kept: Device, plan: StepPlan) -> None:
    fresh = Device()
    mine, theirs = kept.run(plan), fresh.run(plan)
    assert mine.shape == theirs.shape and mine.max_seq_len_bound == theirs.max_seq_len_bound
    for place in (2, 3, 4, DECODE_ROWS_AT):
        assert kept.ints[place] == fresh.ints[place]
    rows = slice(ROWS_AT, ROWS_AT + ROW_INTS * plan.num_rows)
    np.testing.assert_array_equal(kept.ints[rows], fresh.ints[rows])
    assert mine.num_edits == theirs.num_edits and len(mine.ints) >= HEADER_INTS


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_same_rows_of_another_width_are_sent(before: int, width: int) -> None:
    slots, device = np.array([2, 0, 3], np.int32), Device()
    check(device, plan_of(0, slots, before))
    check(device, plan_of(1, slots, width))
    check(device, plan_of(2, slots, width))


@pytest.mark.parametrize("seed", range(20))
def test_any_steps_after_any_others(seed: int) -> None:
    rng, device = random.Random(seed), Device()
    slots = np.array([0, 1], np.int32)
    for step in range(60):
        prompts = 0
        if rng.random() < 0.3:
            slots = np.array(rng.sample(range(SLOTS), rng.randrange(1, SLOTS + 1)), np.int32)
            prompts = rng.randrange(0, len(slots) + 1) if rng.random() < 0.5 else 0
        plan = plan_of(step, slots, rng.choice([1, 1, 2, 3]), rng.choice([0, 0, 1, 200]), prompts)
        check(device, plan)
        if prompts:  # rows with prompts are never the next step's
            slots = slots.copy()

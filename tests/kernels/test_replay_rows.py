"""``replay_rows``: the kernel against the reference, and the reference against its rule, row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from headway.kernels.replay_rows import replay_rows
from headway.kernels.testing import interpreter_loops

S = 9


def case(seed: int, width: int, places: int) -> tuple[Any, ...]:
    """Rows of drafts, decode rows, prompts, zombies and padding; a row here and there whose slot says what cannot be."""
    rng = random.Random(seed)
    slots, lens, starts, outcomes, stored = rng.sample(range(S), 6), [], [], [], torch.full((S, 4), -7)
    decode_rows = 3 if width == 1 else 0
    for row, slot in enumerate(slots):
        drafts = row < 3
        lens.append(width if drafts else rng.choice([1, 2, 9]))
        starts.append(rng.randrange(1, 60) if drafts else rng.choice([0, 30]))
        outcomes.append(width if drafts else rng.choice([0, 1]))
        stored[slot, 0] = max(starts[-1] - rng.randrange(places), 0) if drafts else starts[-1]
    stored[slots[0], 0] = rng.choice([int(stored[slots[0], 0]), 1000, -5])
    query_start = torch.tensor([0, *lens, 0, 0]).cumsum(0)
    ends = [0 if rng.random() < 0.2 else start + count for start, count in zip(starts, lens, strict=True)]
    packed = torch.zeros(80, dtype=torch.int32)
    packed[2], packed[4], packed[6] = len(slots), 30, decode_rows
    packed[30:54] = torch.tensor([[s, n, 0, o] for s, n, o in zip(slots, lens, outcomes, strict=True)]).view(-1)
    ints = [query_start, torch.tensor([*slots, -1, 90]), torch.tensor([*ends, 0, 5])]
    outs = torch.full((2, 8), -99, dtype=torch.int32).unbind()
    return stored.int(), packed, *(each.int() for each in ints), *outs, places, width


@pytest.mark.parametrize(("width", "places"), [(1, 8), (4, 14), (3, 5)])
def test_every_row_by_the_rule(width: int, places: int, device: str) -> None:
    for seed in range(12):
        args = case(seed, width, places)
        mine = [each.to(device) if isinstance(each, torch.Tensor) else each for each in args]
        mine[5:7] = (each.clone() for each in mine[5:7])
        mine[0] = mine[0].clone()
        before = args[0].clone()
        replay_rows.reference(*args)
        with interpreter_loops():
            replay_rows.implementation("cuda")(*mine)
        for theirs, own in zip(args[:7], mine[:7], strict=True):
            assert torch.equal(theirs, own.cpu())
        storage, _, query_start, slots, lens, stored_at, store_at = args[:7]
        wanted = before.clone()
        for row in range(8):
            count, end, slot = int(query_start[row + 1] - query_start[row]), int(lens[row]), int(slots[row])
            if not end or not count or not 0 <= slot < S:
                assert (int(stored_at[row]), int(store_at[row])) == (0, -1)
                continue
            start = end - count
            stored = max(min(max(int(before[slot, 0]), end - places), start), 0)
            store = end
            if row < 3:  # all but the first token may be rejected
                store = start + 1 if end + width - stored > places else -1
            assert (int(stored_at[row]), int(store_at[row])) == (stored, store)
            if store >= 0:
                wanted[slot, 0] = store
        assert torch.equal(storage, wanted)


def test_reference_reads_nothing_on_the_host() -> None:
    args = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in case(0, 4, 14)]
    replay_rows.reference(*args)

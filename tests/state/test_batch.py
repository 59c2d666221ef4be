"""Parts of a step: rows' last tokens alone, slices; and what tokens belong to."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from headway.core.chunks import CHUNKS_AT, chunk_table
from headway.runner import halves
from headway.state.batch import CrossBatch, GroupBatch, StepBatch
from headway.state.token_types import slots_of_tokens, token_types


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step() -> StepBatch:
    """A row that decodes, a prompt of three tokens, a zombie of two, and two rows of padding, which are no token's."""
    lens = ints(5, 3, 0, 0, 0)
    tables = torch.zeros(4, 2, dtype=torch.int32)
    return StepBatch(
        input_ids=ints(10, 11, 12, 13, 14, 15, 0),
        positions=ints(4, 0, 1, 2, 7, 8, 0),
        query_start=ints(0, 1, 4, 6, 6, 6),
        seq_lens=lens,
        row_slots=ints(2, 0, 1, -1, -1),
        logit_indices=ints(0, 3, 5, 0, 0),
        groups=(
            GroupBatch(tables, ints(36, 16, 17, 18, -1, -1, -1), lens),
            GroupBatch(tables, ints(20, 0, 1, 2, -1, -1, -1), lens),
        ),
        arrivals=torch.zeros(5, 1, dtype=torch.int32),
        num_decode_rows=1,
        max_query_len=3,
        max_seq_len_bound=8,
        decode_rows=ints(1),
        selected=torch.arange(14, dtype=torch.int32).view(7, 2),
        prefix_bound=9,
        cross=CrossBatch(
            tables,
            ints(2, 0, 0, 0, 1, 1, -1),
            ints(6, 7, 7, 7, 0, 0, 0),
            torch.arange(8).int(),
            torch.zeros(7, 1).int(),
            7,
        ),
    )


def test_last_tokens_are_decode_rows_and_padding_writes_nothing() -> None:
    whole = step()
    last = whole.of_last_tokens()
    assert last.input_ids[:3].tolist() == [10, 13, 15] and last.positions[:3].tolist() == [4, 2, 8]
    assert last.query_start.tolist() == [0, 1, 2, 3, 4, 5] and last.logit_indices.tolist() == [0, 1, 2, 3, 4]
    assert (last.num_decode_rows, last.max_query_len, last.decode_rows, last.reads_this_step) == (5, 1, None, True)
    assert last.seq_lens.tolist() == whole.seq_lens.tolist() and last.prefix_bound == 0
    for mine, slots in zip(last.groups, ([36, 18, -1, -1, -1], [20, 2, -1, -1, -1]), strict=True):
        assert mine.kv_slots.tolist() == slots, "a row of padding is no other row's token"
    assert last.selected is not None and last.selected[:3].tolist() == [[0, 1], [6, 7], [10, 11]]
    assert last.cross is not None and last.cross.lens[:3].tolist() == [6, 7, 0] and len(last.cross.arrivals) == 5
    assert whole.groups[0].kv_slots.tolist()[:4] == [36, 16, 17, 18], "the step itself is left as it is"


def test_tokens_that_live() -> None:
    whole = step()
    assert (whole.live_tokens() >= 0).tolist() == [True] * 4 + [False] * 3
    assert (whole.live_tokens(last_only=True) >= 0).tolist() == [True, True, False, False, False]
    whole.groups = ()  # of texts that cache nothing the lengths tell
    assert (whole.live_tokens() >= 0).tolist() == [True] * 4 + [False] * 3
    assert (whole.live_tokens(last_only=True) >= 0).tolist() == [True, True, False, False, False]


# -- random steps ------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, groups: int = 2) -> tuple[StepBatch, list[tuple[int, int, int, bool]]]:
    """A step of rows that decode, prompts and zombies, with padding behind; and its rows: (slot, start, tokens, alive)."""
    decodes = rng.randrange(4)
    rows = [
        (slot, rng.randrange(9), 1 if nth < decodes else rng.randrange(1, 6), rng.random() < 0.8)
        for nth, slot in enumerate(rng.sample(range(8), k=max(1, decodes + rng.randrange(4))))
    ]
    more_rows, more_tokens = rng.randrange(3), rng.randrange(4)
    ids, positions, starts, slots = list[int](), list[int](), [0], list[list[int]]([] for _ in range(groups))
    for slot, start, count, alive in rows:
        ids += [100 * slot + start + i for i in range(count)]
        positions += [start + i for i in range(count)]
        for number, each in enumerate(slots):
            each += [1000 * (number + 1) + 20 * slot + start + i if alive else -1 for i in range(count)]
        starts.append(starts[-1] + count)
    lens = [start + count if alive else 0 for _, start, count, alive in rows] + [0] * more_rows
    seq_lens, table = ints(*lens), torch.zeros(8, 2, dtype=torch.int32)
    batch = StepBatch(
        input_ids=ints(*ids, *[0] * more_tokens),
        positions=ints(*positions, *[0] * more_tokens),
        query_start=ints(*starts, *[starts[-1]] * more_rows),
        seq_lens=seq_lens,
        row_slots=ints(*[row[0] for row in rows], *[-1] * more_rows),
        logit_indices=ints(*[start - 1 for start in starts[1:]], *[0] * more_rows),
        groups=tuple(GroupBatch(table, ints(*each, *[-1] * more_tokens), seq_lens) for each in slots),
        arrivals=torch.zeros(len(lens), 1, dtype=torch.int32),
        num_decode_rows=decodes if len(rows) >= decodes else 0,
        max_query_len=5,
        max_seq_len_bound=20,
    )
    return batch, rows


@pytest.mark.parametrize("seed", range(20))
def test_what_tokens_belong_to(seed: int) -> None:
    batch, rows = drawn(random.Random(seed))
    owners = [row for row in rows for _ in range(row[2])]
    assert slots_of_tokens(batch)[: len(owners)].tolist() == [slot for slot, _, _, _ in owners]
    assert (slots_of_tokens(batch) >= 0).all(), "padding reads some slot's table, and none outside"
    ranges = torch.tensor([(slot % 3, slot % 3 + 4) for slot in range(8)], dtype=torch.int32)
    kinds = [int(slot % 3 <= place < slot % 3 + 4) for (slot, *_), place in zip(owners, batch.positions.tolist())]
    assert token_types(batch, ranges)[: len(owners)].tolist() == kinds
    padding = len(batch.input_ids) - len(owners)
    alive = [each[3] for each in owners] + [False] * padding
    ends = [row[3] for row in rows] + [False] * (len(batch.row_slots) - len(rows))
    for given in (batch, dataclasses.replace(batch, groups=())):  # what caches nothing goes by lengths
        assert (given.live_tokens() >= 0).tolist() == alive
        assert (given.live_tokens(last_only=True) >= 0).tolist() == ends


@pytest.mark.parametrize("seed", range(20))
def test_two_slices_are_the_step(seed: int) -> None:
    """Cut anywhere: tokens, places and rows are those of the whole, and the second slice sees the first as its context."""
    batch, rows = drawn(random.Random(seed))
    total, own = len(batch.input_ids), batch.query_start.tolist()
    for cut in range(1, total):
        for first, end in ((0, cut), (cut, total)):
            part = batch.slice(first, end)
            assert part.input_ids.tolist() == batch.input_ids[first:end].tolist()
            assert part.positions.tolist() == batch.positions[first:end].tolist()
            for mine, whole in zip(part.groups, batch.groups, strict=True):
                assert mine.kv_slots.tolist() == whole.kv_slots[first:end].tolist()
                assert mine.seq_lens.tolist() == part.seq_lens.tolist()
            wanted = []
            for nth, (slot, start, _, alive) in enumerate(rows):
                low, high = max(own[nth], first), min(own[nth + 1], end)
                if low < high:
                    wanted.append((slot, low - first, high - low, start + high - own[nth] if alive else 0))
            starts, found = part.query_start.tolist(), []
            for nth, (slot, length) in enumerate(zip(part.row_slots.tolist(), part.seq_lens.tolist(), strict=True)):
                if slot >= 0:
                    found.append((slot, starts[nth], starts[nth + 1] - starts[nth], length))
                else:
                    assert length == 0
            assert found == wanted, (first, end)
            assert part.num_decode_rows == max(0, min(end, batch.num_decode_rows) - first)
            assert len(part.arrivals) == len(part.row_slots) == len(part.logit_indices)
            for nth, (slot, begin, count, _) in enumerate(wanted):
                at = next(i for i, each in enumerate(part.row_slots.tolist()) if each == slot)
                last = own[[row[0] for row in rows].index(slot) + 1] - 1
                if first <= last < end:
                    assert int(part.logit_indices[at]) == begin + count - 1 == last - first, nth


def of_states(batch: StepBatch, rng: random.Random) -> StepBatch:
    """The step of a model with states and rings of their inputs, whose packed step has a chunk table somewhere; and with all
    that tokens can have beside their ids."""
    rows, tokens = len(batch.row_slots), len(batch.input_ids)
    lens = batch.query_start.diff()
    starts, live = batch.seq_lens - lens, (batch.seq_lens > 0) & (lens > 0)
    goes_on = torch.tensor([rng.random() < 0.5 for _ in range(rows)])
    stored = torch.where(goes_on, (starts - 1).clamp(min=0), starts)
    store = torch.where(goes_on, starts + 1 if rng.random() < 0.5 else torch.full_like(starts, -1), batch.seq_lens)
    each = torch.arange(tokens, dtype=torch.int32)
    cross = CrossBatch(
        torch.zeros(8, 2).int(), each % 8, each, torch.arange(tokens + 1).int(), torch.zeros(tokens, 1), 90
    )
    return dataclasses.replace(
        batch, chunks=ints(*[7] * 40), short=2, stored_at=torch.where(live, stored, 0), store_at=torch.where(live, store, -1),
        media_rows=each - 1, places=torch.stack((each, each + 1, each + 2)), cross=cross, prefix_bound=11,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_slices_of_steps_with_states(seed: int) -> None:
    """Each has the chunk table of its own rows. A state stands, behind each slice, where its next one, or the next step, finds
    it: a prompt's where the slice ends, one with drafts behind the first of them, once."""
    rng = random.Random(seed)
    batch = of_states(drawn(rng)[0], rng)
    assert batch.stored_at is not None and batch.store_at is not None
    total = len(batch.input_ids)
    starts = (batch.seq_lens - batch.query_start.diff()).tolist()
    cuts = sorted(rng.sample(range(1, total), k=min(2, total - 1)))
    stands = {
        int(slot): int(stored) for slot, stored in zip(batch.row_slots, batch.stored_at, strict=True) if slot >= 0
    }
    for first, end in itertools.pairwise([0, *cuts, total]):
        part = batch.slice(first, end)
        lens = part.query_start.diff()
        assert part.chunks is not None and part.stored_at is not None and part.store_at is not None
        at, count = part.chunks[CHUNKS_AT : CHUNKS_AT + 2].tolist()
        assert part.chunks[at : at + 2 * count].tolist() == chunk_table(lens.numpy(), 2).tolist()
        assert count <= part.max_chunks and part.is_slice
        assert part.prefix_bound == 11 + min(first, 4), "a row that is cut has no more in front than it has tokens"
        rows = zip(part.row_slots, lens, part.seq_lens, part.stored_at, part.store_at, strict=True)
        for slot, count_of_row, end_at, stored, store in (tuple(map(int, row)) for row in rows):
            if not end_at or not count_of_row:
                assert (stored, store) == (0, -1)
                continue
            assert stored == stands[slot] <= end_at - count_of_row, "it goes on from what there is"
            assert store < 0 or end_at - count_of_row < store <= end_at, "behind one of its own tokens"
            stands[slot] = store if store >= 0 else stands[slot]
        assert part.media_rows is not None and part.media_rows.tolist() == list(range(first - 1, end - 1))
        assert part.places is not None and part.places[2].tolist() == list(range(first + 2, end + 2))
        assert part.cross is not None and part.cross.lens.tolist() == list(range(first, end))
        assert len(part.cross.starts) == len(part.cross.arrivals) + 1 == end - first + 1
    wanted = zip(batch.row_slots.tolist(), batch.seq_lens.tolist(), batch.store_at.tolist(), starts, strict=True)
    for slot, length, store, start in wanted:
        if slot >= 0 and length > start and store >= 0:
            assert stands[slot] == store


def with_drafts(rng: random.Random, rows: int) -> StepBatch:
    """A step of rows of one to three tokens, padded to three each."""
    counts = [rng.choice((1, 3)) for _ in range(rows)]
    starts = [sum(counts[:nth]) for nth in range(rows + 1)]
    lens, tokens = ints(*[count + 10 * nth for nth, count in enumerate(counts)]), torch.arange(3 * rows).int()
    slots = torch.where(tokens < starts[-1], tokens + 50, -1).int()
    return StepBatch(
        input_ids=tokens + 1, positions=tokens + 2, query_start=ints(*starts), seq_lens=lens, row_slots=ints(*range(rows)),
        logit_indices=ints(*[min(a + w, b - 1) for w in range(3) for a, b in itertools.pairwise(starts)]),
        groups=(GroupBatch(torch.zeros(rows, 2).int(), slots, lens),), arrivals=torch.zeros(3 * rows, 1).int(),
        num_decode_rows=0, max_query_len=3, max_seq_len_bound=90, width=3, short=3, adapters=tokens,
        entering=torch.arange(3.0 * rows)[:, None], stored_at=lens - 2, store_at=lens - 1, most_tokens=3 * rows,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_steps_of_short_rows_are_cut_between_rows(seed: int) -> None:
    """Where that is only the device knows: each half has room for all that its rows can have, and all of the step's tokens are
    found again."""
    batch = with_drafts(random.Random(seed), 1 + seed % 5)
    rows, starts = len(batch.row_slots), batch.query_start.tolist()
    parts, order = halves.cut(batch)
    assert order is not None and parts[0].most_tokens == parts[1].most_tokens == -(-3 * rows // 2)
    both = torch.cat([part.input_ids for part in parts]).index_select(0, order)
    assert both[: starts[-1]].tolist() == batch.input_ids[: starts[-1]].tolist() and len(both) == len(batch.input_ids)
    middle = -(-rows // 2)
    for part, (first, end) in zip(parts, ((0, middle), (middle, rows)), strict=True):
        begin, behind, number = starts[first], starts[end], end - first
        assert part.row_slots.tolist() == (list(range(first, end)) or [-1])
        assert part.query_start.tolist()[: number + 1] == [start - begin for start in starts[first : end + 1]]
        assert part.seq_lens.tolist() == (batch.seq_lens[first:end].tolist() or [0])
        assert len(part.input_ids) <= max(3 * number, 1) and len(part.arrivals) == 3 * max(number, 1)
        own, padding = slice(0, behind - begin), slice(behind - begin, None)
        for mine, whole in ((part.input_ids, batch.input_ids), (part.groups[0].kv_slots, batch.groups[0].kv_slots)):
            assert mine[own].tolist() == whole[begin:behind].tolist()
        assert set(part.groups[0].kv_slots[padding].tolist()) <= {-1} and set(part.input_ids[padding].tolist()) <= {0}
        assert part.entering is not None and part.adapters is not None
        assert part.entering[own, 0].tolist() == list(range(begin, behind)) == part.adapters[own].tolist()
        assert (
            part.stored_at is not None and part.stored_at[:number].tolist() == (batch.seq_lens[first:end] - 2).tolist()
        )
        assert part.is_slice and part.masks is not batch.masks
        for nth in range(number):
            outcomes = part.logit_indices.view(3, -1)[:, nth] + begin
            assert outcomes.tolist() == batch.logit_indices.view(3, -1)[:, first + nth].tolist()


def test_other_steps_are_cut_at_a_token() -> None:
    decodes = dataclasses.replace(step(), num_decode_rows=5, max_query_len=1, decode_rows=None, selected=None)
    for batch in (dataclasses.replace(step(), decode_rows=None, selected=None), decodes):
        parts, order = halves.cut(batch)
        assert order is None and [len(part.input_ids) for part in parts] == [3, 4]
    for more in ({"selected": None}, {"decode_rows": None}, {"decode_rows": None, "selected": None, "ends": ints(1)}):
        assert not dataclasses.replace(step(), **more).can_be_cut

"""``step_unpack`` against a plain loop: prefill, decode, padding, zombies, and numbers that no table holds."""

from __future__ import annotations

import random

import pytest
import torch

from headway.kernels.step_unpack import step_unpack
from headway.kernels.testing import interpreter_loops
from tests.kernels.guarded import expect, ints

S, L, BS = 6, 64, 8
Rows = list[tuple[int, int, int]]  # slot, query length, samples


def _inputs(rows: Rows, seed: int = 0, width: int = L // BS) -> tuple[torch.Tensor, ...]:
    rng = random.Random(seed)
    records, first = [], 0
    for slot, query_len, samples in rows:
        records += [slot, query_len, first, samples]
        first += query_len
    packed = ints([0, 0, len(rows), first, 16, 0] + [0] * 10 + records + [9] * 7)
    history = ints([[rng.randrange(100) for _ in range(L)] for _ in range(S)])
    num_computed = ints([rng.randrange(20) for _ in range(S)])
    tables = ints([[rng.randrange(4) * 3 for _ in range(width)] for _ in range(S)])
    return packed, history, num_computed, ints([1, 1, 1, 0, 1, 1]), tables


def _oracle(args: tuple[torch.Tensor, ...], num_tokens: int, num_rows: int) -> dict[int, torch.Tensor]:
    packed, history, num_computed, alive, tables = (arg.tolist() for arg in args)
    tables = [row if isinstance(row, list) else [row] for row in tables]
    ids, positions, kv_slots = [0] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    query_start, seq_lens = [packed[3]] * (num_rows + 1), [0] * num_rows
    row_slots, logit_indices = [-1] * num_rows, [0] * num_rows
    for r in range(packed[2]):
        slot, query_len, first, _ = packed[16 + 4 * r : 20 + 4 * r]
        query_start[r], logit_indices[r] = first, first + query_len - 1
        if not 0 <= slot < S:
            continue
        row_slots[r] = slot
        start = num_computed[slot]
        if not alive[slot] or start < 0 or start + query_len > L:
            continue
        seq_lens[r] = start + query_len
        for i in range(query_len):
            position = start + i
            column = position // BS
            block = tables[slot][column] if column < len(tables[slot]) else 0
            ids[first + i], positions[first + i] = history[slot][position], position
            kv_slots[first + i] = block * BS + position % BS if block > 0 else -1
    outputs = (ids, positions, kv_slots, query_start, seq_lens, row_slots, logit_indices)
    return {5 + i: ints(output) for i, output in enumerate(outputs)}


def _check(inputs: tuple[torch.Tensor, ...], num_tokens: int, num_rows: int, max_query_len: int) -> None:
    poison = [torch.full((n,), -(2**31), dtype=torch.int32) for n in (*[num_tokens] * 3, num_rows + 1, *[num_rows] * 3)]
    args = (*inputs, *poison, BS, max_query_len)
    expect(step_unpack, args, _oracle(inputs, num_tokens, num_rows))


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    slots = rng.sample(range(S), rng.randrange(1, S + 1))
    rows = [(slot, rng.choice([1, 1, 2, 13, 40]), rng.randrange(2)) for slot in slots]
    total = sum(query_len for _, query_len, _ in rows)
    _check(_inputs(rows, seed), total + rng.randrange(20), len(rows) + rng.randrange(3), max(q for _, q, _ in rows))


@pytest.mark.parametrize("pads", [0, 1, 300])
def test_decode_path(pads: int) -> None:
    _check(_inputs([(5, 1, 1), (3, 1, 1), (0, 1, 1)]), 3 + pads, 3 + pads, 1)


def test_decode_rows_through_the_general_path_are_the_same() -> None:
    _check(_inputs([(5, 1, 1), (3, 1, 1), (0, 1, 1)]), 5, 4, 2)


@pytest.mark.parametrize("max_query_len", [1, 4])
@pytest.mark.parametrize("slot", [-1, S, 2**31 - 1, -(2**31)])
def test_slots_outside_the_tables(slot: int, max_query_len: int) -> None:
    _check(_inputs([(1, 1, 1), (slot, 1, 1), (2, 1, 1)]), 4, 4, max_query_len)


@pytest.mark.parametrize("max_query_len", [1, 4])
@pytest.mark.parametrize("start", [-1, L, L - 1, 2**31 - 1])
def test_positions_outside_the_history(start: int, max_query_len: int) -> None:
    inputs = _inputs([(1, 1, 1), (2, 1, 1)])
    inputs[2][1] = start
    _check(inputs, 3, 2, max_query_len)


def test_null_blocks_and_short_tables_give_no_kv_slot() -> None:
    inputs = _inputs([(1, 30, 1), (2, 5, 0)], width=1)
    _check((*inputs[:4], inputs[4].view(-1)), 40, 2, 30)


def test_no_rows() -> None:
    _check(_inputs([]), 4, 3, 1)
    _check(_inputs([]), 4, 3, 5)


def test_long_row_spans_many_programs() -> None:
    packed, _, num_computed, alive, _ = _inputs([(1, 3, 1), (4, 1300, 0)])
    history = torch.arange(S * 1400, dtype=torch.int32).view(S, 1400)
    tables = (torch.arange(S * 175, dtype=torch.int32) % 37).view(S, 175)
    poison = [torch.full((n,), -(2**31), dtype=torch.int32) for n in (1310, 1310, 1310, 4, 3, 3, 3)]
    start = int(num_computed[4])
    position = torch.arange(start, start + 1300)
    ids = torch.cat((history[1, int(num_computed[1]) :][:3], history[4, position], torch.zeros(7, dtype=torch.int32)))
    block = tables[4, position // BS]
    kv_slots = torch.where(block > 0, block * BS + position % BS, -1).int()
    args = (packed, history, num_computed, alive, tables, *poison, BS, 1300)
    expect(step_unpack, args, {5: ids, 8: ints([0, 3, 1303, 1303])})
    from tests.kernels.guarded import run_both

    for after, _ in run_both(step_unpack, args):
        assert torch.equal(after[7][3:1303], kv_slots) and (after[7][1303:] == -1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares three implementations on tensors of the CPU")
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("rows", "longest"), [([(5, 1, 1), (3, 1, 1), (0, 1, 1)], 1), ([(1, 13, 1), (4, 1, 1)], 13)])
def test_each_group_of_layers_has_its_own_slots(groups: int, rows: Rows, longest: int) -> None:
    """A row of kv_slots for each block table; all else as with one group. Rows of kv_slots may lie apart."""
    inputs, total = _inputs(rows), sum(query_len for _, query_len, _ in rows) + 3
    tables = torch.stack([_inputs(rows, seed)[4] for seed in range(groups)])
    wanted = [_oracle((*inputs[:4], table), total, len(rows) + 1) for table in tables]
    for function in (step_unpack.reference, step_unpack.implementation("cpu"), step_unpack.implementation("cuda")):
        outputs = [torch.full((n,), -9, dtype=torch.int32) for n in (total, total, len(rows) + 2, *[len(rows) + 1] * 3)]
        kv_slots = torch.full((groups, total + 5), -9, dtype=torch.int32)
        args = (*inputs[:4], tables, *outputs[:2], kv_slots[:, :total], *outputs[2:], BS, longest)
        with interpreter_loops():
            function(*args)
        for found, place in zip((*outputs[:2], *outputs[2:]), (5, 6, 8, 9, 10, 11), strict=True):
            assert torch.equal(found, wanted[0][place])
        for found, oracle in zip(kv_slots, wanted, strict=True):
            assert torch.equal(found[:total], oracle[7]) and (found[total:] == -9).all()

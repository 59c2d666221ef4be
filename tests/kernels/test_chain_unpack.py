"""``chain_unpack`` against a loop over the rows."""

from __future__ import annotations

import random

import pytest

from headway.kernels.chain_unpack import chain_unpack
from tests.kernels.guarded import expect, ints

S, K, L, BS, MB = 9, 3, 40, 8, 4
OUTSIDE = (-1, S, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("link", range(K + 1))
@pytest.mark.parametrize("first", [-1, -2])
def test_rows_one_by_one(link: int, first: int) -> None:
    rng = random.Random(10 * link + first)
    slots = [*rng.sample(range(S), S), *OUTSIDE] + [-1] * 25  # two programs
    rng.shuffle(slots)
    rows = len(slots)
    history = [[rng.randrange(97) for _ in range(L)] for _ in range(S)]
    known = [rng.choice([1, 2, 7, 8, 9, 16, 31, 32, 33, 39]) for _ in range(S)]
    computed = [n - 1 if rng.random() < 0.8 else max(n - 2, 0) for n in known]
    alive = [int(rng.random() < 0.8) for _ in range(S)]
    table = [[rng.randrange(1, 50) if rng.random() < 0.85 else 0 for _ in range(MB)] for _ in range(S)]
    tokens = [rng.randrange(97) for _ in range(rows)]
    drafts = [[-5] * K for _ in range(S)]
    outputs = [[0, 0, -1, 0] for _ in range(rows)]
    before = ints(drafts)
    for r, slot in enumerate(slots):
        if not 0 <= slot < S:
            continue
        if link:
            drafts[slot][link - 1] = tokens[r]
        place = known[slot] + first + link
        if (
            link < K
            and alive[slot]
            and computed[slot] == known[slot] - 1
            and 0 <= place < MB * BS
            and table[slot][place // BS]
        ):
            token = tokens[r] if link else history[slot][place]
            outputs[r] = [token, place, table[slot][place // BS] * BS + place % BS, place + 1]
    poison = [ints([-7] * rows) for _ in range(4)]
    tables = (ints(history), ints(known), ints(computed), ints(alive), ints(table))
    args = (before, ints(slots), ints(tokens), *tables, *poison, BS, link, first)
    columns = dict(zip(range(8, 12), map(ints, map(list, zip(*outputs))), strict=True))
    expect(chain_unpack, args, {0: ints(drafts), **columns})
